"""Serve the champion, or the configuration of a file, over HTTP."""

from __future__ import annotations

import json
import os
import shlex
import signal
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread, Timer
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ByteSize, Field, NonNegativeInt, PositiveFloat, PositiveInt
from rich.markup import escape
from typer import Option

from dashboards.pages import PLAYGROUND
from jobs.choice import choose
from jobs.console import console, on_stop, print_configuration, run, wait_for_stop, warn
from jobs.deploy import certify_command, follow_champion
from jobs.options import Config, MaxLength, Placed, chosen_pair, numbers
from jobs.traffic import read_command, watched
from specdec_core.base.errors import UserError, os_reason
from specdec_core.config import Configuration, PairConfiguration, Placement, Value, parse

if TYPE_CHECKING:
    from ray.serve import Application

    from cluster.serving.http.access import Access
    from cluster.serving.http.samples import PromptSampling
    from cluster.serving.start import Start


_LISTENING = ("--api-key", "--host", "--port", "--ssl", "--uds")  # how a program is reached
ENDING = 20.0  # seconds in which all ends once requests under way have


class Arguments(Value):
    """The application's `args` in a Serve config file; each is the command's option."""

    config: Path | None = None
    max_length: PositiveInt | None = None
    slots: PositiveInt = 4
    queue: NonNegativeInt = 128
    step_tokens: PositiveInt = 256
    cache_tokens: PositiveInt | None = None
    share_prefixes: bool = True
    cluster: Path | None = None
    replicas: PositiveInt = 1
    api_key_file: Path | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    max_tokens_per_request: PositiveInt | None = None
    request_timeout: PositiveFloat = 3600.0
    step_timeout: PositiveFloat = 300.0
    no_auth: bool = False
    sample_prompts: Path | None = None
    sample_share: float = Field(default=0.05, gt=0, le=1)
    sample_limit: ByteSize = ByteSize(200_000_000)
    engine: str | None = None
    engine_arguments: str | None = None


def application(args: dict[str, Any]) -> Application:
    """The application for Serve config files: `import_path: jobs.serve:application`. Raises
    :class:`UserError` as the command does."""
    given = parse(Arguments, args, "args")
    if given.api_key_file is None and not given.no_auth:
        raise UserError(
            "args: every client that reaches the server could use it: give `api_key_file`, a"
            " file of `specdec serve keys`, or `no_auth: true`"
        )
    from cluster.serving.deployment import application as build  # Ray takes seconds to import

    start = _start(given, choose(given.config, given.engine))
    return build(replace(start, samples=_sampling(given)))


def _start(
    given: Arguments,
    chosen: tuple[PairConfiguration, str, int | None],
    cores: tuple[int, ...] = (),
    fresh: bool = False,
    local: bool = False,
) -> Start:
    """What the server starts from, but for its samples, which need a folder. Raises
    :class:`UserError`."""
    from cluster.serving.deployment import check_start, deployment_of
    from cluster.serving.http.pages import Page
    from cluster.serving.start import Start
    from specdec_core.engine.scheduler import Limits

    choice, source, version = chosen
    pair = chosen_pair(choice.pair, None, None, given.max_length)
    configuration = choice.configuration
    placement = None if given.cluster is None else Placement.load(given.cluster)
    access = _access(given, local)
    if given.engine is not None:
        _check_engine(given, configuration, fresh)
    elif given.engine_arguments is not None:
        raise UserError("--engine-arguments needs --engine")
    start = Start(
        deployment_of(pair, configuration, source, version, fresh, given.engine),
        limits=Limits(given.slots, given.step_tokens, given.cache_tokens, given.share_prefixes),
        queue=given.queue,
        cores=cores,
        placement=placement,
        replicas=given.replicas,
        access=access,
        step_timeout=given.step_timeout,
        engine=given.engine,
        arguments=_words(given.engine_arguments),
        page=Page(*PLAYGROUND),
    )
    check_start(start)
    return start


def _check_engine(given: Arguments, configuration: Configuration, fresh: bool) -> None:
    """Raises :class:`UserError` for a server that this library does not start, and for options that
    need this library's engine."""
    from specdec_core.servers.table import server_of

    assert given.engine is not None
    server = server_of(given.engine, stage="serve", option="--engine")
    if (reason := server.missing({})) is not None:
        raise UserError(f"--engine {given.engine}: {reason}")
    if configuration.asynchronous:
        raise UserError(f"{configuration.label} drafts on a device of its own, not in a server")
    for option, asked in (
        ("--sample-prompts", given.sample_prompts is not None),
        ("--cache-tokens", given.cache_tokens is not None),
        ("--step-tokens", given.step_tokens != Arguments.model_fields["step_tokens"].default),
        ("--no-share-prefixes", not given.share_prefixes),
        ("--fresh", fresh),
    ):
        if asked:
            raise UserError(f"{option} needs this library's engine, not --engine {given.engine}")


def _words(arguments: str | None) -> tuple[str, ...]:
    """The words of `--engine-arguments`. Raises :class:`UserError`."""
    try:
        words = tuple(shlex.split(arguments or ""))
    except ValueError as error:
        raise UserError(f"--engine-arguments: {str(error).lower()}") from None
    for word in words:
        option = word.partition("=")[0]
        if option.replace("_", "-").startswith(_LISTENING):  # vLLM takes either
            raise UserError(
                f"--engine-arguments: {option}: only this server asks the program, at a port and"
                " with a key of ours; clients have this command's own options"
            )
    return words


def _access(given: Arguments, local: bool = False) -> Access:
    """The clients that are answered, and their limits; `local`: without keys, clients that use this
    machine's own names. Raises :class:`UserError` for a file without keys."""
    from cluster.serving.http.access import Access, read_keys
    from cluster.serving.http.limits import Allowance, RequestLimits

    return Access(
        None if given.api_key_file is None else read_keys(given.api_key_file),
        Allowance(given.requests_per_minute, given.tokens_per_minute),
        RequestLimits(given.max_tokens_per_request, given.request_timeout),
        local=local and given.api_key_file is None,
    )


def _sampling(given: Arguments) -> PromptSampling | None:
    """Which prompts are kept, and where. Raises :class:`UserError` where that cannot be."""
    from cluster.serving.http.samples import PromptSampling

    if given.sample_prompts is None:
        return None
    folder = given.sample_prompts.absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--sample-prompts {folder}: not a folder for prompts: {os_reason(error)}"
        ) from None
    return PromptSampling(folder, given.sample_share, int(given.sample_limit))


def main(
    config: Config = None,
    max_length: MaxLength = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    slots: Annotated[int, Option(min=1, help="Requests decoded together; more wait.")] = 4,
    queue: Annotated[
        int, Option(min=0, help="Requests that may wait; more are refused with status 429.")
    ] = 128,
    step_tokens: Annotated[
        int,
        Option(min=1, help="Tokens that a step feeds: candidates, and chunks of new prompts."),
    ] = 256,
    cache_tokens: Annotated[
        int | None,
        Option(min=1, help="Tokens that the cache holds; unset, all that the slots can."),
    ] = None,
    share_prefixes: Annotated[
        bool,
        Option(
            "--share-prefixes/--no-share-prefixes",
            help="Do not prefill again what a prompt has in common with a sequence in the cache.",
        ),
    ] = True,
    cores: Annotated[
        str | None,
        Option(help="CPU cores that the engine's threads run on, as 0,1; unset, any."),
    ] = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Neither use nor keep what is learned while serving.")
    ] = False,
    cluster: Placed = None,
    replicas: Annotated[
        int, Option(min=1, help="Engines that share the requests, each with its own devices.")
    ] = 1,
    api_key_file: Annotated[
        Path | None,
        Option(help="File with the hashes of the API keys; see `specdec serve keys`."),
    ] = None,
    no_auth: Annotated[
        bool,
        Option("--no-auth", help="Answer every client, also from other machines, without a key."),
    ] = False,
    requests_per_minute: Annotated[
        int | None, Option(min=1, help="Requests of each key; more get status 429.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, Option(min=1, help="Tokens of prompts and answers of each key.")
    ] = None,
    max_tokens_per_request: Annotated[
        int | None, Option(min=1, help="New tokens that a request may ask for.")
    ] = None,
    request_timeout: Annotated[
        float, Option(min=0.001, help="Seconds until an answer must be complete.")
    ] = 3600.0,
    step_timeout: Annotated[
        float, Option(min=1, help="Seconds that a step may take until the engine is started again.")
    ] = 300.0,
    drain: Annotated[
        float, Option(min=0, help="Seconds that answers may still take when the server is stopped.")
    ] = 4.0,
    sample_prompts: Annotated[
        Path | None,
        Option(help="Keep a sample of the prompts in this folder, for sweeps; unset, none."),
    ] = None,
    sample_share: Annotated[
        float, Option(min=1e-6, max=1, help="Share of the requests that are kept.")
    ] = 0.05,
    sample_limit: Annotated[
        str, Option(help="Largest size of that folder, as 200MB; the oldest files are deleted.")
    ] = "200MB",
    tls_cert: Annotated[
        Path | None, Option(help="Certificate (PEM) to encrypt with; needs --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, Option(help="Its private key (PEM).")] = None,
    follow: Annotated[
        float | None,
        Option(min=1, help="Look every n seconds for a new certified champion, and serve that."),
    ] = None,
    on_drift: Annotated[
        str | None, Option(help="Command to start, without a shell, when the traffic has changed.")
    ] = None,
    engine: Annotated[
        str | None,
        Option(help="Another program's server that answers, as vllm; unset, this engine."),
    ] = None,
    engine_arguments: Annotated[
        str | None,
        Option(help='Further options of that server, as "--enable-lora --max-loras 2".'),
    ] = None,
) -> None:
    """Serve chats and completions over HTTP (OpenAI's protocol) with Ray Serve until Ctrl-C.

    With --engine another program's server answers, with its settings for the configuration. It is
    started again if it ends; requests and answers pass through unchanged."""
    options = {name: value for name, value in locals().items() if name in Arguments.model_fields}
    given = parse(Arguments, options, "options")
    from cluster.serving.control import find_server  # Ray takes seconds to import
    from cluster.serving.deployment import serving
    from cluster.serving.http.access import check_exposed
    from cluster.serving.tls import read_tls
    from cluster.session import check_alive

    bound = numbers(cores, "--cores", int) if cores is not None else ()
    start = _start(given, choose(config, engine), bound, fresh, local=not no_auth)
    tls = read_tls(tls_cert, tls_key)
    command = read_command(on_drift)
    check_exposed(host, start.access.keys, no_auth)
    start = replace(start, samples=_sampling(given))
    on_stop(signal.default_int_handler)  # until it serves
    try:
        with (
            console.status("starting Ray Serve and loading the models") as status,
            serving(start, host=host, port=port, tls=tls, drain=drain, tell=console.print) as url,
        ):
            status.stop()
            _announce(url, start, tls_cert, config)
            running = find_server(url)
            with watched(running, command, warn) if command else nullcontext():
                if follow is not None:
                    arguments = url, start.deployment.version, follow
                    Thread(target=follow_champion, args=arguments, daemon=True).start()
                try:
                    wait_for_stop(check_alive)
                finally:
                    _end_within(drain + ENDING)
                    with suppress(UserError):  # it is gone already, or some answers take longer
                        running.stop(drain)
    except KeyboardInterrupt:
        pass
    console.print("stopped")


def _end_within(seconds: float) -> None:
    """End this process then, and with it all that it has started, should that hang."""
    end = Timer(seconds, os._exit, (1,))
    end.daemon = True
    end.start()


def _announce(
    url: str, start: Start, certificate: Path | None = None, config: Path | None = None
) -> None:
    """Say that requests are answered, with one to try: a chat where the model has a template."""
    from specdec_core.models.loading import load_tokenizer
    from specdec_core.prompts.chat import template_of
    from specdec_core.search.load.answers import drafters_by_load

    deployment, slots = start.deployment, start.limits.slots
    pair, configuration = deployment.pair, deployment.configuration
    body: dict[str, Any] = {"model": pair.name, "max_tokens": 64, "stream": True}
    path = "/v1/completions"
    if template_of(load_tokenizer(pair.target)) is None:
        body["prompt"] = "def main("
    else:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is speculative decoding?"}]
    key = ' -H "Authorization: Bearer $KEY"' if start.access.keys is not None else ""
    if certificate is not None:
        key += f" --cacert {shlex.quote(str(certificate))}"
    print_configuration(configuration, deployment.source, f"[green]ready[/green]  {url}  ")
    check = certify_command(start.engine, config)
    said = deployment.certificate or f"[yellow]not certified[/yellow]: `{check}` checks it"
    console.print(said, soft_wrap=True)
    if never := [n for n in drafters_by_load(configuration.drafter) if n > slots]:
        warn(
            f"--slots {slots}: what drafts from {' and '.join(map(str, never))} requests on never"
            f" does; --slots {max(never)} or more"
        )
    console.print(
        f"\n  curl -N {url}{path} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{escape(json.dumps(body))}'\n"
        + (f"\nA page to try it: {url}/" if start.engine is None else "")
        + "\nCtrl-C stops the server.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    run(main)
