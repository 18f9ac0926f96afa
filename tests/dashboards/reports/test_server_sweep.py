"""The report of a sweep of a server says what won at each load, and what failed."""

from __future__ import annotations

from dashboards.outputs.markdown import document
from dashboards.reports.server_sweep import report
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.evidence.load.result import LoadRow
from specdec_core.evidence.server_choice import ServerRace, ServerSweep
from tests.load_result import CHAIN, load_result, load_row

SHARED = {"name", "started", "command", "pair", "prompts", "max_new_tokens", "repeats", "loads"}


def race(*rows: LoadRow) -> ServerRace:
    shared = load_result()
    values = {name: getattr(shared, name) for name in SHARED}
    return ServerRace(**values, rows=list(rows), environment={"cpu": "a processor"})


def sweep() -> ServerSweep:
    """A chain is the fastest, a table of lengths faster in a second race, and a default fails."""
    plain = load_row("vLLM", "vllm", 0.1, 0.01, autoregressive=True)
    failed = load_row("vLLM n-gram K=4", "vllm", 0.1, 0.008)
    failed.runs["4"][0][2].error = "its server ended: no memory"
    chain = load_row("K=3", "vllm", 0.1, 0.005, with_ours=True)
    table = load_row("by load", "vllm", 0.1, 0.004, with_ours=True)
    return ServerSweep(
        server="vllm",
        title="vLLM",
        race=race(plain, failed, chain),
        table=race(plain, chain, table),
        configurations={"vLLM": AUTOREGRESSIVE, "K=3": CHAIN, "by load": CHAIN},
        expected={"K=3": {"1": 190.0, "4": 380.0}},
        ranked=12,
        left_out=["tree 2-1"],
        recording="traces/mine",
        times="cpu, vllm 0.32",
        best={"1": "K=3", "4": "K=3"},
        champion="by load",
        usage="vllm serve org/target",
    )


def test_it_names_the_champion_its_speeds_and_what_failed() -> None:
    shown = report(sweep())
    champion, alone, together, *rest = shown.findings
    assert champion == "champion of vLLM: by load"
    assert alone.startswith("1 client: 76 tokens/s, 1.43×")
    assert alone.endswith("over no speculation")
    assert together.startswith("4 clients: ")
    assert rest == [
        "1 client: K=3 was the fastest in the race of all modes",
        "4 clients: K=3 was the fastest in the race of all modes",
        "vLLM n-gram K=4: requests failed with 4 clients; it cannot be champion",
    ]
    assert [part.key for part in shown.parts][:2] == ["race", "table"]
    text = document(shown)
    for said in ("12 settings were ranked", "without settings there: tree 2-1", "vllm serve org"):
        assert said in text
    assert shown.metrics["speedup"].keys() == {1, 4}
    assert (shown.tags["server"], shown.tags["server_version"]) == ("vllm", "vllm 1")
    assert [run.name for run in shown.nested] == [
        f"vllm: {name}, under load" for name in ("vLLM", "vLLM n-gram K=4", "K=3")
    ]
