"""A pair's forward times are measured, kept, and found again."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from research.bandits.comparison import ArmsPlan
from research.bandits.runs import replay_recording
from specdec_core.base import environment as module
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import parse
from specdec_core.cost import ForwardCost, ForwardKind, Profile
from specdec_core.measure.forward_times import forward_times, workspace_profile
from specdec_core.measure.profiling import BATCHES, measure_policies, profile_pair
from specdec_core.models.fingerprints import fingerprints
from specdec_core.models.pair import load_pair
from tests.specdec_core.cost.examples import profile_of
from tests.specdec_core.kinds import chain, configured
from tests.specdec_core.models.eagle.pair_heads import save_head_of
from tests.specdec_core.recordings.test_record import record


class Steps(Observer):
    """How many steps a stage has, and how many were done of them."""

    expected: int | None = None
    done = 0

    def stage(self, name, steps=None, done=0):
        self.expected, self.done = steps, done

    def step(self):
        self.done += 1


class TestProfilePair:
    def test_every_model_is_measured_at_every_shape(self, tiny_pair, tmp_path):
        steps = Steps()
        profile = profile_pair(tiny_pair, (1, 3), (8, 32), (1, 2), 2, observer=steps)
        shapes = set(itertools.product((1, 3), (8, 32), (1, 2)))
        for cost in (profile.target, profile.drafts["draft"]):
            assert {(m.width, m.context, m.batch) for m in cost.measurements} == shapes
            assert all(m.seconds > 0 for m in cost.measurements)
            assert set(cost.terms) == set(ForwardKind)
        assert (steps.expected, steps.done) == (6, 6)
        assert profile.t_target(3) > 0
        assert profile.t_draft() > 0
        assert profile.round_overhead >= 0
        assert profile.draft_overhead["draft"] >= 0
        assert (profile.device, profile.target_dtype) == ("cpu", "float32")
        assert Profile.load(profile.save(tmp_path / "p.json")) == profile

    def test_data_types_that_are_chosen_by_the_machine_are_named_for_a_head_too(
        self, tiny_pair, tmp_path
    ):
        save_head_of(tiny_pair, tmp_path / "head", feature_layers=(1,))
        drafts = {"eagle": str(tmp_path / "head")}
        spec = tiny_pair.spec.with_runner(draft_dtype="auto")
        pair = load_pair(spec.model_copy(update={"drafts": drafts}))
        profile = profile_pair(pair, (1,), (8,), (1,), 1)
        assert profile.draft_dtype == profile.target_dtype == "float32"

    def test_default_contexts_are_those_that_fit_and_large_batches_those_of_smaller_widths(
        self, tiny_pair
    ):
        measured = profile_pair(tiny_pair, (1, 20), repeats=1).target.measurements
        assert {m.context for m in measured} == {64}  # the tiny pair holds 256
        assert {m.batch for m in measured} == set(BATCHES)
        assert {m.batch for m in measured if m.width == 20} == {1, 2, 4}

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"widths": (0, 1)}, "widths must be at least 1"),
            ({"batches": (-2,)}, "batches must be at least 1"),
            ({"contexts": (10_000,)}, "more than the 256"),
            ({"widths": (1, 300)}, "more than the 256"),
            ({"repeats": 0}, "repeats must be at least 1"),
        ],
    )
    def test_sizes_that_make_no_sense_are_one_line(self, tiny_pair, sizes, message):
        with pytest.raises(UserError, match=message):
            profile_pair(tiny_pair, **sizes)


class TestMeasurePolicies:
    def test_each_kind_is_measured_once_for_each_draft(self, tiny_pair):
        svips = (chain("svip", threshold=threshold) for threshold in (0.5, 0.9))
        fork = {"kind": "fork", "policy": {"kind": "heuristic"}}
        drafters = [
            *(chain("fixed"), *svips, chain("pre_cut"), chain("oracle")),
            *({"kind": "tree"}, {"kind": "hybrid", "otherwise": fork}, None),
        ]
        found = measure_policies(tiny_pair, [configured(own) for own in drafters], rounds=3)
        assert set(found) == {f"draft {kind}" for kind in ("fixed", "svip", "pre_cut", "heuristic")}
        assert all(seconds > 0 for seconds in found.values())

    def test_a_head_that_does_not_exist_is_one_line(self, tiny_pair):
        with pytest.raises(UserError, match="nowhere"):
            measure_policies(tiny_pair, [configured(chain("decision", head="./nowhere"))])


def known_profile(*drafts):
    costs = {name: ForwardCost.constant(0.25) for name in drafts}
    return profile_of(ForwardCost.constant(0.5), costs, device="known")


def test_a_pairs_times_are_found_again_and_another_pairs_measured(bare_home, tiny_spec):
    kept = known_profile(*tiny_spec.drafts)
    kept.save(workspace_profile(tiny_spec))
    assert forward_times(tiny_spec, [], None) == kept
    other = tiny_spec.model_copy(
        update={"drafts": dict.fromkeys(tiny_spec.drafts, tiny_spec.target)}
    )
    assert forward_times(other, [], None).device != "known"
    assert forward_times(tiny_spec, [], None) == kept
    assert len(list(bare_home.glob("profiles/*.json"))) == 2


def test_times_of_a_recorded_pair_are_found_without_its_models(bare_home, tiny_spec, tiny_pair):
    models = shutil.copytree(Path(tiny_spec.target).parent, bare_home / "models")
    names = {"target": str(models / "target"), "drafts": {"draft": str(models / "draft")}}
    pair = tiny_spec.model_copy(update=names)
    prints, kept = fingerprints(pair), known_profile("draft")
    path = workspace_profile(pair, {**prints, "another": "0"})
    assert path == workspace_profile(pair)
    kept.save(path)
    recorded = replace(tiny_pair, spec=pair)
    recording = record(recorded, bare_home / "recorded", 2, fingerprints=prints)
    shutil.rmtree(models)
    assert forward_times(pair, [], None, weights=prints) == kept
    with pytest.raises(UserError, match="no such folder"):
        forward_times(pair, [], None)
    content = {"arms": [{"kind": "prompt_lookup"}, {"kind": "suffix"}], "bandits": [{}]}
    plan = parse(ArmsPlan, content, "test").under(pair, recording.header.sampling)
    assert "known" in replay_recording(recording, plan, None, Observer())[1]


def test_how_a_pair_is_run_names_its_times_and_what_it_holds_does_not(bare_home, tiny_spec):
    def run(**settings):
        return workspace_profile(tiny_spec.with_runner(**settings))

    assert run(max_length=99) == run()
    assert len({run(), run(compile=True), run(threads=2), run(target_dtype="bfloat16")}) == 4


def test_times_of_another_kind_of_machine_are_not_this_ones(bare_home, tiny_spec, monkeypatch):
    """Workspaces may be shared, and copied."""

    def on(**facts):
        monkeypatch.setattr(module, "environment", lambda: {"cpu": "A × 2", **facts})
        return workspace_profile(tiny_spec)

    assert on(git_commit="a") == on(git_commit="b", host="other")
    assert len({on(), on(cpu="B × 2"), on(gpu="G × 1"), on(torch="3")}) == 4


def test_a_file_that_lacks_a_draft_is_refused(bare_home, tiny_spec):
    file = known_profile("other").save(bare_home / "given.json")
    with pytest.raises(UserError, match="no forward time of draft"):
        forward_times(tiny_spec, [], file)
