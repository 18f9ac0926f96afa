"""What decoding recorded prompts takes, round by round: what the simulation's requests do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.by_batch import ByBatchSettings
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.rounds import ReplayedRounds


class SimulatedRound(NamedTuple):
    """A round of one request."""

    drafted: int
    generated: int
    draft_forwards: int
    draft_tokens: int  # positions at which the draft model gave a distribution

    def within(self, room: int) -> SimulatedRound:
        """The same with at most `room` candidates, after which the target adds a token."""
        return SimulatedRound(
            min(self.drafted, room),
            min(self.generated, room + 1),
            min(self.draft_forwards, room),
            min(self.draft_tokens, room),
        )


class Answers(ABC):
    """The rounds of recorded prompts under one configuration.

    `prompts` are the tokens of each prompt and `lengths` those of its answer. `draft` is the draft
    model that proposes, if one does; a `lazy` one reads a text only when it proposes after it.
    `texts` are the tokens of prompts with their answers, where they are known: prompts that begin
    alike share that part.
    """

    prompts: Sequence[int]
    lengths: Sequence[int]
    draft: str | None
    lazy: bool = False
    texts: Sequence[Sequence[int]] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @abstractmethod
    def round(self, answer: int, position: int, number: int, decoding: int) -> SimulatedRound:
        """The round `number` (from 0) of an answer, after `position` tokens, when `decoding`
        requests decode. An answer longer than the recorded one begins it again."""


class InOrder(Answers):
    """Rounds that follow one another as they were replayed, whoever else decodes."""

    def __init__(
        self, prompts: Sequence[int], rounds: Sequence[Sequence[SimulatedRound]], draft: str | None
    ) -> None:
        self.prompts, self.rounds, self.draft = prompts, rounds, draft
        self.lengths = [sum(r.generated for r in answer) for answer in rounds]

    @classmethod
    def of(cls, replayed: ReplayedRounds, prompts: Sequence[int], draft: str | None) -> InOrder:
        """The rounds of a replay of prompts with so many tokens."""
        columns = (replayed.drafted, replayed.generated, replayed.draft_forwards)
        rows = zip(*(c.tolist() for c in (*columns, replayed.draft_tokens)), strict=True)
        rounds: list[list[SimulatedRound]] = [[] for _ in prompts]
        for prompt, row in zip(replayed.prompt.tolist(), rows, strict=True):
            rounds[prompt].append(SimulatedRound(*row))
        return cls(prompts, rounds, draft)

    def round(self, answer: int, position: int, number: int, decoding: int) -> SimulatedRound:
        rounds = self.rounds[answer]
        return rounds[number % len(rounds)]


class ByBatch(Answers):
    """Chains whose length follows the number of requests that decode together, by position."""

    def __init__(
        self,
        prompts: Sequence[int],
        policy: ByBatchSettings,
        rounds: dict[int, list[list[SimulatedRound]]],
        draft: str,
    ) -> None:
        self.prompts, self.policy, self.rounds, self.draft = prompts, policy, rounds, draft
        self.lengths = [len(answer) for answer in next(iter(rounds.values()))]
        self.lazy = 0 in policy.tokens.values()

    @classmethod
    def of(cls, replay: Replay, draft: str, policy: ByBatchSettings) -> ByBatch:
        """By each K from every position of the recorded outputs."""
        track = replay.track(draft)
        firsts, left = track.firsts.tolist(), track.left
        rounds = {}
        for k in set(policy.tokens.values()):
            drafts = track.chains(np.full(len(left), k))
            drafted = drafts.drafted.tolist()
            generated = np.minimum(drafts.accepted + 1, left).tolist()
            all_rounds = [
                SimulatedRound(d, g, d, d) for d, g in zip(drafted, generated, strict=True)
            ]
            ends = [*firsts[1:], len(all_rounds)]
            rounds[k] = [all_rounds[a:b] for a, b in zip(firsts, ends, strict=True)]
        return cls(_prompt_lengths(replay), policy, rounds, draft)

    def round(self, answer: int, position: int, number: int, decoding: int) -> SimulatedRound:
        rounds = self.rounds[self.policy.at(decoding)][answer]
        return rounds[position % len(rounds)]


def replayed_answers(replay: Replay, configuration: Configuration) -> Answers:
    """The answers to a recording's prompts under `configuration`. Raises :class:`UserError` for one
    that cannot be replayed."""
    drafter = configuration.drafter
    draft = configuration.draft_of(replay.header.pair.drafts)
    answers: Answers
    if isinstance(drafter, DraftModelSettings) and isinstance(drafter.policy, ByBatchSettings):
        answers = ByBatch.of(replay, replay.recording.draft_name(draft), drafter.policy)
    else:
        answers = InOrder.of(replay.run(configuration), _prompt_lengths(replay), draft)
    prompts = replay.recording.prompts
    pairs = zip(prompts.tokens, prompts.outputs, strict=True)
    answers.texts = [(*prompt.tolist(), *output.tolist()) for prompt, output in pairs]
    return answers


def _prompt_lengths(replay: Replay) -> list[int]:
    return [len(tokens) for tokens in replay.recording.prompts.tokens]
