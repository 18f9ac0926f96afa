"""Clients of other projects succeed, each from its own environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.serving.server_process import running
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, PairSpec
from specdec_core.models.pair import Pair
from tests.conformance.__main__ import main
from tests.conformance.field_clients import Outcome, Target, schemathesis, vllm_bench
from tests.local_server import engine_server

app = typer.Typer()
app.command()(main)
PEERS = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"


@pytest.mark.long
@pytest.mark.skipif(not PEERS.exists(), reason="`make bench-peers` makes vLLM's environment")
def test_vllms_benchmark_completes(chat_url: str, chat_spec: PairSpec) -> None:
    outcomes = list(vllm_bench(PEERS, Target(chat_url, "tiny", chat_spec.target), 12))
    assert [(outcome.requests, outcome.failed, outcome.said) for outcome in outcomes] == [
        (12, 0, "")
    ] * 2


def test_a_client_that_writes_no_result_has_failed() -> None:
    nobody = Target("http://127.0.0.1:9", "tiny", "nowhere")
    for client in (vllm_bench, schemathesis):
        for outcome in client(Path("/bin/false"), nobody, 1):
            assert not outcome.passed
        with pytest.raises(UserError, match="no such program"):
            list(client(Path("/no/such/program"), nobody, 1))
    assert Outcome("client", "/", 3, 0).passed
    assert not Outcome("client", "/", 3, 1).passed


def test_a_server_without_a_chat_template_is_asked_for_completions(
    tiny_pair: Pair,
) -> None:
    with running(engine_server(tiny_pair, AUTOREGRESSIVE, 2)) as url:
        asked = [url, "--tokenizer", "x", "--vllm", "/bin/false"]
        said = CliRunner().invoke(app, asked).output
    assert "no chat template: completions alone" in said
    assert said.count("failed  vllm bench serve") == said.count("/v1/completions: 0 requests") == 1


def test_the_command_names_what_it_needs() -> None:
    asked = ["http://127.0.0.1:9", "--tokenizer", "x"]
    nothing = CliRunner().invoke(app, asked)
    assert "name a client" in str(nothing.exception)
    gone = CliRunner().invoke(app, [*asked, "--vllm", sys.executable])
    assert "does not tell its models" in str(gone.exception)
