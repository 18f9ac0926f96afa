"""What decoding recorded prompts takes, round by round: what the simulation's requests do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from specdec_core.config import Configuration, DrafterSettings, LookupSettings
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.by_batch import ByBatchSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.rounds import NO_ARM, ReplayedRounds


class SimulatedRound(NamedTuple):
    """A round of one request."""

    drafted: int
    generated: int
    draft_forwards: int
    draft_tokens: int  # positions at which the draft model gave a distribution
    draft: str | None = None  # the draft model, if not that of all rounds

    def within(self, room: int) -> SimulatedRound:
        """The same with at most `room` candidates, after which the target adds a token."""
        return SimulatedRound(
            min(self.drafted, room),
            min(self.generated, room + 1),
            min(self.draft_forwards, room),
            min(self.draft_tokens, room),
            self.draft,
        )


class Answers(ABC):
    """The rounds of recorded prompts under one configuration.

    `prompts` are the tokens of each prompt and `lengths` those of its answer. `draft` is the draft
    model that proposes, if one does, of several the first; rounds may name another. A `lazy` one
    reads a text only when it proposes after it, as each of several does. Texts are looked up when
    `lookups[n]`, where n is the greatest key that is not more than the number of requests that
    decode. `texts` are the tokens of prompts with their answers, where they are known: prompts that
    begin alike share that part.
    """

    prompts: Sequence[int]
    lengths: Sequence[int]
    draft: str | None
    lazy: bool = False
    lookups: Mapping[int, bool] = {}
    texts: Sequence[Sequence[int]] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def drafts(self) -> list[str]:
        """The draft models that propose in any round; `draft` first."""
        proposing = (each.draft or self.draft for each in self.every() if each.draft_forwards)
        return [name for name in dict.fromkeys((self.draft, *proposing)) if name is not None]

    def looks_up(self, decoding: int) -> bool:
        """Whether rounds look texts up when `decoding` requests decode."""
        least = max((n for n in self.lookups if n <= decoding), default=None)
        return least is not None and self.lookups[least]

    def least(self, decoding: int) -> int:
        """The fewest requests whose rounds are like those of `decoding` ones."""
        return max((n for n in self.lookups if n <= decoding), default=1)

    @abstractmethod
    def every(self) -> Iterator[SimulatedRound]:
        """All rounds that there may be."""

    @abstractmethod
    def round(self, answer: int, position: int, number: int, decoding: int) -> SimulatedRound:
        """The round `number` (from 0) of an answer, after `position` tokens, when `decoding`
        requests decode. An answer longer than the recorded one begins it again after its first
        token."""


class InOrder(Answers):
    """Rounds that follow one another as they were replayed, whoever else decodes."""

    def __init__(
        self, prompts: Sequence[int], rounds: Sequence[Sequence[SimulatedRound]], draft: str | None
    ) -> None:
        self.prompts, self.rounds, self.draft = prompts, rounds, draft
        self.lengths = [sum(r.generated for r in answer) for answer in rounds]

    @classmethod
    def of(cls, replay: Replay, replayed: ReplayedRounds, configuration: Configuration) -> InOrder:
        """The rounds of a configuration's replay. Each names the draft model of its arm."""
        names, prompts = replay.header.pair.drafts, _prompt_lengths(replay)
        drafts = {
            arm: configuration.by(None if arm == NO_ARM else arm).draft_of(names)
            for arm in np.unique(replayed.arm).tolist()
        }
        columns = (replayed.drafted, replayed.generated, replayed.draft_forwards)
        rows = zip(*(c.tolist() for c in (*columns, replayed.draft_tokens)), strict=True)
        rounds: list[list[SimulatedRound]] = [[] for _ in prompts]
        places = zip(replayed.prompt.tolist(), replayed.arm.tolist(), rows, strict=True)
        for prompt, arm, row in places:
            rounds[prompt].append(SimulatedRound(*row)._replace(draft=drafts[arm]))
        draft = configuration.draft_of(names)
        answers = cls(prompts, rounds, draft)
        answers.lazy = draft is not None and _rests(replay, configuration, draft)
        return answers

    def every(self) -> Iterator[SimulatedRound]:
        return chain.from_iterable(self.rounds)

    def round(self, answer: int, position: int, number: int, decoding: int) -> SimulatedRound:
        rounds = self.rounds[answer]
        return rounds[number if number < len(rounds) else _again(number, len(rounds))]


class ByLoad(Answers):
    """Rounds that follow the number of requests that decode together, by position: `ranges[n]` from
    n requests on, for each answer a round from each position."""

    def __init__(
        self,
        prompts: Sequence[int],
        ranges: Mapping[int, Sequence[Sequence[SimulatedRound]]],
        draft: str | None,
        lazy: bool = False,
    ) -> None:
        self.prompts, self.ranges, self.draft, self.lazy = prompts, ranges, draft, lazy
        self.lengths = [len(answer) for answer in ranges[1]]
        self._least = sorted(ranges, reverse=True)

    @classmethod
    def of(cls, replay: Replay, configuration: Configuration) -> ByLoad:
        """Each range's drafter replayed on its own. Where the text alone decides what it drafts
        (:meth:`Replay.everywhere`), its rounds are those of the live engine, whenever the load
        changes. Other drafters remember their earlier rounds; of their own replay, the first round
        that begins at a position or after it stands for the one from there, so that they are exact
        as long as they go on drafting alone."""
        replayed: dict[DrafterSettings | None, list[list[SimulatedRound]]] = {}
        ranges = {}
        for least, drafter in drafters_by_load(configuration.drafter).items():
            if drafter not in replayed:
                part = configuration.model_copy(update={"drafter": drafter})
                replayed[drafter] = _by_position(replay, part)
            ranges[least] = replayed[drafter]
        draft = configuration.draft_of(replay.header.pair.drafts)
        lazy = draft is not None and _rests(replay, configuration, draft)
        return cls(_prompt_lengths(replay), ranges, draft, lazy)

    def least(self, decoding: int) -> int:
        least = next(least for least in self._least if least <= decoding)
        return max(least, super().least(decoding))

    def every(self) -> Iterator[SimulatedRound]:
        return chain.from_iterable(chain.from_iterable(self.ranges.values()))

    def round(self, answer: int, position: int, number: int, decoding: int) -> SimulatedRound:
        least = next(least for least in self._least if least <= decoding)
        rounds = self.ranges[least][answer]
        return rounds[_again(position, len(rounds))]


def _again(place: int, size: int) -> int:
    """A place among `size` ones, where all but the first are repeated: there is but one first
    round."""
    return place if place < size else min(1 + (place - 1) % max(size - 1, 1), size - 1)


def drafters_by_load(drafter: DrafterSettings | None) -> dict[int, DrafterSettings | None]:
    """Who drafts, by the least number of requests that decode together: a schedule's drafters, and
    a draft model's chains by their length where the policy is by_batch; None: nobody."""
    if isinstance(drafter, ScheduleSettings):
        ranges: dict[int, DrafterSettings | None] = {}
        ends = [*list(drafter.ranges)[1:], None]
        for (begin, part), end in zip(drafter.ranges.items(), ends, strict=True):
            for least, each in drafters_by_load(part).items():
                if end is None or least < end:
                    ranges[max(least, begin)] = each
        return ranges
    if isinstance(drafter, DraftModelSettings) and isinstance(drafter.policy, ByBatchSettings):
        return {
            least: drafter.model_copy(update={"policy": FixedSettings(max_tokens=k)}) if k else None
            for least, k in drafter.policy.tokens.items()
        }
    return {1: drafter}


def configurations_by_load(configuration: Configuration) -> list[Configuration]:
    """The configurations whose rounds :func:`replayed_answers` takes: that of each range of load,
    or the only one."""
    by_load = drafters_by_load(configuration.drafter)
    parts = [configuration.model_copy(update={"drafter": each}) for each in by_load.values()]
    return parts if len(parts) > 1 else [configuration, *parts]


def replayed_answers(replay: Replay, configuration: Configuration) -> Answers:
    """The answers to a recording's prompts under `configuration`. Raises :class:`UserError` for one
    that cannot be replayed."""
    drafter = configuration.drafter
    answers: Answers
    by_load = drafters_by_load(drafter)
    if len(by_load) > 1:
        answers = ByLoad.of(replay, configuration)
    else:
        answers = InOrder.of(replay, replay.run(configuration), configuration)
    answers.lookups = {
        least: each is not None and any(isinstance(part, LookupSettings) for part in each.walk())
        for least, each in by_load.items()
    }
    prompts = replay.recording.prompts
    pairs = zip(prompts.tokens, prompts.outputs, strict=True)
    answers.texts = [(*prompt.tolist(), *output.tolist()) for prompt, output in pairs]
    return answers


def _prompt_lengths(replay: Replay) -> list[int]:
    return [len(tokens) for tokens in replay.recording.prompts.tokens]


def _by_position(replay: Replay, configuration: Configuration) -> list[list[SimulatedRound]]:
    """A round from each position of each recorded output: the first that was replayed from there or
    after it, and behind the last one that one, cut to what is left of the output. Decoded live,
    another text may be longer, or shorter and then begins again behind its first token."""
    rounds = replay.everywhere(configuration)
    in_order = InOrder.of(replay, rounds, configuration).rounds
    by_position = []
    for number, output in enumerate(replay.recording.prompts.outputs):
        begins = rounds.position[rounds.prompt == number]
        each = in_order[number]
        positions = np.arange(len(output))
        written = int(begins[-1]) + each[-1].generated
        if 1 < written < len(output):
            positions[written:] = (positions[written:] - 1) % (written - 1) + 1
        places = np.searchsorted(begins, positions).tolist()
        lefts = range(len(output), 0, -1)
        nearest = [each[min(place, len(each) - 1)] for place in places]
        by_position.append(
            [
                one if place < len(each) and one.generated <= left else one.within(left - 1)
                for place, left, one in zip(places, lefts, nearest, strict=True)
            ]
        )
    return by_position


def _rests(replay: Replay, configuration: Configuration, draft: str) -> bool:
    """Whether a draft model reads a text only when it proposes after it: another range's drafter,
    or another arm of a bandit, does without it, or its policy drafts nothing at some load."""
    first = next(iter(replay.header.pair.drafts), None)
    for part in configuration.parts:
        if isinstance(part, BanditSettings | ScheduleSettings):
            for each in part.parts:
                if draft not in (name or first for inner in each.walk() for name in inner.drafts):
                    return True
    policies = (policy for _, policy in configuration.policies)
    return any(isinstance(p, ByBatchSettings) and 0 in p.tokens.values() for p in policies)
