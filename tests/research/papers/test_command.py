"""`specdec lab papers` writes every table, repeats no work when resumed, and refuses bad plans."""

import json
import re
import signal
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest
import yaml

from research.papers import __main__ as papers
from research.papers.__main__ import PAPERS
from research.papers.inputs import load_sets, with_eagle_heads, with_own_heads
from research.papers.plan import PaperPlan, load_paper_plan
from research.papers.result import PapersResult
from research.papers.run import PapersFolder, recording_plan, run_papers
from specdec_core.base.errors import UserError
from specdec_core.config import parse
from specdec_core.models.fingerprints import fingerprints
from tests.commands import assert_refused, assert_shown, prompts_file, stopped
from tests.conftest import chat_tokenizer, save_random_head
from tests.observers import Heard
from tests.registered import runs_in

ROOT = Path(__file__).parents[3]
PLAN = """
prompts:
  absent: {source: absent.jsonl, optional: true}
  mixture: {mix: [sums, loops]}
max_new_tokens: 16
repeats: 2
tables:
  methods:
    title: Methods by task
    paper: Paper, Table 1
    prompts: [sums, loops, absent, mixture]
    columns: [tokens_per_second, speedup, mat]
    rows:
      - {name: AR}
      - {name: chain, drafter: {kind: draft_model, policy: {kind: fixed, max_tokens: 3}}}
      - {name: lookup, drafter: &lookup {kind: prompt_lookup, max_tokens: 4}}
      - {name: bandit, drafter: {kind: bandit, arms: [3, *lookup]}}
  once:
    title: Sampled
    paper: Paper, Fig. 1
    prompts: [loops]
    columns: [speedup]
    temperatures: [1]
    repeats: 1
    rows: [{name: chain, drafter: {kind: draft_model, policy: {kind: fixed, max_tokens: 3}}}]
  lengths:
    title: By λ
    paper: Paper, Table 2
    prompts: [sums]
    columns: [path_rate]
    temperatures: [0, 1]
    vary: {λ: [2, 4]}
    rows: [{name: chain, drafter: {kind: draft_model, policy: {kind: fixed, max_tokens: λ}}}]
"""


def plan(folder, spec):
    """Three small tables: one timed, over two sets and their mixture, one timed once, sampled, one
    counted, over a number."""
    sums = prompts_file(folder, ["x = 1 + 1", "y = 2 + 2"], "sums")
    loops = prompts_file(folder, ["for i in x:", "while True:"], "loops")
    sets = {"sums": {"source": ["nowhere.jsonl", str(sums)]}, "loops": {"source": str(loops)}}
    content = yaml.safe_load(PLAN)
    return {"pair": spec.model_dump(), **content, "prompts": {**sets, **content["prompts"]}}


def loaded(folder, content, **options):
    """The plan of a file with this content."""
    config = folder / "papers.yaml"
    config.write_text(json.dumps(content))  # JSON is YAML
    return load_paper_plan(config, **options)


def unmeasured(asked):
    now = datetime.now(UTC)
    return PapersResult(name="x", started=now, plan=asked, pair=asked.pair, sets={}, measured=[])


@pytest.mark.long
def test_tables_are_measured_and_written_and_an_interrupted_run_goes_on(
    command, ray_running, tiny_spec, tmp_path
):
    config, home = tmp_path / "papers.yaml", tmp_path / "home"
    config.write_text(json.dumps(plan(tmp_path, tiny_spec)))  # JSON is YAML
    blocks = home / "papers" / "mine" / "blocks"
    arguments = ["--config", str(config), "--name", "mine"]
    driver = ["-m", "research.papers", *arguments]
    stopped(home, driver, lambda: list(blocks.glob("*.json")), signal.SIGKILL)
    before = {path: path.stat().st_mtime_ns for path in blocks.glob("*.json")}

    done = command(papers.main, home, *arguments)
    assert_shown(done, "absent is left out", "tables    ")
    assert re.search(r"resuming: \d+ of 16 done", done.stdout)
    after = {path: path.stat().st_mtime_ns for path in blocks.glob("*.json")}
    assert after.items() >= before.items()  # nothing was written again
    assert {path.name for path in after} == {
        f"{name}-{repeat}.json" for name in ("sums", "loops", "mixture") for repeat in (0, 1)
    }

    folder = home / "papers" / "mine"
    result = PapersResult.load(folder)
    methods = pd.read_csv(folder / "methods.csv")
    assert set(zip(methods["method"], methods["prompts"], strict=True)) == {
        (method, prompts)
        for method in ("AR", "chain", "lookup", "bandit")
        for prompts in ("sums", "loops", "mixture")
    }
    vanilla = methods[methods["method"] == "AR"]
    assert (vanilla["speedup"] == 1).all()
    assert (vanilla["mat"] == 1).all()
    assert (methods["differing_outputs"] == 0).all()  # float32
    assert (methods[methods["method"] == "chain"]["mat"] > 1.2).all()
    lengths = pd.read_csv(folder / "lengths.csv")
    assert list(lengths["λ"]) == [2, 4, 2, 4]
    assert list(lengths["temperature"]) == [0, 0, 1, 1]
    assert lengths["path_rate"].between(0.05, 1).all()
    assert lengths["speedup"].isna().all()  # what no table times is decoded once
    assert (folder / "once.md").exists()
    for measured in result.measured:
        if measured.timing is not None:
            repeats = 2 if measured.configuration.sampling.greedy else 1
            assert len(measured.timing.seconds) == repeats
    page = (folder / "papers.md").read_text()
    for shown in ("## Methods by task", "## By λ", "| chain |", "**"):
        assert shown in page
    assert "<svg" in (folder / "papers.html").read_text()

    client, [run], _ = runs_in(home)
    assert run.info.status == "FINISHED"
    rate = lengths.set_index(["method", "λ"]).loc[("chain, T=1", 4), "path_rate"]
    logged = run.data.metrics["lengths.chain__T_1.sums.lambda_4.path_rate"]
    assert logged == pytest.approx(rate)
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files >= {"papers.md", "papers.html", "methods.csv", "lengths.md", "lengths.svg"}


@pytest.mark.long
def test_the_page_records_what_its_sections_need_and_takes_what_is_there(
    command, ray_running, tiny_spec, tmp_path
):
    config, home, page = tmp_path / "papers.yaml", tmp_path / "home", tmp_path / "page.md"
    content = plan(tmp_path, tiny_spec)
    content["tables"] = {"once": content["tables"]["once"]}
    pre_cut = {"kind": "draft_model", "policy": {"kind": "pre_cut", "max_tokens": 3}}
    content["tables"]["once"]["rows"].append({"name": "Pre-cut", "drafter": pre_cut})
    content["recordings"] = {"greedy": {"prompts": ["loops", "absent"], "max_draft": 6}}
    content["recordings"]["sampled"] = {"prompts": ["sums"], "sampling": {"temperature": 1}}
    config.write_text(json.dumps(content))
    arguments = ["--config", str(config), "--page", str(page), "--recorded", "1"]
    arguments += ["--section", "svip-t1", "--section", "mcsd-ranks"]
    done = command(papers.main, home, *arguments)
    assert_shown(done, "absent is not recorded")
    [folder] = home.glob("papers/*/finished")
    costs = PapersResult.load(folder.parent).target_costs
    assert list(costs) == ["draft"]
    text = page.read_text()
    assert f"a target forward costs {costs['draft']:g} steps of draft: measured." in text
    assert "`greedy` 1 of each of loops, absent; `sampled` 1 of each of sums" in text
    assert "### The draft's entropy at accepted and rejected tokens" in text
    assert "| loops | greedy |" in text
    assert "| sums | T=1 |" in text
    assert (tmp_path / "mcsd-ranks.svg").exists()
    kept = {p: p.stat().st_mtime_ns for p in home.glob("papers/sections/*.parquet")}
    assert len(kept) == 2
    blocks = {p: p.stat().st_mtime_ns for p in home.glob("papers/*/blocks/*.json")}
    for finished in home.glob("papers/*/finished"):
        finished.unlink()  # as if it was interrupted while it made the page

    again = command(papers.main, home, *arguments, "--section", "svip-f3a")
    assert_shown(again)
    after = {p: p.stat().st_mtime_ns for p in home.glob("papers/sections/*.parquet")}
    assert after.items() >= kept.items()
    assert len(after) == 3
    assert {p: p.stat().st_mtime_ns for p in home.glob("papers/*/blocks/*.json")} == blocks
    _, runs, _ = runs_in(home)
    assert [run.data.tags["mlflow.source.name"] for run in runs].count("specdec papers") == 1


BROKEN = {
    "set": (("tables", "methods", "prompts"), ["sum"], r"tables\.methods\.prompts: no set 'sum'"),
    "draft": (
        ("tables", "methods", "rows"),
        [{"name": "x", "drafter": {"kind": "draft_model", "draft": "big"}}],
        r"tables\.methods\.rows\.0: the pair has no draft 'big' \(it has: draft\)",
    ),
    "twice": (
        ("tables", "methods", "rows"),
        [{"name": "x"}, {"name": "x"}],
        r"tables\.methods\.rows: 'x' is there twice",
    ),
    "against": (("tables", "once", "against"), "x", r"tables\.once\.against: no row 'x'"),
    "two": (("tables", "lengths", "vary"), {"λ": [1], "w": [1]}, r"tables\.lengths\.vary: "),
    "value": (("tables", "lengths", "vary"), {"λ": [0]}, r"max_tokens: .* \(got 0\)"),
    "mix": (("prompts", "mixture"), {"mix": ["sums", "x"]}, r"prompts\.mixture\.mix: no set 'x'"),
    "both": (("prompts", "sums"), {"mix": ["loops"], "source": "x"}, "either source or mix"),
    "folder": (("tables", "a/b"), {}, r"tables\.a/b"),
    "recording": (
        ("recordings",),
        {"greedy": {"prompts": ["mixture"]}},
        r"recordings\.greedy\.prompts: no set 'mixture' to record",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_plan_is_one_line(case, tiny_spec, tmp_path):
    (*path, last), value, message = BROKEN[case]
    content = plan(tmp_path, tiny_spec)
    place = content
    for key in path:
        place = place[key]
    if case == "folder":
        value = content["tables"]["lengths"]
    place[last] = value
    with pytest.raises(UserError, match=message) as caught:
        load_sets(loaded(tmp_path, content), None, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "none"], r"--table none: .* has no such table"),
        (["--section", "svip-t1"], "--section goes with --page"),
        (["--recorded", "9"], "--recorded goes with --page"),
        (
            ["--section", "none", "--page", "x.md"],
            r"--section none: no such section \(.*svip-t1.*\)",
        ),
        (["--prompts", "HumanEval"], "expected NAME=source"),
        (["--prompts", "x=y.jsonl"], r"--prompts x=y\.jsonl: .* has no such set"),
    ],
)
def test_bad_options_are_one_line_with_exit_code_2(command, arguments, message, tmp_path):
    done = command(papers.main, tmp_path, *arguments)
    assert_refused(done, message)
    assert list(tmp_path.iterdir()) == []


def test_the_papers_plan_holds_for_any_pair():
    other = load_paper_plan(PAPERS, pair={"target": "org/large", "drafts": {"mini": "org/mini"}})
    drafts = {
        part.draft
        for key in other.tables
        for method in other.methods(key)
        for configuration in method.configurations
        if configuration.drafter
        for part in configuration.drafter.walk()
        if hasattr(part, "draft")
    }
    assert drafts == {"mini"}
    alone = load_paper_plan(PAPERS, pair={"target": "org/large", "drafts": {}})
    names = {method.name for method in alone.methods("banditspec")}
    assert {"Vanilla", "PLD", "Suffix Tree"} <= names
    assert "Dynamic tree" not in names


def test_a_plan_may_extend_another(tiny_spec, tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(plan(tmp_path, tiny_spec)))
    config = tmp_path / "own.yaml"
    own = {
        "extends": "base.yaml",
        "pair": {"runner": {"max_length": 77}},
        "prompts": {"absent": None, "sums": {"limit": 1}},
        "tables": {"once": None, "methods": {"prompts": ["loops"]}},
        "repeats": 5,
    }
    config.write_text(yaml.safe_dump(own))
    base, extended = load_paper_plan(tmp_path / "base.yaml"), load_paper_plan(config)
    assert set(extended.tables) == {"methods", "lengths"}
    assert extended.tables["methods"].prompts == ("loops",)
    assert extended.tables["methods"].rows == base.tables["methods"].rows
    assert extended.tables["lengths"] == base.tables["lengths"]
    assert extended.prompts["sums"].sources == base.prompts["sums"].sources
    assert extended.prompts["sums"].limit == 1
    assert "absent" not in extended.prompts
    assert extended.pair.target == base.pair.target
    assert extended.pair.runner.max_length == 77
    assert extended.repeats == 5


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("own.yaml", "own.yaml: extends: it extends itself"),
        (3, "own.yaml: extends: expected the path of a file"),
        ("missing.yaml", "missing.yaml: no such file"),
    ],
)
def test_a_plan_that_extends_nothing_is_refused(other, message, tmp_path):
    config = tmp_path / "own.yaml"
    config.write_text(yaml.safe_dump({"extends": other}))
    with pytest.raises(UserError) as caught:
        load_paper_plan(config)
    assert str(caught.value).endswith(message)


def test_tables_of_eagle_heads_are_for_pairs_that_have_one(tiny_spec, tmp_path):
    content = plan(tmp_path, tiny_spec)
    content["tables"]["methods"]["eagle"] = True
    observer = Heard()
    without = with_eagle_heads(loaded(tmp_path, content), observer)
    assert list(without.tables) == ["once", "lengths"]
    assert observer.warnings == ["Methods by task: left out (the pair has no EAGLE head)"]
    head = {"drafts": {**tiny_spec.drafts, "eagle": "bundled:smollm2-eagle"}}
    found = with_eagle_heads(loaded(tmp_path, content, pair=head))
    assert found.methods("methods")[1].configurations[0].draft == "eagle"
    assert found.methods("once")[0].configurations[0].draft == "draft"
    content["tables"] = {"methods": content["tables"]["methods"]}
    with pytest.raises(UserError, match="no table is left"):
        with_own_heads(loaded(tmp_path, content))


def test_sections_are_computed_from_recordings_of_draft_models(tiny_spec, tmp_path):
    content = plan(tmp_path, tiny_spec)
    content["pair"]["drafts"]["eagle"] = "bundled:smollm2-eagle"
    name = next(iter(content["prompts"]))
    content["recordings"] = {"texts": {"prompts": [name], "limit": 1, "mixing": 0.15}}
    asked = loaded(tmp_path, content)
    wanted = recording_plan(asked, asked.recordings["texts"], name, tmp_path)
    assert wanted.pair.drafts == tiny_spec.drafts
    assert (wanted.prompts.limit, wanted.max_new_tokens) == (1, asked.max_new_tokens)
    assert wanted.mixing == 0.15  # without which there are no examples of SpecDec++'s head


def test_a_result_of_other_weights_is_not_delivered(tiny_spec, tmp_path):
    """Interrupted between its last block and its end, a run has only to be delivered."""
    content = plan(tmp_path, tiny_spec)
    asked, weights = loaded(tmp_path, content), fingerprints(tiny_spec)
    result = unmeasured(asked)
    for name, kept in (("before", None), ("now", weights), ("other", {**weights, "draft": "0"})):
        folder = PapersFolder(tmp_path / "papers" / name)
        result.save(folder.path)
        if kept is not None:
            folder.keep_weights(kept)
    for name in ("before", "now"):
        assert run_papers(asked, tmp_path, name)[0] == result
    with pytest.raises(UserError, match="begun with other weights of draft; give --fresh"):
        run_papers(asked, tmp_path, "other")


def test_a_head_that_was_trained_since_has_its_rows_measured(
    tiny_spec, tiny_pair, tmp_path, monkeypatch
):
    policy = {"kind": "specdecpp", "head": str(tmp_path / "head"), "threshold": 0.5}
    content = plan(tmp_path, tiny_spec)
    content["tables"]["methods"]["rows"].append(
        {"name": "H", "drafter": {"kind": "draft_model", "policy": policy}}
    )
    asked, looked_for = loaded(tmp_path, content), []

    def measured(root, digest):
        looked_for.append(digest)
        raise InterruptedError

    monkeypatch.setattr(PapersFolder, "measured", measured)
    for trained in (False, False, True):
        if trained:
            save_random_head(tiny_pair, "specdecpp", tmp_path / "head")
        with pytest.raises(InterruptedError):
            run_papers(asked, tmp_path, again=False)
    assert looked_for[0] == looked_for[1] != looked_for[2]


def test_tables_and_prompts_can_be_fewer(tiny_spec, tmp_path):
    content = plan(tmp_path, tiny_spec)
    few = loaded(tmp_path, content, only=["lengths"], limit=1, repeats=1)
    assert list(few.tables) == ["lengths"]
    assert list(few.work(list(few.prompts))) == ["sums"]
    ((_, prompts),) = load_sets(few, None, tmp_path).values()
    assert [prompt.text for prompt in prompts] == ["x = 1 + 1"]
    mixed = load_sets(loaded(tmp_path, content, limit=1), None, tmp_path)["mixture"]
    assert [prompt.text for prompt in mixed[1]] == ["x = 1 + 1", "for i in x:"]


@pytest.mark.parametrize("config", ["papers.yaml", "papers-llm.yaml"])
def test_a_limit_leaves_enough_prompts_to_learn_from(config, tmp_path):
    """A split into train, dev and test is not possible with four."""
    few = load_paper_plan(PAPERS.with_name(config), limit=4)
    limits = {
        key: recording_plan(few, each, each.prompts[0], tmp_path).prompts.limit
        for key, each in few.recordings.items()
    }
    assert limits.pop("heads") == limits.pop("mixed") == 64
    assert max(limits.values()) == 4


def test_more_prompts_may_be_recorded_than_are_timed(tmp_path):
    loaded = load_paper_plan(PAPERS, limit=2, recorded=50)
    limits = {
        key: recording_plan(loaded, each, each.prompts[0], tmp_path).prompts.limit
        for key, each in loaded.recordings.items()
    }
    assert limits["greedy"] == limits["sampled"] == 50
    assert limits["heads"] == 64
    assert limits["long"] == 8, "its own limit"
    assert loaded.prompts["GSM8K"].limit == 2


def test_one_template_may_render_all_sets_and_a_mixture_keeps_its_parts(tiny_spec, tmp_path):
    content = plan(tmp_path, tiny_spec)
    tokenizer = chat_tokenizer()
    asked = loaded(tmp_path, content, chat_template="always", pair={"runner": {"max_length": 99}})
    runner = asked.pair.runner
    assert (runner.max_length, runner.target_dtype) == (99, tiny_spec.runner.target_dtype)
    sets = load_sets(asked, tokenizer, tmp_path)
    assert sets["sums"][1][0].text == "<|endoftext|>[user]x = 1 + 1\n[assistant]"
    parts = [*sets["sums"][1], *sets["loops"][1]]
    assert {prompt.text for prompt in sets["mixture"][1]} == {prompt.text for prompt in parts}
    assert all(prompt.template for prompt in sets["mixture"][1])

    left, mixed = plan(tmp_path, tiny_spec), plan(tmp_path, tiny_spec)
    left["prompts"]["sums"]["chat_template"] = "auto"
    assert loaded(tmp_path, content).digest({}) == parse(PaperPlan, left, "").digest({})
    mixed["prompts"]["mixture"]["chat_template"] = "always"
    with pytest.raises(UserError, match=r"prompts\.mixture: the sets that are mixed have a chat_"):
        loaded(tmp_path, mixed)
