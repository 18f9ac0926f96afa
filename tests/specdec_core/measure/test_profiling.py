"""Measuring a pair covers every model and shape, and refuses sizes that make no sense."""

import itertools

import pytest

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.cost import ForwardKind, Profile
from specdec_core.measure.profiling import BATCHES, measure_policies, profile_pair
from tests.specdec_core.kinds import chain, configured


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

    def test_default_contexts_are_those_that_fit(self, tiny_pair):
        profile = profile_pair(tiny_pair, widths=(1,), batches=(1,), repeats=1)
        contexts = [m.context for m in profile.target.measurements]
        assert contexts == [64]  # the tiny pair holds 256

    def test_large_batches_are_measured_by_default_at_the_smaller_widths(self, tiny_pair):
        measured = profile_pair(tiny_pair, (1, 20), (8,), repeats=1).target.measurements
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
