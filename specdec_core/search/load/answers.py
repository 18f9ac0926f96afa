"""What decoding recorded prompts takes, round by round: what the simulation's requests do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from specdec_core.config import Configuration, DrafterSettings
from specdec_core.cost import proposer_keys
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.rounds import NO_ARM, ReplayedRounds
from specdec_core.search.chains import whole_chains
from specdec_core.servers.chains import fixed_chain


class SimulatedRound(NamedTuple):
    """A round of one request."""

    drafted: int
    generated: int
    draft_forwards: int
    draft_tokens: int  # positions at which the draft model gave a distribution
    depth: int  # the most consecutive candidates
    draft: str | None = None  # the draft model, if not that of all rounds
    proposers: frozenset[str] = frozenset()  # by :func:`specdec_core.cost.proposer_keys`

    def within(self, room: int) -> SimulatedRound:
        """The same with at most `room` candidates, after which the target adds a token."""
        return self._replace(
            drafted=min(self.drafted, room),
            generated=min(self.generated, room + 1),
            draft_forwards=min(self.draft_forwards, room),
            draft_tokens=min(self.draft_tokens, room),
            depth=min(self.depth, room),
        )


@dataclass
class Answers:
    """The rounds of recorded prompts under one configuration.

    `rounds[n]` has the rounds of each answer while at least n requests decode: one after another,
    or with `by_position` one from each position of the answer. `prompts` has the number of tokens
    of each prompt. `draft` is the draft model that proposes, if any; a round may name another one.
    A `lazy` draft prefills a sequence only when it proposes after it, as each of several drafts
    does.
    """

    prompts: Sequence[int]
    rounds: Mapping[int, Sequence[Sequence[SimulatedRound]]]
    draft: str | None = None
    by_position: bool = False
    lazy: bool = False

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each answer."""
        if self.by_position:
            return [len(answer) for answer in self.rounds[1]]
        return [sum(each.generated for each in answer) for answer in self.rounds[1]]

    @property
    def drafts(self) -> list[str]:
        """The draft models that propose in any round; `draft` first."""
        each = chain.from_iterable(chain.from_iterable(self.rounds.values()))
        proposing = (r.draft or self.draft for r in each if r.draft_forwards)
        return [name for name in dict.fromkeys((self.draft, *proposing)) if name is not None]

    @property
    def proposers(self) -> set[frozenset[str]]:
        """What proposes in the rounds, each combination once."""
        each = chain.from_iterable(chain.from_iterable(self.rounds.values()))
        return {one.proposers for one in each}

    def least(self, decoding: int) -> int:
        """The fewest requests that have the same rounds as `decoding` requests."""
        return max(n for n in self.rounds if n <= decoding)

    def round(self, answer: int, position: int, number: int, decoding: int) -> SimulatedRound:
        """The round `number` (from 0) of an answer, after `position` tokens, when `decoding`
        requests decode. An answer longer than the recorded one begins it again after its first
        token: there is only one first round."""
        rounds = self.rounds[self.least(decoding)][answer]
        place, size = (position if self.by_position else number), len(rounds)
        if place >= size:
            place = min(1 + (place - 1) % max(size - 1, 1), size - 1)
        return rounds[place]


def drafters_by_load(drafter: DrafterSettings | None) -> dict[int, DrafterSettings | None]:
    """The drafter by the least number of requests that decode together: a schedule's drafters;
    None: no drafting."""
    if isinstance(drafter, ScheduleSettings):
        ranges: dict[int, DrafterSettings | None] = {}
        ends = [*list(drafter.ranges)[1:], None]
        for (begin, part), end in zip(drafter.ranges.items(), ends, strict=True):
            for least, each in drafters_by_load(part).items():
                if end is None or least < end:
                    ranges[max(least, begin)] = each
        return ranges
    return {1: drafter}


def configurations_by_load(configuration: Configuration) -> list[Configuration]:
    """The configurations that :func:`replayed_answers` replays: that of each range of load, or the
    only one."""
    by_load = drafters_by_load(configuration.drafter)
    parts = [configuration.model_copy(update={"drafter": each}) for each in by_load.values()]
    return parts if len(parts) > 1 else [configuration, *parts]


def replayed_answers(replay: Replay, configuration: Configuration, whole: bool = False) -> Answers:
    """The answers to a recording's prompts under `configuration`; with `whole`, by an engine that
    always drafts the full chain (:func:`whole_chains`). Raises :class:`UserError` for a
    configuration that cannot be replayed.

    Where the load chooses among several drafters, each is replayed separately. If its candidates
    depend on the sequence alone (:meth:`Replay.everywhere`), its rounds equal the live engine's
    whenever the load changes. Other drafters remember their earlier rounds: the first replayed
    round that begins at a position or after it stands for the round from that position, which is
    exact while no other drafter has rounds.
    """
    by_load = drafters_by_load(configuration.drafter)
    rounds: dict[int, list[list[SimulatedRound]]] = {}
    if len(by_load) > 1:
        known: dict[DrafterSettings | None, list[list[SimulatedRound]]] = {}
        for least, drafter in by_load.items():
            if drafter not in known:
                part = configuration.model_copy(update={"drafter": drafter})
                known[drafter] = _by_position(replay, part, whole)
            rounds[least] = known[drafter]
    else:
        replayed = replay.run(configuration)
        if whole:
            replayed = whole_chains(configuration, replayed)
        rounds[1] = _in_order(replay, replayed, configuration)
    draft = configuration.draft_of(replay.header.pair.drafts)
    prompts = replay.recording.prompts
    return Answers(
        prompts=[len(tokens) for tokens in prompts.tokens],
        rounds=rounds,
        draft=draft,
        by_position=len(by_load) > 1,
        lazy=draft is not None and _rests(replay, configuration, draft),
    )


def _in_order(
    replay: Replay, replayed: ReplayedRounds, configuration: Configuration
) -> list[list[SimulatedRound]]:
    """The rounds of each answer of a replay. Each names the draft model and the proposers of its
    arm. Among rounds with an arm, those without one propose nothing."""
    names = replay.header.pair.drafts
    of_arms = {}
    for arm in (arms := np.unique(replayed.arm).tolist()):
        by_arm = configuration.by(None if arm == NO_ARM else arm)
        keys = proposer_keys(by_arm, next(iter(names), ""))
        proposing = keys if arm != NO_ARM or len(arms) == 1 else frozenset[str]()
        of_arms[arm] = by_arm.draft_of(names), proposing
    columns = (replayed.drafted, replayed.generated, replayed.draft_forwards)
    more = (replayed.draft_tokens, replayed.depth)
    rows = zip(*(c.tolist() for c in (*columns, *more)), strict=True)
    rounds: list[list[SimulatedRound]] = [[] for _ in replay.recording.prompts.tokens]
    places = zip(replayed.prompt.tolist(), replayed.arm.tolist(), rows, strict=True)
    for prompt, arm, row in places:
        draft, proposing = of_arms[arm]
        rounds[prompt].append(SimulatedRound(*row)._replace(draft=draft, proposers=proposing))
    return rounds


def _by_position(
    replay: Replay, configuration: Configuration, whole: bool
) -> list[list[SimulatedRound]]:
    """A round from each position of each recorded output: the first replayed round from that
    position or after it, and after the last one that one, cut to what is left of the output. A live
    output may be longer than the recorded one, or shorter and then begins again after its first
    token."""
    rounds = replay.everywhere(configuration)
    whole = whole and fixed_chain(configuration.drafter) is not None
    if whole:
        rounds = whole_chains(configuration, rounds)
    in_order = _in_order(replay, rounds, configuration)
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
                one
                if place < len(each) and one.generated <= left
                else one._replace(generated=min(one.generated, left))
                if whole
                else one.within(left - 1)
                for place, left, one in zip(places, lefts, nearest, strict=True)
            ]
        )
    return by_position


def _rests(replay: Replay, configuration: Configuration, draft: str) -> bool:
    """Whether a draft model prefills a sequence only when it proposes after it: another range's
    drafter, or another arm of a bandit, does not use it."""
    return any(
        draft not in Configuration(drafter=each).drafts_of(replay.header.pair.drafts)
        for part in configuration.parts
        if isinstance(part, BanditSettings | ScheduleSettings)
        for each in part.parts
    )
