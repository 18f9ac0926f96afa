"""The checks of a certificate, in a server that is started or runs already."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.serving.external.process import log_file
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.base.uris import without_passwords
from specdec_core.config import Configuration, PairSpec
from specdec_core.evidence.certificate.certificate import CertifiedServer, Checks
from specdec_core.evidence.certificate.certify import FLOAT32, Extent
from specdec_core.evidence.certificate.outputs import Asked, Reference, Speculated, check_outputs
from specdec_core.evidence.certificate.served import (
    answers,
    first_turns,
    gives_logprobs,
    server_outputs,
    server_reference,
)
from specdec_core.models.pair import Pair, load_pair
from specdec_core.prompts.prompt import Prompt
from specdec_core.servers.answers import ServerAddress, served_pair
from specdec_core.servers.completions import AnswerServer
from specdec_core.servers.model_files import models_in
from specdec_core.servers.process import running
from specdec_core.servers.server import Mode, ServedMode, Server

WEIGHTS = "the target's weights in float32"


@dataclass(frozen=True)
class ServerChecks:
    """What was found of a server, and the pair with concrete data types."""

    checks: Checks
    server: CertifiedServer
    pair: PairSpec


def check_engine(
    server: Server,
    spec: PairSpec,
    configuration: Configuration,
    prompts: Sequence[Prompt],
    extent: Extent,
    observer: Observer,
) -> ServerChecks:
    """Start a server with a configuration, and then without speculation, and compare their output.

    Raises:
        UserError: the server is not installed, has no such configuration, or does not start; or
            there are too few prompts for the configuration's schedule.
    """
    clients = extent.at_a_time(configuration, prompts)
    pair = served_pair(spec, drafts=True)
    asked = first_turns(prompts, pair, extent)
    mode = server.mode_of(configuration, models_in(server, pair))
    if mode.autoregressive:
        raise UserError(f"{server.title}: {configuration.label} drafts nothing, which is no change")
    with _started(server, pair, mode, clients) as (answerer, served):
        speculated = server_outputs(answerer, asked, clients, observer)
    version, plain = served.version, Mode(server.title, {})
    with _started(server, pair, plain, clients) as (answerer, _):
        checks, compared = _compared(
            speculated, asked, pair, clients, observer, answerer, f"{version} without speculation"
        )
    certified = CertifiedServer(
        name=server.name, version=version, settings=served.settings, reference=compared
    )
    return ServerChecks(checks, certified, pair.spec)


def check_running(
    address: ServerAddress,
    against: ServerAddress | None,
    spec: PairSpec,
    configuration: Configuration,
    prompts: Sequence[Prompt],
    extent: Extent,
    observer: Observer,
) -> ServerChecks:
    """Compare the output of a running server, which has a configuration, with that of another one,
    or of the target's weights.

    Raises:
        UserError: a server does not answer, there are no weights on this machine, or there are too
            few prompts for the configuration's schedule.
    """
    clients = extent.at_a_time(configuration, prompts)
    pair = served_pair(spec, drafts=True)
    asked = first_turns(prompts, pair, extent)
    with _open(address, pair) as server:
        speculated = server_outputs(server, asked, clients, observer)
        version = server.version
    if against is None:
        checks, compared = _compared(speculated, asked, pair, clients, observer)
    else:
        with _open(against, pair) as plain:
            checks, compared = _compared(
                speculated, asked, pair, clients, observer, plain, without_passwords(against.url)
            )
    name = without_passwords(address.url)
    certified = CertifiedServer(name=name, version=version, settings={}, reference=compared)
    return ServerChecks(checks, certified, pair.spec)


def _compared(
    speculated: Speculated,
    asked: Asked,
    pair: Pair,
    clients: int,
    observer: Observer,
    plain: AnswerServer | None = None,
    name: str = "",
) -> tuple[Checks, str]:
    """The comparison with a server without speculation, or with the target's weights: with these
    also for probabilities that the server does not give. And the reference in words."""
    dtype = pair.spec.runner.target_dtype
    if plain is not None and gives_logprobs(plain, asked):
        reference = server_reference(plain, asked, pair, clients, observer)
    else:
        greedy = None if plain is None else answers(plain, asked.greedy, clients, observer)
        name = WEIGHTS if plain is None else f"{name}, for probabilities {WEIGHTS}"
        pair = load_pair(pair.spec.with_runner(**FLOAT32))
        reference = Reference.of_weights(pair, asked, observer, greedy=greedy)
    return check_outputs(speculated, reference, asked, pair, dtype, clients, observer), name


@contextmanager
def _started(
    server: Server, pair: Pair, mode: Mode, clients: int
) -> Iterator[tuple[AnswerServer, ServedMode]]:
    """A server in a mode during the block, and how it was started."""
    log = log_file(f"certify-{server.name}-{os.getpid()}")
    with TemporaryDirectory() as scratch:
        served = server.served(pair, mode, (), Path(scratch))
        process = served.process(mode.name, clients, log)
        with running(process) as url, _open(ServerAddress(url=url), pair) as answerer:
            yield answerer, served


def _open(address: ServerAddress, pair: Pair) -> closing[AnswerServer]:
    return closing(AnswerServer(address.url, pair.tokenizer, pair.eos_token_ids, address.model))
