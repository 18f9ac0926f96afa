"""A server with speculation writes what it writes without, as checked over HTTP."""

import re

import pytest

from cluster.certified_server import WEIGHTS, check_running
from jobs import certify
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, PairConfiguration
from specdec_core.engine import Request
from specdec_core.evidence.certificate.certificate import find_certificate
from specdec_core.evidence.certificate.certify import Extent
from specdec_core.evidence.certificate.served import Asked, Reference, Speculated, compared_greedy
from specdec_core.prompts.prompt import Prompt
from specdec_core.servers.answers import ServerAddress
from specdec_core.servers.completions import AnswerServer
from specdec_core.servers.process import running
from tests.commands import assert_refused, prompts_file
from tests.local_server import engine_server
from tests.specdec_core.kinds import chain, configured

CHAIN = configured(chain(max_tokens=4))
TEXTS = ("def main(", "class A:", "import os", "x = 1", "return tokenizer.")
SHORT = ["--limit", "1", "--max-new-tokens", "8"]
PROMPTS = [Prompt(text, text) for text in TEXTS]


@pytest.fixture(scope="module")
def urls(tiny_pair):
    """Our own server with speculation, and without."""
    with (
        running(engine_server(tiny_pair, CHAIN, 4)) as speculating,
        running(engine_server(tiny_pair, AUTOREGRESSIVE, 4)) as plain,
    ):
        yield speculating, plain


def checks_of(urls, spec, texts, weights):
    speculating, plain = (ServerAddress(url=url) for url in urls)
    extent = Extent(max_new_tokens=24, texts=texts)
    against = None if weights else plain
    return check_running(speculating, against, spec, PROMPTS, extent, Observer())


def test_a_lossless_server_gets_a_certificate(urls, tiny_spec, command, tmp_path):
    chosen = PairConfiguration(pair=tiny_spec, configuration=CHAIN)
    options = ["--config", chosen.save(tmp_path / "c.yaml"), "--quick"]
    options += ["--prompts", prompts_file(tmp_path, TEXTS), "--server", urls[0]]
    done = command(certify.main, tmp_path, *options, "--against", urls[1])
    assert done.returncode == 0, done
    assert "0 differ" in done.stdout
    assert "preferred by the draft" in done.stdout
    assert find_certificate(tiny_spec, CHAIN) is None  # of our engine nothing was shown
    key = re.sub(r"\W+", "-", urls[0])
    certificate = find_certificate(tiny_spec, CHAIN, key)
    assert certificate.server.reference == urls[1]
    assert certificate.server.version
    assert certificate.checks.speed is None
    assert certificate.checks.greedy.tokens > 100


@pytest.mark.parametrize("weights", [False, True], ids=["server", "weights"])
def test_drawing_at_a_wrong_temperature_is_found(urls, tiny_spec, monkeypatch, weights):
    """As vLLM's build for CPUs does when it speculates."""

    def colder(logits, samplings):
        return (logits.float() / 0.6).softmax(dim=-1)

    monkeypatch.setattr("specdec_core.engine.judging.distributions", colder)
    found = checks_of(urls, tiny_spec, 8, weights)
    assert (found.server.reference == WEIGHTS) == weights
    assert found.checks.failures == ("distribution",)


@pytest.mark.parametrize(
    ("dtype", "margin", "passed"),
    [("float32", 0.01, False), ("bfloat16", 0.01, True), ("bfloat16", 2.0, False)],
)
def test_in_short_types_near_ties_may_differ(dtype, margin, passed):
    asked = Asked([Request("one", (1, 2), 3), Request("two", (1,), 3)], [])
    found = Speculated([[5, 6, 7], [5, 6, 7]], [])
    reference = Reference([[5, 6, 7], [5, 9, 7]], lambda tokens, preferred, other: margin)
    greedy = compared_greedy(found, reference, asked, dtype, clients=2)
    assert (greedy.differing, greedy.passed) == (1, passed)
    assert "prompt two, token 1: 6 in place of 9" in greedy.first


def test_a_server_that_drafts_nothing_by_its_metrics_is_refused(urls, tiny_pair):
    asked = Asked([Request("one", (1, 2, 1, 2, 1), 8)], [])
    speculating, plain = (
        AnswerServer(url, tiny_pair.tokenizer, tiny_pair.eos_token_ids) for url in urls
    )
    assert Speculated.of(speculating, asked, 1, Observer()).greedy
    with pytest.raises(UserError, match="drafts no candidate tokens"):
        Speculated.of(plain, asked, 1, Observer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "http://127.0.0.1:9"], "--against needs --server"),
        (["--dtype", "float32"], "--dtype needs --engine or --server"),
        (["--engine", "vllm", "--server", "http://127.0.0.1:9"], "give it or --server"),
        (["--engine", "sglang"], "it has no server that this library starts"),
        (
            ["--server", "http://127.0.0.1:9", "--against", "http://127.0.0.1:9/v1"],
            "this is --server",
        ),
        (["--server", "http://127.0.0.1:9", *SHORT], "http://127.0.0.1:9: does not answer"),
    ],
)
def test_wrong_options_are_refused(command, tmp_path, tiny_spec, options, message):
    chosen = PairConfiguration(pair=tiny_spec, configuration=CHAIN)
    done = command(certify.main, tmp_path, "--config", chosen.save(tmp_path / "c.yaml"), *options)
    assert_refused(done, message)
