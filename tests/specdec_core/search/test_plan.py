"""A sweep file is checked in full, and every mistake is one line that names file and key."""

from pathlib import Path

import pytest
import yaml

from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, Sampling, identity
from specdec_core.cost.forward import ForwardCost
from specdec_core.search.plan import Plan, load_plan
from tests.conftest import save_random_head
from tests.specdec_core.cost.examples import measure

SWEEPS = Path(__file__).parents[3] / "jobs" / "sweeps"


def chain(**settings):
    return {"drafter": {"kind": "draft_model", **settings}}


FIXED = chain(policy={"kind": "fixed", "max_tokens": [2, 4]})
LOOKUP = {"drafter": {"kind": "prompt_lookup"}}
PEARL = {"kind": "pearl"}


def write(folder, **content):
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"search": [FIXED], **content}))
    return path


POLICIES = {"fixed", "heuristic", "confidence", "confidence_product", "svip", "break_even"}
POLICIES |= {"pre_cut", "specdecpp", "decision"}
COPIES, MIXED = {"prompt_lookup", "suffix"}, {"tree", "cascade", "hybrid"}


@pytest.mark.parametrize(
    ("file", "least", "families"),
    [
        ("quick", 24, POLICIES | COPIES | MIXED),
        ("llm", 14, (POLICIES - {"specdecpp", "decision"}) | COPIES | MIXED | {"dynamic_tree"}),
        ("pearl-llm", 4, {"fixed", "confidence_product", "pearl", "hybrid"}),
        ("policies", 1000, POLICIES | {"oracle"}),
    ],
)
def test_a_shipped_sweep_tries_what_it_is_for(file, least, families):
    plan = load_plan(SWEEPS / f"{file}.yaml", cluster={"draft": {"devices": 1}})
    assert len(plan.configurations) >= least
    assert {c.family for c in plan.configurations} >= families
    drafts = ([getattr(part, "draft", None) for part in c.drafter.walk()] for c in plan.samples)
    tried = {draft for own in drafts for draft in own} - {None}
    assert tried == set(plan.pair.drafts)


@pytest.mark.parametrize("file", sorted(SWEEPS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_sweep_is_valid(file):
    assert load_plan(file, cluster={"draft": {"devices": 1}}).samples


def test_a_pattern_names_the_heads_to_try():
    policy = {"kind": "decision", "head": "bundled:small-*", "cumulative": True}
    found = Plan(search=(chain(policy=policy),)).resolve().configurations or []
    heads = [("small", f"bundled:small-{head}") for head in ("joint", "t1", "t2")]
    assert [(c.drafter.draft, c.drafter.policy.head) for c in found] == heads


def test_an_entry_without_a_draft_is_tried_with_each_of_the_pairs():
    plan = Plan.model_validate({"pair": {"drafts": {"a": "x", "b": "y"}}, "search": [FIXED]})
    assert [c.drafter.draft for c in plan.resolve().configurations] == ["a", "a", "b", "b"]


def test_another_target_has_no_drafts_but_those_that_are_named():
    assert list(PairSpec.model_validate({"target": "x"}).drafts) == []
    for bundled in ({}, {"target": "bundled:target"}):
        assert list(PairSpec.model_validate(bundled).drafts) == ["medium", "small"]
    assert identity(PairSpec()) == "f5bec24014"  # unchanged since the first versions
    plan = Plan.model_validate({"pair": {"target": "x"}, "search": [FIXED, LOOKUP]})
    assert [c.family for c in plan.resolve().configurations or []] == ["prompt_lookup"]


def test_a_file_with_one_configuration_is_no_sweep_file(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump({"configuration": LOOKUP}))
    with pytest.raises(UserError, match=r"one\.yaml: one configuration, .* a sweep file has"):
        load_plan(path)


def test_a_star_stands_for_every_head_trained_for_the_draft(tiny_pair, bare_home):
    for name, kind in (("a", "specdecpp"), ("b", "specdecpp"), ("c", "t2")):
        save_random_head(tiny_pair, kind, bare_home / "heads" / name)
    search = [chain(policy={"kind": kind, "head": "*"}) for kind in ("specdecpp", "decision")]
    plan = Plan.model_validate({"pair": tiny_pair.spec.model_dump(), "search": search})
    resolved = plan.resolve()
    found = resolved.configurations
    named = [("specdecpp", "a"), ("specdecpp", "b"), ("decision", "c")]
    assert [(c.family, c.drafter.policy.head) for c in found] == named
    either = chain(policy={"kind": "specdecpp", "head": ["b*", "given", "*"]})
    listed = plan.model_copy(update={"search": (either,)}).resolve().configurations
    assert [c.drafter.policy.head for c in listed] == ["b", "given", "a"]
    save_random_head(tiny_pair, "t1", bare_home / "heads" / "d")
    assert resolved.configurations == found  # what was resolved stays
    assert plan.resolve().digest("p") != resolved.digest("p")  # another search
    # Heads of another target or sampling are none of them.
    other = tiny_pair.spec.model_copy(update={"target": tiny_pair.spec.drafts["draft"]})
    for changes in ({"pair": other}, {"sampling": Sampling(temperature=1)}):
        with pytest.raises(UserError, match="no head of this pair was trained"):
            plan.model_copy(update=changes).resolve()


def test_another_machine_is_a_file_or_its_content_and_part_of_the_digest(tmp_path):
    file = tmp_path / "h.yaml"
    far = {"device": "far", "target": 0.1, "drafts": {"*": 0.02}}
    file.write_text(yaml.safe_dump(far))
    here = load_plan(write(tmp_path))
    there = load_plan(write(tmp_path), profile=str(file))
    assert there.profile.autoregressive_seconds(1) == 0.1
    assert there.digest("p") != here.digest("p")
    inline = load_plan(write(tmp_path, profile=far))
    assert inline.digest("p") == there.digest("p")
    file.write_text(there.profile.model_dump_json())  # as `specdec profile` writes it
    assert load_plan(write(tmp_path), profile=str(file)).digest("p") == there.digest("p")
    with pytest.raises(UserError, match=r"sweep\.yaml: profile\.target: expected seconds.*-1"):
        load_plan(write(tmp_path, profile={**far, "target": -1}))


def test_forwards_of_one_row_rank_no_requests_that_are_decoded_together(tmp_path):
    """What a row adds would be anything from nothing to a whole forward."""
    alone, several = {"clients": [1]}, {"clients": [1, 4]}
    for workload in (several, {"rate": 2}):
        with pytest.raises(UserError, match=r"sweep\.yaml: forwards: batches: forwards of 1 row"):
            load_plan(write(tmp_path, workload=workload, forwards={"batches": [1]}))
    load_plan(write(tmp_path, workload=alone, forwards={"batches": [1]}))
    load_plan(write(tmp_path, workload=several, forwards={"batches": [1, 4]}))

    def machine(*rows):
        cost = ForwardCost.fit(measure((1, 4), (64,), rows)).model_dump(mode="json")
        return {"device": "far", "target": cost, "drafts": {"*": 0.02}}

    load_plan(write(tmp_path, workload=several, profile=machine(1, 2)))
    with pytest.raises(UserError, match=r"sweep\.yaml: profile: target: forwards of 1 row"):
        load_plan(write(tmp_path, workload=several, profile=machine(1)))
    far = {"device": "far", "target": 0.1, "drafts": {"*": 0.02}}  # whatever is fed
    load_plan(write(tmp_path, workload=several, profile=far))


def test_lossy_methods_are_allowed_by_name_alone(tmp_path):
    lossy = {"drafter": {"kind": "target_tree", "branching": [2, 2]}}
    exact = {"drafter": {"kind": "target_tree", "branching": [1, 2]}}
    far = {"device": "far", "target": 0.1, "drafts": {"*": 0.02}}
    assert load_plan(write(tmp_path)).allow_lossy == ()
    assert load_plan(write(tmp_path, allow_lossy=["target_tree"])).allow_lossy == ("target_tree",)
    with pytest.raises(UserError, match=r"sweep.yaml: allow_lossy: .*'all'.*target_tree"):
        load_plan(write(tmp_path, allow_lossy=["all"]))
    load_plan(write(tmp_path, search=[lossy]))  # timed, it has autoregressive decoding to lose to
    load_plan(write(tmp_path, search=[lossy, exact], profile=far))
    load_plan(write(tmp_path, search=[lossy], profile=far, allow_lossy=["target_tree"]))
    with pytest.raises(UserError, match=r"only lossy methods.*allow_lossy: \[target_tree\]"):
        load_plan(write(tmp_path, search=[lossy], profile=far))


def test_counting_by_replay_or_live_is_the_same_sweep():
    plan = Plan.model_validate({"search": [FIXED]})
    for changes in ({"replay": False}, {"traces": "recorded"}):
        assert plan.model_copy(update=changes).resolve().digest("p") == plan.resolve().digest("p")


def test_options_override_the_file_key_by_key(tmp_path):
    path = write(tmp_path, prompts={"source": "a.jsonl", "limit": 3}, max_new_tokens=5)
    plan = load_plan(path, prompts={"source": "b.jsonl"}, max_new_tokens=7)
    assert (plan.prompts.source, plan.prompts.limit, plan.max_new_tokens) == ("b.jsonl", 3, 7)


def test_a_grid_larger_than_trials_is_sampled_alike_each_time():
    many = [{"drafter": {"kind": "prompt_lookup", "max_tokens": list(range(1, 21))}}]
    plan = Plan.model_validate({"search": many, "trials": 5})
    chosen = plan.resolve().configurations
    assert len(chosen) == 5
    assert chosen == plan.resolve().configurations


def test_the_digest_follows_settings_and_prompts():
    plan = Plan.model_validate({"search": [FIXED]})
    longer = plan.model_copy(update={"max_new_tokens": 65}).resolve()
    again, plan = plan.resolve(), plan.resolve()
    assert len({plan.digest("p"), plan.digest("q"), longer.digest("p")}) == 3
    assert plan.digest("p") == again.digest("p")


BELOW = chain(policy={"kind": "svip", "threshold": -1})
CASCADE = {"drafter": {"kind": "cascade", "proposer": {"kind": ["prompt_lookup", "suffix"]}}}
ARMS = {"drafter": {"kind": "bandit", "arms": [{"kind": ["fixed", "svip"]}, 3]}}
SAMPLINGS = {**LOOKUP, "sampling": {"temperature": [0.0, 0.7]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"finalist": 3}, "finalist: unknown key; did you mean finalists?"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature: unknown key; did you mean temper"),
        ({"pair": {"runner": {"compiles": 1}}}, "pair.runner.compiles: unknown key; did you mean"),
        ({"race": {"colour": 1}}, "race.colour: unknown key; there are within, seconds, further, "),
        ({"max_new_tokens": {}}, "max_new_tokens: Input should be a valid integer"),
        ({"prompts": {"file": "x"}}, "prompts.file: unknown key; there are source, limit, chat_t"),
        ({"prompts": "bundled:seen"}, "prompts: expected {source: …} (got 'bundled:seen')"),
        ({"search": [{"kind": "suffix"}]}, "put it under `drafter:`, as drafter: {kind: suffix}"),
        ({"configuration": LOOKUP}, "configuration: unknown key"),
        ({"method": "random"}, "trials: method random needs a number of trials"),
        ({"max_new_tokens": 0}, "max_new_tokens: Input should be greater than 0 (got 0)"),
        ({"search": [chain(draft="huge")]}, "the pair has no draft 'huge' (it has: medium, small)"),
        ({"search": [SAMPLINGS]}, "a sweep compares configurations of one sampling"),
        ({"search": [BELOW]}, "search.0: drafter.policy.threshold: Input should be greater"),
        ({"search": [{"drafter": {"kind": ["suffix", "tree"]}}]}, "search.0: drafter.kind: expect"),
        ({"search": [chain(policy={"kind": ["svip", "fixed"]})]}, "(got ['svip', 'fixed'])"),
        ({"search": [ARMS]}, "arms.0.kind: expected one, and an entry for each other"),
        ({"search": [CASCADE]}, "proposer.kind: expected one, and an entry for each other"),
        ({"search": []}, "search: nothing to search"),
        ({"search": "all"}, "search: "),
    ],
)
def test_a_mistake_is_one_line_with_file_and_key(tmp_path, content, message):
    path = write(tmp_path, **content)
    with pytest.raises(UserError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nested_drafters_take_every_draft_of_the_pair(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "search:\n"
        "- drafter: {kind: bandit, arms: [1, {kind: svip}, {kind: suffix}]}\n"
        "- drafter: {kind: hybrid, otherwise: {kind: tree, draft: small}}\n"
        "- drafter: {kind: tree}\n"
        "- drafter: {kind: schedule, ranges: {1: 6, 4: null}}\n"
    )
    parts = [c.drafter.walk() for c in load_plan(path).configurations]
    drafts = [[part.draft for part in own if hasattr(part, "draft")] for own in parts]
    once = [["medium"], ["small"]]
    assert drafts == [["medium"] * 2, ["small"] * 2, ["small"], *once, *once]


def test_parts_that_an_entry_leaves_out_take_every_draft_of_the_pair():
    hybrids = [{"drafter": {"kind": "hybrid", **more}} for more in ({}, {"otherwise": PEARL})]
    plan = {"search": [*hybrids, LOOKUP], "cluster": {"draft": {"devices": 1}}}

    def drafts(**pair):
        found = Plan.model_validate({**plan, "pair": {"target": "x", **pair}}).resolve()
        return [configuration.draft for configuration in found.configurations]

    assert drafts(drafts={"a": "y", "b": "z"}) == ["a", "b", "a", "b", None]
    assert drafts() == [None]


def test_a_runner_is_overridden_key_by_key_and_drafts_as_a_whole(tmp_path):
    pair = {"target": "a", "drafts": {"x": "b"}, "runner": {"threads": 3, "max_length": 64}}
    path = write(tmp_path, pair=pair)
    change = {"drafts": {"y": "c"}, "runner": {"max_length": 4096}}
    plan = load_plan(path, pair=change)
    assert (plan.pair.target, plan.pair.drafts) == ("a", {"y": "c"})
    assert (plan.pair.runner.threads, plan.pair.runner.max_length) == (3, 4096)


def test_a_template_that_is_left_open_does_not_change_which_sweep_it_is(tmp_path):
    def digest(**prompts):
        return load_plan(write(tmp_path, prompts={"source": "a.jsonl", **prompts})).digest("0")

    assert digest() == digest(chat_template="auto") != digest(chat_template="always")
    given = load_plan(write(tmp_path, prompts={"source": "a.jsonl"})).given
    assert given["prompts"] == {"source": "a.jsonl", "limit": None}
