"""`specdec bench offline` gives vLLM what `specdec export` writes, and the plug-in."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.bench_exported import our_modes
from specdec_core.config import Configuration, parse
from specdec_core.evidence.bench.benchmark import BenchPlan
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.servers.model_files import models_of
from specdec_core.servers.table import SERVERS

CHAIN = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 3}}
BY_LOAD = {"kind": "schedule", "ranges": {1: CHAIN, 4: None}}
SVIP = {"kind": "draft_model", "policy": {"kind": "svip", "threshold": 1.5}}


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """A place that has vLLM's interpreter, which is not run here."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").touch()
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", tmp_path / "venv")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    return tmp_path / "venv"


def chosen(*drafters):
    return tuple(parse(Configuration, {"drafter": drafter}, "test") for drafter in drafters)


@pytest.mark.parametrize("kind", [BenchPlan, LoadPlan])
def test_a_schedule_is_run_as_it_is_exported_and_as_it_is(tiny_pair, venv, kind):
    schedule = parse(Configuration, {"drafter": BY_LOAD}, "test")
    modes = our_modes(kind(pair=tiny_pair.spec, chosen=(schedule,)), tiny_pair)
    export, plug_in = modes["vllm"]
    assert export.name == f"vLLM with our export, {schedule.label}"
    assert export.settings["num_speculative_tokens_per_batch_size"] == [[1, 3, 3], [4, 1024, 0]]
    server = SERVERS["vllm"]
    told = server.counterpart(schedule.drafter, models_of(tiny_pair.spec, "speculators"))
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
    plan = BenchPlan(pair=tiny_pair.spec, chosen=chosen(SVIP, {"kind": "tree"}, {"kind": "suffix"}))
    modes = our_modes(plan, tiny_pair)["vllm"]
    assert [mode.plug_in for mode in modes] == [plan.chosen[0], plan.chosen[2]]
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("without vLLM with our export: ") == 3
    assert "no recording of" in said
    assert "needs the package arctic-inference" in said
    assert "without vLLM with our plug-in: " in said
    assert "drafts trees" in said


def test_plug_ins_are_run_by_the_drafts_that_vllm_gives_them(tiny_pair, venv, capsys):
    """An EAGLE head reads the target's features, which it does not give."""
    drafts = {**tiny_pair.spec.drafts, "eagle": "bundled:smollm2-eagle"}
    spec = tiny_pair.spec.model_copy(update={"drafts": drafts})
    plan = BenchPlan(pair=spec, plug_ins=({"drafter": SVIP},))
    pair = replace(tiny_pair, spec=spec, drafts=dict.fromkeys(drafts))
    modes = our_modes(plan, pair)["vllm"]
    assert [mode.plug_in.draft for mode in modes] == [*tiny_pair.spec.drafts]
    said = " ".join(capsys.readouterr().out.split())
    assert "without vLLM with our plug-in: bundled:smollm2-eagle: an EAGLE head reads" in said


def test_without_vllm_or_its_row_nothing_is_looked_for(tiny_pair, venv):
    plan = BenchPlan(pair=tiny_pair.spec, chosen=chosen(SVIP))
    only = plan.model_copy(update={"only": ("plug-in",)})
    modes = our_modes(only, tiny_pair)
    assert [mode.plug_in for mode in modes["vllm"]] == list(plan.chosen)
    assert modes.get("transformers", []) == []  # it does not serve: of `plug_ins` alone
    (venv / "bin/python").unlink()
    assert "vllm" not in our_modes(plan, tiny_pair)
