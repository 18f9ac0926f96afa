"""Replay: every round of any chain configuration from a recording, without a model.

The output is fixed by the target, the prompt and (coupled) the seed. A chain drafted from any
position follows it up to the draft's first disagreement and then goes on as recorded, so the
tokens, entropies, probabilities and hidden states that a round would meet are rows of the trace.
A :class:`Rule` is evaluated for all starting positions at once; a policy that learns is walked
through round by round; a drafter without a model is run itself on the recorded texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from specdec_core.config import (
    Configuration,
    DraftModelDrafter,
    OraclePolicy,
    Policy,
)
from specdec_core.drafters import Outcome, Resources, Sequencing, build_drafter
from specdec_core.errors import UserError
from specdec_core.heads import LoadedHead, load_head
from specdec_core.policies import LengthPolicy, Rule, build_policy
from specdec_core.sampling import RandomStream
from specdec_core.stats import Counts
from specdec_core.traces.schema import Recording, Trace

# draft, head -> the head
LoadHead = Callable[[str, str], LoadedHead]


@dataclass(frozen=True)
class ReplayedRounds:
    """The rounds of all prompts, in order: arrays with one entry a round (see
    :class:`specdec_core.stats.Round`)."""

    prompt: np.ndarray  # number among the recorded prompts
    position: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    generated: np.ndarray
    draft_forwards: np.ndarray
    ids: list[str]  # of the prompts

    @property
    def counts(self) -> Counts:
        drafted, accepted = int(self.drafted.sum()), int(self.accepted.sum())
        return Counts(
            requests=len(self.ids),
            n=int(self.generated.sum()),
            n_draft=int(self.draft_forwards.sum()),
            n_target=len(self.prompt),
            n_discarded=drafted - accepted,
            n_drafted=drafted,
            n_accepted=accepted,
            n_target_tokens=int((self.generated > self.accepted).sum()),
        )

    def frame(self, **columns: str) -> pd.DataFrame:
        """One row a round, as :func:`specdec_core.stats.rounds_frame` has them; no time passed."""
        first = np.flatnonzero(self.position == 0)
        number = (
            np.arange(len(self.prompt))
            - first[np.searchsorted(first, range(len(self.prompt)), "right") - 1]
        )
        rows = {
            "request_id": np.asarray(self.ids, dtype=object)[self.prompt],
            "round": number,
            "position": self.position,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "generated": self.generated,
            "draft_forwards": self.draft_forwards,
        }
        times = dict.fromkeys(("draft_seconds", "target_seconds", "other_seconds"), 0.0)
        return pd.DataFrame({**rows, **times}).assign(**columns)


class Replay:
    """Runs configurations on a recording; without its `hidden` states no head can be asked, but
    little has to be read."""

    def __init__(
        self, recording: Recording, load_head: LoadHead | None = None, hidden: bool = True
    ) -> None:
        if not recording.header.replayable:
            raise UserError(
                f"{recording.folder}: cannot be replayed; that takes continuations, and greedy "
                "decoding or sampling.coupling gumbel"
            )
        self.recording, self.header = recording, recording.header
        self._load_head = load_head or self._recorded_head
        self._heads: dict[tuple[str, str], LoadedHead] = {}
        self._hidden = hidden
        self._tracks: dict[str, Track] = {}

    def can(self, configuration: Configuration) -> bool:
        """Whether the recording knows all that this configuration could meet."""
        drafter = configuration.drafter
        if configuration.sampling != self.header.sampling:
            return False
        if isinstance(drafter, DraftModelDrafter):
            names = list(self.header.pair.drafts)
            known = drafter.draft in names if drafter.draft is not None else bool(names)
            # The longest draft of a request is also bounded by its room.
            longest = min(drafter.policy.max_tokens, self.header.max_new_tokens - 1)
            return known and longest <= self.header.max_draft
        return True

    def run(self, configuration: Configuration) -> ReplayedRounds:
        """The rounds that decoding the recorded prompts one after the other would have taken.

        Raises:
            UserError: the recording cannot tell (see :meth:`can`), or the head is unknown.
        """
        if not self.can(configuration):
            raise UserError(
                f"{self.recording.folder}: recorded with {self.header.sampling.model_dump()}, at "
                f"most {self.header.max_draft} candidates and drafts "
                f"{', '.join(self.header.pair.drafts) or 'none'}; cannot replay "
                f"{configuration.label}"
            )
        drafter = configuration.drafter
        if isinstance(drafter, DraftModelDrafter):
            name = self.recording.draft_name(drafter.draft)
            track = self.track(name)
            if isinstance(drafter.policy, OraclePolicy):
                return track.walk_all(np.minimum(track.agreeing, drafter.policy.max_tokens))
            policy = build_policy(drafter.policy, lambda head: self._head(name, head))
            if isinstance(policy, Rule):
                return track.walk_all(track.drafted(policy))
            return track.walk(policy)
        return self._without_model(configuration)

    def track(self, draft: str | None = None) -> Track:
        """The recorded draft, indexed by where its rounds begin."""
        name = self.recording.draft_name(draft)
        if name not in self._tracks:
            self._tracks[name] = Track(self.recording.trace(name, self._hidden))
        return self._tracks[name]

    def values(self, draft: str | None, policy: Policy) -> np.ndarray:
        """What a threshold policy reads off every recorded candidate (R,)."""
        return self.track(draft).values(self.rule(draft, policy))

    def rule(self, draft: str | None, policy: Policy) -> Rule:
        """A threshold policy with what the recording knows of its head. TypeError for others."""
        name = self.recording.draft_name(draft)
        built = build_policy(policy, lambda head: self._head(name, head))
        if not isinstance(built, Rule):
            raise TypeError(f"policy {policy.kind} compares no values")
        return built

    def _head(self, draft: str, head: str) -> LoadedHead:
        """Loaded once for all configurations."""
        if (draft, head) not in self._heads:
            self._heads[draft, head] = self._load_head(draft, head)
        return self._heads[draft, head]

    def _recorded_head(self, draft: str, head: str) -> LoadedHead:
        own = self.header.fingerprints
        return load_head(head, own[draft], own["target"])

    def _without_model(self, configuration: Configuration) -> ReplayedRounds:
        """Run a drafter that needs no draft model, or none, on the recorded texts."""
        drafter = None
        if configuration.drafter is not None:
            eos = frozenset(self.header.eos_token_ids)
            resources = Resources(_no_model, _no_model, 0, eos)
            drafter = build_drafter(configuration.drafter, resources)
        rounds = _Rounds()
        prompts = self.recording.prompts
        for number, (prompt, output) in enumerate(
            zip(prompts.tokens, prompts.outputs, strict=True)
        ):
            output = output.tolist()
            # Nothing is drawn from the random stream: the output is fixed.
            sequence = Sequencing(0, prompt.tolist(), configuration.sampling, RandomStream(0))
            if drafter is not None:
                drafter.open([sequence])
            position = 0
            while position < len(output):
                tokens, accepted = [], 0
                if drafter is not None:
                    sequence.room = self.header.max_new_tokens - position - 1
                    [tree] = drafter.propose([sequence])
                    tokens = tree.tokens
                rest = output[position:]
                while accepted < min(len(tokens), len(rest)) and tokens[accepted] == rest[accepted]:
                    accepted += 1
                generated = min(accepted + 1, len(rest))
                rounds.add(number, position, len(tokens), accepted, generated, 0)
                position += generated
                sequence.tokens += rest[:generated]
                if drafter is not None and position < len(output):
                    drafter.observe(sequence, Outcome(tree, list(range(accepted)), [], 0.0))
        return rounds.done(prompts.ids)


def _no_model(*_: object) -> None:
    raise UserError("this drafter needs a draft model that replay does not run")


class _Rounds:
    """Rounds as they come."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def add(self, *row: int) -> None:
        """prompt, position, drafted, accepted, generated, draft_forwards"""
        self.rows.append(row)

    def done(self, ids: list[str]) -> ReplayedRounds:
        columns = np.array(self.rows, dtype=np.int64).reshape(-1, len(fields(ReplayedRounds)) - 1)
        return ReplayedRounds(*columns.T, ids=ids)


class Track:
    """A trace, indexed by where a round begins: T starting positions, all prompts' in order.

    What the j-th candidate (from 0) of a round that begins at start s meets is row
    `windows[s, j]` of the trace.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.header = trace, trace.header
        lengths = trace.lengths
        self.prompt = np.repeat(np.arange(len(lengths)), lengths)
        self.position = trace.position[trace.trajectory].astype(np.int64)
        self.left = np.repeat(lengths, lengths) - self.position  # tokens to the end of the output
        self._values: dict[str, np.ndarray] = {}

    @cached_property
    def agreeing(self) -> np.ndarray:
        """How many candidates in a row would be accepted from each start (T,)."""
        ends = np.arange(len(self.left)) + self.left
        stops = np.where(~self.trace.agrees, np.arange(len(ends)), len(ends))
        following = np.minimum.accumulate(stops[::-1])[::-1]
        return np.minimum(following, ends) - np.arange(len(ends))

    @cached_property
    def windows(self) -> np.ndarray:
        """Rows of the trace (T, max_draft); where nothing is recorded, because no round gets there,
        the last row that is."""
        trace, wide = self.trace, self.header.max_draft
        rows, starts = trace.trajectory, np.arange(len(self.left))
        behind = np.diff(np.append(np.flatnonzero(trace.step <= 1), len(trace)))
        # A continuation is the block of rows that begins with step 1.
        first = np.flatnonzero(trace.step == 1)
        block = behind[np.searchsorted(np.flatnonzero(trace.step <= 1), first)]
        place = {
            (p, t): (r, n)
            for p, t, r, n in zip(
                trace.prompt[first].tolist(),
                trace.position[first].tolist(),
                first.tolist(),
                block.tolist(),
                strict=True,
            )
        }
        begin, count = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
        for s in np.flatnonzero(~trace.agrees):
            begin[s], count[s] = place.get((int(self.prompt[s]), int(self.position[s])), (0, 0))
        j = np.arange(wide)
        differs = np.minimum(starts + self.agreeing, starts + self.left - 1)  # index of the start
        on_path = starts[:, None] + j <= differs[:, None]
        beyond = starts[:, None] + j - differs[:, None] - 1
        beyond = np.minimum(beyond, count[differs][:, None] - 1)
        found = np.where(beyond >= 0, begin[differs][:, None] + beyond, rows[differs][:, None])
        path = rows[np.minimum(starts[:, None] + j, differs[:, None])]
        return np.where(on_path, path, found)

    @cached_property
    def bound(self) -> np.ndarray:
        """Candidates that a round from each start can have at most (T,): up to an end token, and
        leaving room for the target's own token."""
        room = self.header.max_new_tokens - self.position - 1
        ends = np.isin(self.trace.draft_token, self.header.eos_token_ids)[self.windows]
        stops = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, self.header.max_draft)
        return np.minimum(room, stops)

    def drafted(self, rule: Rule) -> np.ndarray:
        """How many candidates `rule` would draft from each start (T,)."""
        stops = np.asarray(rule.stops(self.compared(rule)))
        if rule.min_tokens > 1:
            stops[:, : rule.min_tokens - 1] = False
        first = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, self.header.max_draft)
        return np.minimum(first, rule.settings.max_tokens)

    def values(self, rule: Rule) -> np.ndarray:
        """The value of every recorded candidate (R,) in double precision."""
        key = _key(rule)
        if key not in self._values:
            everything = RecordedSignals(self.trace, np.arange(len(self.trace)))
            self._values[key] = np.asarray(rule.values(everything), dtype=np.float64)
        return self._values[key]

    def compared(self, rule: Rule) -> np.ndarray:
        """What `rule` compares behind each candidate of a round from each start (T, max_draft)."""
        key = f"{_key(rule)} windows {rule.cumulative}"
        if key not in self._values:
            values = self.values(rule)[self.windows]
            if rule.lagging:
                values[:, 0] = 1.0
            self._values[key] = np.cumprod(values, axis=1) if rule.cumulative else values
        return self._values[key]

    def walk_all(self, drafted: np.ndarray) -> ReplayedRounds:
        """The rounds when one that begins at start s drafts `drafted[s]`, all prompts in step."""
        drafted = np.minimum(drafted, self.bound)
        accepted = np.minimum(drafted, self.agreeing)
        generated = np.minimum(accepted + 1, self.left)
        firsts = np.flatnonzero(self.position == 0)
        ends = firsts + self.left[firsts]
        visited = np.zeros(len(drafted), dtype=bool)
        at = firsts
        while len(at):
            visited[at] = True
            at, ends = at + generated[at], ends
            going = at < ends
            at, ends = at[going], ends[going]
        rounds = np.flatnonzero(visited)
        return ReplayedRounds(
            prompt=self.prompt[rounds],
            position=self.position[rounds],
            drafted=drafted[rounds],
            accepted=accepted[rounds],
            generated=generated[rounds],
            draft_forwards=drafted[rounds],
            ids=self.trace.prompts.ids,
        )

    def walk(self, policy: LengthPolicy) -> ReplayedRounds:
        """The rounds of a policy that may learn, one after the other, prompt by prompt."""
        asks = type(policy).go_on is not LengthPolicy.go_on
        firsts = np.flatnonzero(self.position == 0).tolist()
        bounds, left, agreeing = self.bound.tolist(), self.left.tolist(), self.agreeing.tolist()
        rounds = _Rounds()
        for number, first in enumerate(firsts):
            policy.reset(0)
            position, length = 0, left[first]
            while position < length:
                start = first + position
                most = min(policy.limit(0), bounds[start])
                drafted = most
                if asks:
                    drafted = self._ask(policy, start, most)
                accepted = min(drafted, agreeing[start])
                generated = min(accepted + 1, left[start])
                rounds.add(number, position, drafted, accepted, generated, drafted)
                position += generated
                if drafted and position < length:
                    policy.observe(0, drafted, accepted)
        return rounds.done(self.trace.prompts.ids)

    def _ask(self, policy: LengthPolicy, start: int, most: int) -> int:
        """How many candidates the policy drafts from a start, as the engine asks it."""
        candidates = self._candidates
        rows = self._window_lists[start]
        # A policy that learns is shown the last possible candidate too.
        for drafted in range(1, most + policy.learns):
            signals = candidates[rows[drafted - 1]]
            signals.positions = (drafted,)
            if not policy.go_on(signals)[0]:
                return drafted
        return most

    @cached_property
    def _window_lists(self) -> list[list[int]]:
        return self.windows.tolist()

    @cached_property
    def _candidates(self) -> list[Candidate]:
        trace = self.trace
        columns = (trace.draft_token, trace.top_probability, trace.probability, trace.entropy)
        lists = (column.tolist() for column in columns)
        return [Candidate(*row) for row in zip(*lists, strict=True)]


def _key(rule: Rule) -> str:
    return f"{type(rule).__name__} {getattr(rule.settings, 'head', '')}"


class Candidate:
    """One recorded candidate as the signals of a single slot, 0."""

    __slots__ = ("entropy", "positions", "probability", "slots", "tokens", "top_probability")

    def __init__(self, token: int, top: float, probability: float, entropy: float) -> None:
        self.slots, self.tokens, self.positions = (0,), (token,), (1,)
        self.top_probability, self.probability = (top,), (probability,)
        self.entropy = (entropy,)


class RecordedSignals:
    """Rows of a trace as the signals that a rule reads."""

    def __init__(self, trace: Trace, rows: np.ndarray) -> None:
        self.trace, self.rows = trace, rows
        self.slots = self.tokens = rows

    @property
    def top_probability(self) -> np.ndarray:
        return self.trace.top_probability[self.rows]

    @property
    def probability(self) -> np.ndarray:
        return self.trace.probability[self.rows]

    @property
    def entropy(self) -> np.ndarray:
        return self.trace.entropy[self.rows]

    @property
    def hidden(self) -> Tensor:
        return torch.from_numpy(self.trace.hidden[self.rows])

    def top_probabilities(self, k: int) -> Tensor:
        recorded = self.trace.header.top_k
        if k > recorded:
            raise UserError(
                f"the head reads the {k} largest probabilities, the recording has {recorded}"
            )
        return torch.from_numpy(self.trace.top_probs[self.rows][:, :k].copy())
