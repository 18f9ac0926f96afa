"""Profiles of this machine and of others turn counts into seconds."""

from dataclasses import replace
from pathlib import Path

import pytest

import jobs
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.cost import ForwardCost, Measurement, Profile
from specdec_core.tokens.statistics import Counts
from tests.specdec_core.cost.examples import counts, truth
from tests.specdec_core.kinds import configured, drafter, policy


class TestProfile:
    def test_estimate_is_equation_3_1_with_the_width_of_verification(self, profile):
        c = counts(n_draft=40, n_target=10, n_discarded=12)
        expected = 10 * (truth(5, 100) + 1e-4) + 40 * (1e-3 + 2e-4)
        assert profile.estimate_seconds(c, "small", context=100) == pytest.approx(expected)
        assert profile.estimate_seconds(c, None, 100) == pytest.approx(expected)

    def test_no_draft_forwards_cost_nothing_and_nothing_generated_takes_no_time(self, profile):
        nothing = counts(0, 0, 0)
        assert profile.estimate_seconds(nothing) == 0
        assert profile.speedup(nothing) == 1
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

    def test_a_policy_adds_its_own_time_to_each_drafted_token(self, profile):
        product = drafter("draft_model", policy=policy("confidence_product"))
        measured = profile.model_copy(update={"policies": {"small confidence_product": 4e-5}})
        plain = measured.t_draft()
        arms = (product, drafter("draft_model"), drafter("suffix"))
        for own, seconds in (
            (product, 4e-5),
            (drafter("hybrid", otherwise=product), 4e-5),
            (drafter("cascade", policy=policy("confidence_product")), 4e-5),
            (drafter("fork", policy=policy("confidence_product")), 4e-5),
            (drafter("bandit", arms=arms), 2e-5),
            (drafter("draft_model", draft="small"), 0.0),
            (drafter("tree"), 0.0),
            (drafter("suffix"), 0.0),
            (None, 0.0),
        ):
            assert measured.under(configured(own)).t_draft() == pytest.approx(plain + seconds)

    def test_the_policies_of_a_configuration_come_with_their_drafts(self):
        small, medium = drafter("draft_model", draft="small"), drafter("tree", draft="medium")
        arms = (small, drafter("cascade"), medium)
        found = configured(drafter("bandit", arms=arms)).policies
        assert [draft for draft, _ in found] == ["small", None]
        assert configured(drafter("bandit", arms=arms[1:])).draft == "medium"
        assert Configuration().policies == ()

    def test_saved_profile_is_read_back_equal(self, profile, tmp_path):
        assert Profile.load(profile.save(tmp_path / "profile.json")) == profile

    def test_a_pairs_profile_has_its_drafts_in_its_order(self, profile):
        several = profile.model_copy(update={"drafts": {"a": profile.target, **profile.drafts}})
        assert list(several.of(["small", "a"]).drafts) == ["small", "a"]
        assert several.of(["small", "b"]).drafts == profile.drafts
        several.check(["small", "a"], "p")
        with pytest.raises(UserError, match=r"p: no forward time of draft 'b' \(it has: a, small"):
            several.check(["small", "b"], "p")

    def test_unknown_draft_is_named(self, profile):
        with pytest.raises(ValueError, match=r"'big'.*small"):
            profile.t_draft("big")


SHIPPED = sorted((Path(jobs.__file__).parent / "profiles").glob("*.yaml"))

GOOD = """
device: a machine
target: 0.2
autoregressive_forward: 1e-1
drafts: {small: 0.01, "*": 5e-2}
"""


def write(folder, text):
    path = folder / "p.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def figures(tmp_path):
    return Profile.load(write(tmp_path, GOOD))


@pytest.fixture
def llama():
    path = next(path for path in SHIPPED if path.name == "llama2-7b-70b-2xA100.yaml")
    return Profile.load(path).of(["draft"])


class TestProfileOfAFewFigures:
    def test_rounds_cost_their_own_forwards_and_the_baseline_the_stand_alone_one(self, figures):
        c = counts(n_draft=40, n_target=10, n_discarded=12)
        assert figures.estimate_seconds(c, "small") == pytest.approx(40 * 0.01 + 10 * 0.2)
        assert figures.autoregressive_seconds(c.n) == pytest.approx(c.n * 0.1)
        assert figures.speedup(c) == pytest.approx(c.n * 0.1 / 2.4)

    def test_decoding_without_a_draft_is_its_own_baseline_and_no_time_depends_on_shape(
        self, figures
    ):
        assert figures.speedup(counts(n_draft=0, n_target=50, n_discarded=0)) == 1
        assert figures.t_target(1, 10) == figures.t_target(20, 4000) == 0.2
        assert figures.t_draft("small", 10) == figures.t_draft("small", 4000) == 0.01

    def test_the_star_stands_for_drafts_that_are_not_named(self, figures):
        figures.check(["other", "small"], "p")
        profile = figures.of(["other", "small"])
        assert (profile.t_draft("other"), profile.t_draft("small")) == (0.05, 0.01)
        assert profile.t_draft() == 0.05  # the pair's first draft

    def test_one_target_time_is_both(self, tmp_path):
        profile = Profile.load(write(tmp_path, "{device: m, target: 2e-1, drafts: {}}"))
        assert profile.t_target() == profile.autoregressive_seconds(1) == 0.2


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (("0.2", "-0.2"), "target: expected seconds.*greater than 0.*-0.2"),
            (("0.2", "[]"), "target: .*expected {measurements: …}"),
            (("1e-1", "0"), "autoregressive_forward: .*greater than 0"),
            (("1e-1", ".inf"), "autoregressive_forward: .*finite"),
            (("0.01", ".nan"), "drafts.small: expected seconds.*nan"),
            (("5e-2", "5 ms"), r"drafts.\*: expected seconds.*5 ms"),
            (("drafts:", "draft:"), "drafts: .*required; draft: unknown key; did you mean draft"),
            (("device: a machine", ""), "device: .*required"),
            (("drafts: {", "drafts: {{"), "not valid YAML"),
        ],
    )
    def test_is_one_line_that_names_file_and_key(self, tmp_path, change, message):
        assert change[0] in GOOD
        with pytest.raises(UserError, match=rf"p\.yaml: .*{message}") as caught:
            Profile.load(write(tmp_path, GOOD.replace(*change)))
        assert "\n" not in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(UserError, match=r"p\.yaml: no such file"):
            Profile.load(tmp_path / "p.yaml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_can_be_read(path):
    assert Profile.load(path).of(["draft"]).speedup(counts(40, 10, 12)) > 0


class TestLlama2OnTwoA100:
    """SpecDec++'s own figures come out."""

    def test_the_target_alone_makes_9_26_tokens_a_second(self, llama):
        assert 1 / llama.autoregressive_seconds(1) == pytest.approx(9.26, abs=5e-3)

    def test_the_oracle_makes_about_27_tokens_a_second(self, llama):
        # §4.1: N_target/N = 0.164 gives 27.06 tokens/s and 2.92x, as means over prompts; the rate
        # of the mean is a little lower.
        oracle = counts(n_draft=836, n_target=164, n_discarded=0)
        assert oracle.n / llama.estimate_seconds(oracle) == pytest.approx(26.37, abs=0.01)
        assert oracle.n / llama.estimate_seconds(oracle) == pytest.approx(27.06, rel=0.03)
        assert llama.speedup(oracle) == pytest.approx(2.92, rel=0.03)
