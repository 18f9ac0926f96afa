"""A profile turns counts into seconds by the papers' equations."""

from dataclasses import replace

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.cost import ForwardCost, Measurement, Profile
from specdec_core.tokens.statistics import Counts
from tests.specdec_core.cost.examples import counts, truth
from tests.specdec_core.kinds import chain, configured, drafter, policy


class TestProfile:
    def test_estimate_is_equation_3_1_with_the_width_of_verification(self, profile):
        c = counts(n_draft=40, n_target=10, n_discarded=12)
        expected = 10 * (truth(5, 100) + 1e-4) + 40 * (1e-3 + 2e-4)
        assert profile.estimate_seconds(c, "small", context=100) == pytest.approx(expected)
        assert profile.estimate_seconds(c, None, 100) == pytest.approx(expected)

    def test_no_draft_forwards_cost_nothing(self, profile):
        lookup = Counts(1, n=30, n_draft=0, n_target=10, n_discarded=10, n_drafted=30,
                        n_accepted=20, n_target_tokens=10)  # fmt: skip
        expected = 10 * (truth(4, 256) + 1e-4)
        assert profile.estimate_seconds(lookup) == pytest.approx(expected)

    def test_what_proposes_costs_each_of_its_rounds(self, profile):
        times = profile.model_copy(
            update={"proposals": {"suffix": 2e-3, "draft small": 5e-3, "prompt_lookup": 1.0}}
        )
        model, lookup = drafter("draft_model"), drafter("suffix")
        hybrid = drafter("hybrid", lookup=lookup, otherwise=model)
        c = counts(n_draft=40, n_target=10, n_discarded=12)
        plain = times.estimate_seconds(c)
        for own, seconds in ((lookup, 2e-3), (model, 5e-3), (hybrid, 7e-3)):
            under = times.under(configured(own))
            assert under.estimate_seconds(c) == pytest.approx(plain + 10 * seconds)
            # Autoregressive decoding, which speedups compare with, has nothing that proposes.
            assert under.autoregressive_seconds(50) == times.autoregressive_seconds(50)

    def test_autoregressive_counts_cost_autoregressive_time(self, profile):
        c = counts(n_draft=0, n_target=50, n_discarded=0)
        assert profile.estimate_seconds(c) == pytest.approx(profile.autoregressive_seconds(50))
        assert profile.speedup(c) == pytest.approx(1)

    def test_a_policy_adds_its_own_time_to_each_drafted_token(self, profile):
        product = configured(chain("confidence_product"))
        fixed = configured(drafter("draft_model", draft="small"))
        measured = profile.model_copy(update={"policies": {"small confidence_product": 3e-5}})
        assert measured.under(product).t_draft("small") == pytest.approx(
            measured.t_draft("small") + 3e-5
        )
        for configuration in (fixed, Configuration()):
            assert measured.under(configuration).t_draft() == measured.t_draft()

    def test_a_forward_of_a_tree_costs_its_width(self, profile):
        measured = [Measurement(width=w, context=64, batch=1, seconds=1e-3 * w) for w in (1, 2, 8)]
        wide = profile.model_copy(update={"drafts": {"small": ForwardCost.fit(measured)}})
        chain = counts(n_draft=40, n_target=10, n_discarded=12)
        tree = replace(chain, n_draft_tokens=160)
        dearer = wide.estimate_seconds(tree, "small", 64) - wide.estimate_seconds(
            chain, "small", 64
        )
        assert dearer == pytest.approx(40 * 3e-3)
        assert wide.estimate_seconds(replace(chain, n_draft_tokens=40), "small", 64) == (
            wide.estimate_seconds(chain, "small", 64)
        )

    def test_policies_of_nested_drafters_take_their_time_too(self, profile):
        product = drafter("draft_model", policy=policy("confidence_product"))
        measured = profile.model_copy(update={"policies": {"small confidence_product": 4e-5}})
        plain = measured.t_draft()
        arms = (product, drafter("draft_model"), drafter("suffix"))
        for own, seconds in (
            (drafter("hybrid", otherwise=product), 4e-5),
            (drafter("cascade", policy=policy("confidence_product")), 4e-5),
            (drafter("fork", policy=policy("confidence_product")), 4e-5),
            (drafter("bandit", arms=arms), 2e-5),
            (drafter("tree"), 0.0),
            (drafter("suffix"), 0.0),
        ):
            assert measured.under(configured(own)).t_draft() == pytest.approx(plain + seconds)

    def test_the_policies_of_a_configuration_come_with_their_drafts(self):
        small, medium = drafter("draft_model", draft="small"), drafter("tree", draft="medium")
        arms = (small, drafter("cascade"), medium)
        found = configured(drafter("bandit", arms=arms)).policies
        assert [draft for draft, _ in found] == ["small", None]
        assert configured(drafter("bandit", arms=arms[1:])).draft == "medium"
        assert Configuration().policies == ()

    def test_nothing_generated_takes_no_time(self, profile):
        nothing = counts(0, 0, 0)
        assert profile.estimate_seconds(nothing) == 0
        assert profile.speedup(nothing) == 1

    def test_saved_profile_is_read_back_equal(self, profile, tmp_path):
        assert Profile.load(profile.save(tmp_path / "profile.json")) == profile

    @pytest.mark.parametrize("text", [None, "{", '{"target": 3}'])
    def test_missing_or_broken_profile_is_one_line(self, text, tmp_path):
        path = tmp_path / "profile.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=r"profile\.json: (no such|not a) profile") as caught:
            Profile.load(path)
        assert "\n" not in str(caught.value)

    def test_unknown_draft_is_named(self, profile):
        with pytest.raises(ValueError, match=r"'big'.*small"):
            profile.t_draft("big")
