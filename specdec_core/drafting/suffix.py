"""Suffix decoding: what followed the longest repeated suffix of the sequence before may follow it
again (SuffixDecoding, Oliaro et al., 2024; SAM decoding, Hu et al., 2024)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from pydantic import Field

from specdec_core.config import LookupSettings, MaxTokens, Memory
from specdec_core.drafting.automaton import ROOT as EMPTY
from specdec_core.drafting.automaton import SuffixAutomaton
from specdec_core.drafting.drafter import Lookup, LookupResult, Resources, SlotState
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree

REMEMBERED = 1 << 17  # tokens of earlier outputs at most, some 700 bytes each


class SuffixSettings(LookupSettings):
    """What followed the longest suffix of the sequence that occurred before, in the sequence itself
    or also in earlier outputs (SuffixDecoding; SAM decoding)."""

    kind: Literal["suffix"] = "suffix"
    min_match: int = Field(default=1, ge=1)
    max_tokens: MaxTokens = 10
    per_match: float = Field(
        default=2.0, ge=0, description="candidates for each matched token at most; 0: no bound"
    )
    tree: bool = Field(default=False, description="the likeliest as a tree, not the best chain")
    memory: Memory = "request"

    @property
    def label(self) -> str:
        size = "" if self.max_tokens == 10 else f" {self.max_tokens}"
        shared, tree = "shared " if self.memory == "all" else "", " tree" if self.tree else ""
        return f"{shared}suffix{tree}{size}"

    @property
    def remembers(self) -> bool:
        return self.memory == "all"

    @property
    def depth(self) -> int:
        return self.max_tokens

    @property
    def chain(self) -> bool:
        return not self.tree


class SuffixDrafter(Lookup):
    """Proposes the most frequent continuation of the longest suffix that occurred before, or a tree
    of the most likely ones. It looks in the request's sequence and, with memory "all", in the
    outputs of earlier requests; of two matches of one length the one in the request's sequence
    counts. Proposals are deterministic, one-hot distributions."""

    def __init__(self, settings: SuffixSettings, resources: Resources | None = None) -> None:
        self.settings = settings
        self.earlier = EarlierOutputs() if settings.memory == "all" else None
        self._readings: dict[int, _SuffixReader] = {}

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            # The prompt is read by the first `find`, which an arm of a schedule may never get.
            self._readings[sequence.slot] = _SuffixReader(len(sequence.tokens))

    def find(self, sequence: SlotState, drafted: Sequence[int], room: int) -> LookupResult:
        settings, reading = self.settings, self._readings[sequence.slot]
        reading.catch_up(sequence.tokens, self.earlier)
        texts, state, match = reading.longest(drafted, self.earlier)
        if match < settings.min_match:
            return LookupResult(TokenTree())
        most = settings.max_tokens
        if settings.per_match:
            most = min(most, max(int(settings.per_match * match), 1))
        if settings.tree:
            return LookupResult(likeliest(texts, state, most, room), match)
        tokens = texts.continuation(state, min(most, room))
        return LookupResult(TokenTree.chain(tokens, TokenOrigin.LOOKUP), match)

    def close(self, sequence: SlotState) -> None:
        reading = self._readings.pop(sequence.slot, None)
        if reading is not None and self.earlier is not None:
            self.earlier.learn(sequence.tokens[reading.prompt :])


def likeliest(texts: SuffixAutomaton, state: int, nodes: int, depth: int) -> TokenTree:
    """The `nodes` most likely continuations of the phrases of `state`, at most `depth` tokens long,
    by how often each token followed the tokens before it in `texts`; of equals the shorter one,
    then the one that `texts` continues with."""
    tree = TokenTree()
    queue: list[tuple[float, int, bool, int, int, int]] = []

    def split(state: int, likelihood: float, depth: int, parent: int) -> None:
        following, best = texts.follows[state].items(), texts.best[state]
        total = sum(texts.count[longer] for _, longer in following)
        for token, longer in following:
            share = likelihood * texts.count[longer] / total
            heappush(queue, (-share, depth, token != best, token, longer, parent))

    split(state, 1.0, 1, ROOT)
    while queue and len(tree) < nodes:
        share, level, _, token, longer, parent = heappop(queue)
        node = tree.add(token, parent, TokenOrigin.LOOKUP)
        if level < depth:
            split(longer, -share, level + 1, node)
    return tree


class EarlierOutputs:
    """The latest outputs, up to `most` tokens, the oldest forgotten first."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self.most = most
        self.texts = SuffixAutomaton()
        self.version = 0  # positions in `texts` hold for one version
        self._outputs: deque[list[int]] = deque()

    def learn(self, output: list[int]) -> None:
        self.version += 1
        self._outputs.append(output)
        new = [output]
        if self.texts.tokens + len(output) > self.most:
            # An automaton cannot forget; built anew from the latest half, it seldom has to.
            kept = sum(map(len, self._outputs))
            while len(self._outputs) > 1 and kept > self.most // 2:
                kept -= len(self._outputs.popleft())
            self.texts, new = SuffixAutomaton(), list(self._outputs)
        for text in new:
            self.texts.begin()
            self.texts.extend(text)


@dataclass(slots=True)
class _SuffixReader:
    """How far a request's sequence was read, and the longest match of its end in earlier
    outputs."""

    prompt: int  # tokens of the prompt
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    read: int = 0
    version: int = -1
    state: int = EMPTY
    match: int = 0

    def catch_up(self, tokens: list[int], earlier: EarlierOutputs | None) -> None:
        new = tokens[self.read :]
        self.text.extend(new)
        self.read = len(tokens)
        if earlier is None:
            return
        if self.version != earlier.version:
            self.version, self.state, self.match = earlier.version, EMPTY, 0
            new = tokens
        self.state, self.match = earlier.texts.walk(self.state, self.match, new)

    def longest(
        self, drafted: Sequence[int], earlier: EarlierOutputs | None
    ) -> tuple[SuffixAutomaton, int, int]:
        """The longest suffix of the sequence and `drafted` that something follows: the sequences
        that have it, its state there and its length."""
        here = self.text, *self.text.followed(self.text.last, self.read, drafted)
        if earlier is None:
            return here
        there = earlier.texts, *earlier.texts.followed(self.state, self.match, drafted)
        return there if there[2] > here[2] else here
