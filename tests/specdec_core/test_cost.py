from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from specdec_core.config import (
    ConfidencePolicy,
    Configuration,
    DraftModelDrafter,
    FixedPolicy,
    HeuristicPolicy,
    PromptLookupDrafter,
    Sampling,
    SvipPolicy,
)
from specdec_core.cost import (
    ForwardCost,
    Kind,
    Measurement,
    Profile,
    Terms,
    identity_gap,
    improvement_factor,
    latency,
    nonnegative_least_squares,
    oracle_counts,
    profile_pair,
    regress_forward_times,
)
from specdec_core.engine import Engine, Request
from specdec_core.errors import UserError
from specdec_core.pair import Pair
from specdec_core.stats import Counts

TOKEN = Terms(fixed=3e-3, per_token=0, per_cached=2e-6, per_pair=0)
ROWS = Terms(fixed=4e-3, per_token=3e-4, per_cached=4e-6, per_pair=0)
WIDE = Terms(fixed=2.5e-3, per_token=2e-4, per_cached=1e-6, per_pair=5e-8)
TRUTH = {Kind.TOKEN: TOKEN, Kind.ROWS: ROWS, Kind.WIDE: WIDE}


def measure(widths: tuple[int, ...], contexts: tuple[int, ...], batches: tuple[int, ...]):
    return [
        Measurement(width=w, context=c, batch=b, seconds=TRUTH[Kind.of(w, b)].seconds(w, c, b))
        for w, c, b in itertools.product(widths, contexts, batches)
    ]


def counts(n_draft: int, n_target: int, n_discarded: int, requests: int = 1) -> Counts:
    """Counts of chains with no skipped draft pass."""
    accepted = n_draft - n_discarded
    return Counts(
        requests=requests,
        n=accepted + n_target,
        n_draft=n_draft,
        n_target=n_target,
        n_discarded=n_discarded,
        n_drafted=n_draft,
        n_accepted=accepted,
        n_target_tokens=n_target,
    )


@pytest.fixture
def profile() -> Profile:
    target = ForwardCost.fit(measure((1, 2, 4, 8, 16), (64, 256, 512), (1, 4)))
    flat = Measurement(width=1, context=256, batch=1, seconds=1e-3)
    return Profile(
        target=target,
        drafts={"small": ForwardCost.fit([flat])},
        device="cpu",
        target_dtype="float32",
        draft_dtype="float32",
        round_overhead=1e-4,
        draft_overhead={"small": 2e-4},
    )


class TestLeastSquares:
    def test_exact_solution_is_found_whatever_the_columns_scales(self):
        rng = np.random.default_rng(0)
        columns = rng.uniform(size=(20, 4)) * [1, 1e3, 1e6, 1e-4]
        truth = np.array([2.0, 3e-3, 0.0, 5e3])
        np.testing.assert_allclose(
            nonnegative_least_squares(columns, columns @ truth), truth, rtol=1e-6, atol=1e-9
        )

    def test_agrees_with_scipy_where_the_plain_solution_is_negative(self):
        optimize = pytest.importorskip("scipy.optimize")
        rng = np.random.default_rng(1)
        for _ in range(50):
            columns, values = rng.normal(size=(12, 4)), rng.normal(size=12)
            expected, _ = optimize.nnls(columns, values)
            found = nonnegative_least_squares(columns, values)
            np.testing.assert_allclose(found, expected, atol=1e-7)

    def test_columns_that_cannot_be_told_apart_keep_the_first(self):
        columns = np.ones((5, 2))
        assert nonnegative_least_squares(columns, np.full(5, 3.0)) == pytest.approx([3.0, 0.0])


class TestForwardCost:
    def test_fit_recovers_the_cost_of_every_kind_of_forward(self):
        cost = ForwardCost.fit(measure((1, 2, 5, 16), (64, 256, 512), (1, 2, 4)))
        assert cost.r2 == pytest.approx(1)
        assert cost.worst_error < 1e-6
        for w, c, b in [(1, 1000, 1), (1, 300, 8), (9, 128, 2), (40, 2000, 16)]:
            truth = TRUTH[Kind.of(w, b)].seconds(w, c, b)
            assert cost.seconds(w, c, b) == pytest.approx(truth)

    def test_noise_lowers_r2_and_shows_in_the_worst_error(self):
        rng = np.random.default_rng(0)
        noisy = [
            m.model_copy(update={"seconds": m.seconds * rng.uniform(0.8, 1.25)})
            for m in measure((1, 2, 5, 16), (64, 256, 512), (1, 4))
        ]
        cost = ForwardCost.fit(noisy)
        assert 0.5 < cost.r2 < 0.999
        assert 0.02 < cost.worst_error < 0.5

    def test_more_work_is_never_predicted_faster_within_a_kind(self):
        # Time falls with width here, as noise or odd kernels can make it.
        falling = [
            Measurement(width=w, context=c, batch=1, seconds=1e-2 / w)
            for w in (2, 4, 8)
            for c in (64, 512)
        ]
        cost = ForwardCost.fit(falling)
        assert cost.seconds(64, 512) >= cost.seconds(2, 64) > 0

    @pytest.mark.parametrize(
        ("widths", "batches"), [((1,), (1,)), ((1,), (4,)), ((2, 8), (1,)), ((1, 4), (1,))]
    )
    def test_kinds_that_were_not_measured_are_stood_in_for(self, widths, batches):
        cost = ForwardCost.fit(measure(widths, (64, 256), batches))
        for width, batch in itertools.product((1, 1.5, 2, 7), (1, 3)):
            assert cost.seconds(width, 128, batch) > 0

    def test_mean_width_gives_the_mean_time(self):
        cost = ForwardCost.fit(measure((1, 2, 5, 16), (64, 256), (1,)))
        widths = [2, 3, 9, 14]
        mean = np.mean([cost.seconds(w, 100) for w in widths])
        assert cost.seconds(np.mean(widths), 100) == pytest.approx(mean)
        # Rounds of one and two tokens: three of four were of one.
        mixed = np.mean([cost.seconds(w, 100) for w in (1, 1, 1, 2)])
        assert cost.seconds(1.25, 100) == pytest.approx(mixed)

    def test_unset_context_is_the_median_one_measured(self):
        cost = ForwardCost.fit(measure((1, 2), (64, 256, 512), (1,)))
        assert cost.seconds(1) == cost.seconds(1, context=256)

    def test_no_measurements_are_refused(self):
        with pytest.raises(ValueError, match="no measurements"):
            ForwardCost.fit([])


class TestProfile:
    def test_estimate_is_equation_3_1_with_the_width_of_verification(self, profile):
        c = counts(n_draft=40, n_target=10, n_discarded=12)
        expected = 10 * (WIDE.seconds(5, 100, 1) + 1e-4) + 40 * (1e-3 + 2e-4)
        assert profile.estimate_seconds(c, "small", context=100) == pytest.approx(expected)
        assert profile.estimate_seconds(c.as_dict(), None, 100) == pytest.approx(expected)

    def test_no_draft_forwards_cost_nothing(self, profile):
        lookup = Counts(1, n=30, n_draft=0, n_target=10, n_discarded=10, n_drafted=30,
                        n_accepted=20, n_target_tokens=10)  # fmt: skip
        expected = 10 * (WIDE.seconds(4, 256, 1) + 1e-4)
        assert profile.estimate_seconds(lookup) == pytest.approx(expected)

    def test_autoregressive_counts_cost_autoregressive_time(self, profile):
        c = counts(n_draft=0, n_target=50, n_discarded=0)
        assert profile.estimate_seconds(c) == pytest.approx(profile.autoregressive_seconds(50))
        assert profile.speedup(c) == pytest.approx(1)

    def test_nothing_generated_takes_no_time(self, profile):
        nothing = counts(0, 0, 0)
        assert profile.estimate_seconds(nothing) == 0
        assert profile.speedup(nothing) == 1

    def test_a_batch_shares_its_forwards(self, profile):
        c = counts(n_draft=40, n_target=10, n_discarded=12)
        shared = profile.estimate_seconds(c, "small", context=100, batch=4)
        width, rounds = 5, 10 / 4
        expected = rounds * (WIDE.seconds(width, 100, 4) + 1e-4) + 40 / 4 * (1e-3 + 2e-4)
        assert shared == pytest.approx(expected)

    def test_latency_of_equation_5_1_is_the_estimate_for_each_token(self, profile):
        c = counts(n_draft=40, n_target=10, n_discarded=12)
        assert identity_gap(c) == 0
        per_token = profile.estimate_seconds(c, "small", 100, batch=2) / c.n
        assert profile.latency(c, "small", 100, batch=2) == pytest.approx(per_token)

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


class TestPaperFormulas:
    def test_latency_gives_the_papers_oracle_throughput(self):
        # SpecDec++, §4.1: N_target/N = 0.164 and 27.06 tokens/s (a mean of ratios) on their times.
        assert 1 / latency(0.0234, 0.112, 0.0, 0.164) == pytest.approx(27.06, rel=0.05)

    def test_improvement_factor_is_leviathans(self):
        assert improvement_factor(0.8, 5, 0.0) == pytest.approx(3.689, abs=1e-3)
        assert improvement_factor(0.0, 5, 0.1) == pytest.approx(1 / 1.5)
        assert improvement_factor(1.0, 5, 0.1) == pytest.approx(6 / 1.5)
        nearly = improvement_factor(1 - 1e-9, 5, 0.1)
        assert nearly == pytest.approx(improvement_factor(1.0, 5, 0.1))

    def test_improvement_factor_is_the_mean_of_simulated_rounds(self):
        alpha, gamma, c = 0.7, 4, 0.2
        rng = np.random.default_rng(0)
        accepted = np.cumprod(rng.random((200_000, gamma)) < alpha, axis=1).sum(axis=1)
        simulated = (accepted + 1).mean() / (gamma * c + 1)
        assert improvement_factor(alpha, gamma, c) == pytest.approx(simulated, rel=5e-3)

    def test_oracle_needs_a_verification_for_each_disagreement_and_one_more(self):
        c = oracle_counts([3, 0], [20, 10])
        assert (c.n, c.n_target, c.n_discarded, c.n_draft) == (30, 5, 0, 25)
        assert identity_gap(c) == 0

    def test_oracle_bounds_every_walk_that_knows_the_disagreements(self):
        rng = np.random.default_rng(0)
        for _ in range(200):
            length = int(rng.integers(1, 20))
            differs = rng.random(length) < rng.random()
            c = oracle_counts([int(differs.sum())], [length])
            position = rounds = 0
            while position < length:
                while position < length - 1 and not differs[position]:
                    position += 1
                position += 1
                rounds += 1
            # The theorem's last verification is spared where the text ends on a disagreement.
            assert rounds == c.n_target - int(differs[-1] and not differs.all())

    def test_oracle_refuses_more_disagreements_than_tokens(self):
        with pytest.raises(ValueError, match="5 disagreements in 4 tokens"):
            oracle_counts([5], [4])

    def test_oracle_of_a_profile_predicts_its_speedup(self, profile):
        c, speedup = profile.oracle([4], [40], "small")
        seconds = 40 * (TOKEN.seconds(1, 256, 1) + 1e-4)
        assert speedup == pytest.approx(seconds / profile.estimate_seconds(c, "small"))


class TestRegression:
    def test_forward_times_are_recovered_from_real_looking_runs(self):
        rng = np.random.default_rng(0)
        passes = rng.integers(20, 400, size=(60, 2))
        seconds = passes @ [0.0234, 0.112] * rng.normal(1, 0.01, size=60)
        found = regress_forward_times(
            (int(d), int(t), s) for (d, t), s in zip(passes, seconds, strict=True)
        )
        assert found.t_draft == pytest.approx(0.0234, rel=0.05)
        assert found.t_target == pytest.approx(0.112, rel=0.05)
        assert found.r2 > 0.98

    def test_standalone_runs_have_only_a_target_time(self):
        found = regress_forward_times([(0, 10, 1.0), (0, 30, 3.0)])
        assert (found.t_draft, found.t_target) == (0.0, pytest.approx(0.1))

    @pytest.mark.parametrize("runs", [[], [(4, 1, 1.0)], [(4, 1, 1.0), (8, 2, 2.0)]])
    def test_runs_that_determine_nothing_are_refused(self, runs):
        with pytest.raises(ValueError, match="too alike"):
            regress_forward_times(runs)


POLICIES = [
    FixedPolicy(max_tokens=1),
    FixedPolicy(max_tokens=4),
    HeuristicPolicy(),
    ConfidencePolicy(threshold=0.3),
    SvipPolicy(threshold=1.0),
]


def decode(pair: Pair, configuration: Configuration, slots: int = 2, **options) -> list:
    requests = [
        Request(str(i), tuple(range(5 + i, 12 + 3 * i)), 17 + 4 * i, seed=i, **options)
        for i in range(4)
    ]
    return Engine(pair, configuration, slots=slots).generate(requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.label)
class TestIdentityOnLiveCounts:
    """Lemma 3.1: N_draft + N_target = N + N_discarded."""

    def test_requests_ended_by_their_length(self, tiny_pair, policy, temperature):
        configuration = Configuration(
            drafter=DraftModelDrafter(policy=policy), sampling=Sampling(temperature=temperature)
        )
        generations = decode(tiny_pair, configuration, ignore_eos=True)
        for c in [Counts.of(generations), *(g.counts for g in generations)]:
            assert c.n_draft > 0
            assert c.n_draft + c.n_target == c.n + c.n_discarded
            assert identity_gap(c) == 0

    def test_requests_ended_by_an_end_token(self, tiny_pair, policy, temperature, monkeypatch):
        configuration = Configuration(
            drafter=DraftModelDrafter(policy=policy), sampling=Sampling(temperature=temperature)
        )
        full = decode(tiny_pair, configuration, ignore_eos=True)
        # The token that this model writes most often becomes its end token.
        end = Counter(token for g in full for token in g.tokens).most_common(1)[0][0]
        monkeypatch.setattr(tiny_pair.target.generation_config, "eos_token_id", end)
        generations = decode(tiny_pair, configuration)
        assert any(g.finish_reason == "stop" for g in generations)
        for g in generations:
            assert identity_gap(g.counts) == 0
            wasted = g.counts.n_target - g.counts.n_target_tokens
            assert wasted in ((0, 1) if g.finish_reason == "stop" else (0,))


def test_identity_gap_shows_tokens_that_cost_no_draft_forward(tiny_pair):
    configuration = Configuration(drafter=PromptLookupDrafter())
    generations = decode(tiny_pair, configuration, ignore_eos=True)
    c = Counts.of(generations)
    assert c.n_drafted > 0
    assert identity_gap(c) == -c.n_drafted


class TestProfilePair:
    def test_every_model_is_measured_at_every_shape(self, tiny_pair, tmp_path):
        steps = []
        profile = profile_pair(
            tiny_pair, (1, 3), (8, 32), (1, 2), 2, on_step=lambda *step: steps.append(step)
        )
        shapes = set(itertools.product((1, 3), (8, 32), (1, 2)))
        for cost in (profile.target, profile.drafts["draft"]):
            assert {(m.width, m.context, m.batch) for m in cost.measurements} == shapes
            assert all(m.seconds > 0 for m in cost.measurements)
            assert set(cost.terms) == set(Kind)
        assert steps == [(i, 6) for i in range(1, 7)]
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
