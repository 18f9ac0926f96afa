"""A threshold is chosen on other prompts than it is reported on."""

from __future__ import annotations

import numpy as np
import pytest

from research.policies.judging import chosen, judging_prompts, prompt_seconds
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.cost import ForwardCost, Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.models.pair import Pair
from specdec_core.recordings.replay import Replay
from specdec_core.training.heads.examples import DEV, TEST, TRAIN, split_prompts
from tests.specdec_core.training.heads.test_examples import PROMPTS, record

PROFILE = Profile(
    target=ForwardCost.constant(1.0),
    drafts={"draft": ForwardCost.constant(0.1)},
    device="far",
    target_dtype="unknown",
    draft_dtype="unknown",
)
MANY = [np.array([number, 7]) for number in range(400)]


def test_half_the_prompts_choose_and_the_others_report() -> None:
    choose, report = judging_prompts(MANY)
    assert sorted([*choose, *report]) == list(range(len(MANY)))
    assert len(choose) / len(MANY) == pytest.approx(0.5, abs=0.08)


def test_prompts_that_were_trained_on_take_no_part() -> None:
    split = split_prompts(MANY)
    choose, report = judging_prompts(MANY, MANY)
    np.testing.assert_array_equal(choose, np.flatnonzero(split == DEV))
    np.testing.assert_array_equal(report, np.flatnonzero(split == TEST))
    # Other heads of the same recording do.
    choose, report = judging_prompts(MANY, MANY[:200])
    taken = np.append(choose, report)
    assert not np.isin(np.flatnonzero(split[:200] == TRAIN), taken).any()
    assert np.isin(range(200, 400), taken).all()
    with pytest.raises(UserError, match="too few prompts to choose thresholds"):
        judging_prompts(MANY[:1])


@pytest.fixture(scope="module")
def replay(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Replay:
    return Replay(record(tiny_pair, tmp_path_factory.mktemp("recording"), range(len(PROMPTS))))


def test_the_seconds_of_prompts_are_those_of_their_rounds(replay: Replay) -> None:
    drafter = DraftModelSettings(draft="draft", policy=FixedSettings(max_tokens=3))
    configuration = Configuration(drafter=drafter)
    rounds = replay.run(configuration)
    seconds = prompt_seconds(rounds, PROFILE, configuration, 20)
    for number in (0, 7, len(PROMPTS) - 1):
        mine = rounds.prompt == number
        expected = mine.sum() + 0.1 * rounds.draft_forwards[mine].sum()
        assert seconds[number] == pytest.approx(expected)
    outputs = [len(output) for output in replay.recording.prompts.outputs]
    assert rounds.by_prompt(rounds.generated).tolist() == outputs
    assert seconds.sum() == pytest.approx(PROFILE.estimate_seconds(rounds.counts, "draft", 20))


def test_the_choice_is_the_fastest_on_its_own_prompts_alone(replay: Replay) -> None:
    policies = [FixedSettings(max_tokens=k) for k in range(1, 9)]
    seconds, tokens = {}, [len(output) for output in replay.recording.prompts.outputs]
    for policy in policies:
        configuration = Configuration(drafter=DraftModelSettings(draft="draft", policy=policy))
        rounds = replay.run(configuration)
        seconds[policy] = prompt_seconds(rounds, PROFILE, configuration, 20)
    for number in range(0, len(PROMPTS), 5):
        one, others = np.array([number]), np.setdiff1d(range(len(PROMPTS)), number)
        found = chosen(replay, PROFILE, "draft", policies, (one, others))
        assert seconds[found.policy][number] == min(s[number] for s in seconds.values())
        total = seconds[found.policy][others].sum()
        assert found.latency == pytest.approx(total / sum(tokens[n] for n in others))
