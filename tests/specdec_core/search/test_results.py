"""A configuration with several draft models costs what each of them does in its own rounds."""

import numpy as np
import pytest

from cluster.sweep.trial import assess
from specdec_core.config import PairSpec, RunnerSettings, parse
from specdec_core.cost import ForwardCost, ForwardKind, ForwardTerms, Measurement
from specdec_core.cost.steps import StepTimes
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import load_pair
from specdec_core.search.load.answers import replayed_answers
from specdec_core.search.load.simulator import shapes_of, simulate_clients
from specdec_core.search.load.step_costs import StepCosts
from specdec_core.search.nearest import estimated
from specdec_core.search.results import SECONDS
from specdec_core.tokens.statistics import as_long
from tests.specdec_core.cost.examples import profile_of
from tests.specdec_core.kinds import chain, configured
from tests.specdec_core.recordings.recorded import replay_of

DRAFTS = {"medium": 0.1, "small": 0.001}
COSTS = {name: ForwardCost.constant(seconds) for name, seconds in DRAFTS.items()}
PROFILE = profile_of(ForwardCost.constant(0.02), COSTS, autoregressive_forward=0.01)
NEW_TOKENS = 24


ARMS = [chain(max_tokens=4) | {"draft": draft} for draft in DRAFTS]
BANDIT = configured({"kind": "bandit", "arms": ARMS})


@pytest.fixture(scope="module")
def pair(tiny_pair_folders):
    """A pair with two drafts that are the same but for their names."""
    drafts = dict.fromkeys(DRAFTS, str(tiny_pair_folders["draft"]))
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=256)
    spec = {"target": str(tiny_pair_folders["target"]), "drafts": drafts, "runner": runner}
    return load_pair(parse(PairSpec, spec, "test"))


@pytest.fixture(scope="module")
def replay(pair, tmp_path_factory):
    texts = [f"x{n} = {n} + " * (1 + n % 3) for n in range(6)]
    return replay_of(pair, texts, tmp_path_factory.mktemp("recorded"), NEW_TOKENS)


def decoded(configuration, replay, pair, profile):
    """The trial of the replay's prompts, decoded live."""
    prompts = replay.recording.prompts.tokens
    asked = [Request(str(n), tuple(p.tolist()), NEW_TOKENS) for n, p in enumerate(prompts)]
    return assess(configuration, Engine(pair, configuration).generate(asked), profile)


def drafting(rounds):
    """Seconds of the bandit's draft models."""
    forwards = [int(rounds.draft_forwards[rounds.arm == arm].sum()) for arm in (0, 1)]
    assert min(forwards) > 0
    return 0.1 * forwards[0] + 0.001 * forwards[1]


def test_a_bandits_estimate_is_the_sum_over_its_arms(replay, pair):
    rounds = replay.run(BANDIT)
    alone = int((rounds.drafted == 0).sum())  # the first, and those of an arm without room
    verified = 0.02 * (len(rounds.prompt) - alone) + 0.01 * alone
    expected = verified + drafting(rounds)
    trial = estimated(BANDIT, replay, PROFILE)
    assert trial.metrics[SECONDS] == pytest.approx(expected)
    # Decoded live the rounds are the same.
    live = decoded(BANDIT, replay, pair, PROFILE)
    assert live.counts == trial.counts
    assert live.metrics[SECONDS] == pytest.approx(expected)


def test_decoded_rounds_are_priced_by_the_candidates_of_each_as_replayed_ones(replay, pair):
    """One token takes longer than two, and several take longer from the fourth on."""
    wide = ForwardTerms(fixed=0.01, per_token_beyond=0.01, knee=4)
    target = ForwardCost(
        measurements=[Measurement(width=1, context=0, batch=1, seconds=0.05)],
        terms={ForwardKind.TOKEN: ForwardTerms(fixed=0.05), ForwardKind.WIDE: wide},
        r2=1.0,
    )
    profile = profile_of(target, COSTS)
    lookup = configured({"kind": "suffix", "max_tokens": 8})
    drafted = replay.run(lookup).drafted
    assert drafted.any()
    expected = sum(0.01 + 0.01 * max(n - 3, 0) if n else 0.05 for n in drafted.tolist())
    live, replayed = decoded(lookup, replay, pair, profile), estimated(lookup, replay, profile)
    assert live.counts == replayed.counts
    assert replayed.metrics[SECONDS] == pytest.approx(expected)
    assert live.metrics[SECONDS] == pytest.approx(expected)


def test_a_simulated_bandit_takes_what_its_arms_take(replay):
    answers = replayed_answers(replay, BANDIT)
    assert answers.lazy, "each draft model reads a text when it drafts"
    shapes = shapes_of(answers, len(answers))
    times = StepTimes.of(PROFILE.model_copy(update={"autoregressive_forward": None}))
    simulated = simulate_clients(StepCosts(answers, times), shapes, 1, Limits(1))
    rounds = replay.run(BANDIT)
    assert simulated.seconds == pytest.approx(0.02 * len(rounds.prompt) + drafting(rounds))


def test_outputs_of_other_lengths_take_what_as_many_tokens_would():
    """Reading takes 1 s and a token 0.1 s; the second text ends at once, the third is longer."""
    seconds = np.array([[6.0, 1.0, 11.0], [6.0, 1.0, 11.0]])
    reading, tokens, wanted = [1.0, 1.0, 1.0], [51, 1, 101], [51, 51, 51]
    same = as_long(seconds, reading, tokens, wanted)
    np.testing.assert_allclose(same, 6.0)
    np.testing.assert_array_equal(as_long(seconds, reading, tokens, tokens), seconds)
    # Where reading is not known it counts as decoding.
    unknown = as_long(seconds[:, 2:], 0.0, [101], [51])
    np.testing.assert_allclose(unknown, 11 * 51 / 101)
