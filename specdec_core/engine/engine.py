"""The round: draft → verify → commit, for a batch of slots of different lengths.

Requests join and leave between rounds. Everything a slot does depends on its own request alone:
its tokens, its cache rows, its random stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from time import perf_counter

import torch
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.base.round_clock import RoundClock
from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.heads.storage import load_pair_head
from specdec_core.drafting.pearl.link import Link, no_link
from specdec_core.models.pair import Pair
from specdec_core.models.runner import ModelRunner
from specdec_core.tokens.acceptance import Places, rule_of
from specdec_core.tokens.detokenising import StreamDecoder
from specdec_core.tokens.sampling import RandomStream, distributions
from specdec_core.tokens.statistics import FinishReason, Generation, Round
from specdec_core.tokens.token_tree import ROOT, Origin, TokenTree
from specdec_core.tokens.topology import below_text
from specdec_core.tokens.verification import Verdict, longest


@dataclass(frozen=True)
class Request:
    """One text to complete. Without `sampling` the configuration's applies."""

    id: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(slots=True)
class Chunk:
    """What one round added to a request. `text` is what is safe to show; it lags behind `tokens`
    where a character or a stop string may still be completed."""

    request_id: str
    text: str
    tokens: list[int]
    origins: list[Origin]
    finished: Generation | None = None


@dataclass(slots=True)
class _Active:
    """A request in its slot."""

    request: Request
    sequence: SlotState
    decoder: StreamDecoder
    started: float
    prefill_seconds: float
    origins: list[Origin] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.sequence.tokens[len(self.request.tokens) :]

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.origins)


class Engine:
    """Decodes requests under one configuration, up to `slots` at a time.

    Models and caches are kept when :meth:`configure` swaps the configuration. `open_link` reaches a
    draft on a device of its own, where there is one; it is called once.
    """

    def __init__(
        self,
        pair: Pair,
        configuration: Configuration = AUTOREGRESSIVE,
        slots: int = 1,
        open_link: Callable[[], Link] = no_link,
    ) -> None:
        self.pair, self.slots, self._link = pair, slots, cache(open_link)
        self.max_length = pair.max_length
        self.target = pair.open_runner(None, slots)
        self._draft_runners: dict[str, ModelRunner] = {}
        self._clock = RoundClock()
        self._active: dict[int, _Active] = {}
        self._queue: deque[Request] = deque()
        self.configure(configuration)

    def configure(self, configuration: Configuration) -> None:
        """Decode by `configuration` from now on. Only between requests."""
        if not self.idle:
            raise RuntimeError("the configuration cannot change while requests are being decoded")
        self.configuration = configuration
        self.drafter: Drafter | None = None
        for runner in self._draft_runners.values():
            runner.watch_hidden(False)
            runner.lazy = False
        if configuration.drafter is not None:
            resources = Resources(
                self._draft_runner,
                partial(load_pair_head, self.pair),
                self.target.vocab_size,
                self.pair.eos_token_ids,
                lambda: self.pair.tokenizer_digest,
                self._clock,
                self.slots,
                open_link=self._link,
            )
            self.drafter = resources.build(configuration.drafter)
            for shape in self.drafter.shapes:
                self.target.expect(shape if self.drafter.target_width else below_text(shape))

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a prompt, with the special tokens its tokenizer puts first."""
        return tuple(self.pair.tokenizer(text)["input_ids"])

    @property
    def idle(self) -> bool:
        """Whether no request is active or waiting."""
        return not self._active and not self._queue

    def add(self, request: Request) -> None:
        """Queue a request; it enters a free slot at the next step.

        Raises:
            UserError: the prompt is empty, has unknown tokens or does not fit with its output.
        """
        total = len(request.tokens) + request.max_new_tokens
        if not request.tokens:
            raise UserError("the prompt is empty")
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        if total > self.max_length:
            raise UserError(
                f"the prompt has {len(request.tokens)} tokens and {request.max_new_tokens} new ones"
                f" were asked for, but the context holds {self.max_length}"
            )
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.target.vocab_size:
            raise UserError(f"the prompt has tokens outside 0…{self.target.vocab_size - 1}")
        self._queue.append(request)

    def cancel(self, request_id: str) -> None:
        """Drop a request, waiting or active; unknown ids are ignored."""
        self._queue = deque(r for r in self._queue if r.id != request_id)
        for slot in [a for a in self._active.values() if a.request.id == request_id]:
            self._leave(slot)

    @torch.inference_mode()
    def step(self, texts: bool = True) -> list[Chunk]:
        """One round of all active slots. Without `texts` a request's text comes with its last
        chunk, unless it has stop strings to look out for."""
        self._admit()
        if not self._active:
            return []
        active = list(self._active.values())
        start = self._begin()
        trees = self._draft(active)
        drafted = perf_counter()
        logits, choices, forward = self._target_logits(active, trees)
        verified = perf_counter()
        if self.drafter is not None:
            self.drafter.arrived([slot.sequence for slot in active], trees)
        samplings = [slot.sequence.sampling for slot in active]
        probs = distributions(logits, samplings)
        by_slot: Sequence[Tensor | None]
        by_slot = [None] * len(active) if probs is None else probs.unbind()
        verify = perf_counter() - verified
        chunks = []
        for n, (slot, tree) in enumerate(zip(active, trees, strict=True)):
            began = perf_counter()
            verdict = self._verify(slot.sequence, tree, choices[n], by_slot[n])
            starts = self._starts(slot.sequence, verdict, logits[n], by_slot[n])
            verify += perf_counter() - began
            outcome = Outcome(tree, verdict.path, choices[n], verified - start)
            chunks.append(self._commit(slot, tree, verdict, starts, outcome, texts))
        drafting = self._drafting_seconds()
        end = perf_counter()
        for slot, chunk in zip(active, chunks, strict=True):
            last = slot.rounds[-1]
            last.draft_seconds = drafted - start
            last.target_seconds = verified - drafted
            last.other_seconds = end - verified
            last.draft_forward_seconds = drafting
            last.policy_seconds = self._clock.policy
            last.target_forward_seconds = forward
            last.verify_seconds = verify
            slot.token_seconds += [end - slot.started] * len(chunk.tokens)
            if chunk.finished:
                chunk.finished.seconds = end - slot.started
        return chunks

    def generate(
        self,
        requests: Sequence[Request],
        on_finish: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Decode `requests` and return their generations in the same order."""
        for request in requests:
            self.add(request)
        done: dict[str, Generation] = {}
        while not self.idle:
            for chunk in self.step(texts=False):
                if chunk.finished:
                    done[chunk.request_id] = chunk.finished
                    if on_finish:
                        on_finish(chunk.finished)
        return [done[request.id] for request in requests]

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Decode one request, a chunk a round."""
        self.add(request)
        finished = False
        try:
            while not finished:
                for chunk in self.step():
                    if chunk.request_id == request.id:
                        finished = chunk.finished is not None
                        yield chunk
        finally:
            self.cancel(request.id)

    # The story of a step, in its order.

    def _admit(self) -> None:
        """Fill free slots from the queue; those that enter together are prefilled together."""
        free = [slot for slot in range(self.slots) if slot not in self._active]
        entering = {slot: self._queue.popleft() for slot in free[: len(self._queue)]}
        if not entering:
            return
        start = perf_counter()
        sequences = [
            SlotState(
                slot,
                list(request.tokens),
                request.sampling or self.configuration.sampling,
                RandomStream(request.seed, self.target.vocab_size),
                room=request.max_new_tokens - 1,
            )
            for slot, request in entering.items()
        ]
        for slot in entering:
            for runner in (self.target, *self._draft_runners.values()):
                runner.truncate(slot, 0)
        if self.drafter is not None:
            # First: a draft elsewhere then reads the texts while the target does.
            self.drafter.open(sequences)
        self.target.prefill(list(entering), [r.tokens[:-1] for r in entering.values()])
        seconds = perf_counter() - start
        for sequence, request in zip(sequences, entering.values(), strict=True):
            decoder = StreamDecoder(self.pair.tokenizer, request.stop, request.tokens)
            self._active[sequence.slot] = _Active(request, sequence, decoder, start, seconds)

    def _begin(self) -> float:
        """A round begins, now."""
        self._clock.begin()
        for runner in self._draft_runners.values():
            runner.seconds = 0.0
        return perf_counter()

    def _drafting_seconds(self) -> float:
        """What the round has spent in draft models."""
        forwards = sum(runner.seconds for runner in self._draft_runners.values())
        return forwards + self._clock.waited

    def _draft(self, active: list[_Active]) -> list[TokenTree]:
        if self.drafter is None:
            return [TokenTree() for _ in active]
        for slot in active:
            # The target adds a token of its own to every round.
            slot.sequence.room = slot.remaining - 1
            slot.sequence.batch = len(active)
        return self.drafter.propose([slot.sequence for slot in active])

    def _target_logits(
        self, active: list[_Active], trees: list[TokenTree]
    ) -> tuple[Tensor, list[list[int]], float]:
        """Logits (slots, nodes + 1, vocabulary) behind the committed text and each node, the most
        likely tokens (slots, nodes + 1), and the seconds that the target took. Where the target
        began the tree its first entries mean nothing: that place was decided before."""
        rows, tokens, parents, begun = [], [], [], []
        for n, (slot, tree) in enumerate(zip(active, trees, strict=True)):
            rows.append(slot.sequence.slot)
            if slot.sequence.target_start:
                begun.append(n)
                tokens.append(tree.tokens)
                parents.append(tree.parents)
            else:
                tokens.append([slot.sequence.tokens[-1], *tree.tokens])
                parents.append(below_text(tree.parents))
        chains = all(tree.is_chain for tree in trees)
        start = perf_counter()
        logits = self.target.forward(rows, tokens, None if chains else parents)
        choices = self.target.choices()
        seconds = perf_counter() - start
        if begun:
            logits = torch.cat([logits, logits[:, :1]], dim=1)
            for n in begun:
                logits[n] = logits[n].roll(1, dims=0)
                choices[n] = [ROOT, *choices[n]]
        return logits, choices, seconds

    def _verify(
        self, sequence: SlotState, tree: TokenTree, choices: list[int], probs: Tensor | None
    ) -> Verdict:
        """Accept or reject by the rule that the request's sampling asks for. When sampling is
        coupled, `choices` become the coupled ones."""
        rule, random = rule_of(sequence.sampling), sequence.random
        choices[:] = rule.choices(tree, choices, probs, random, len(sequence.tokens))
        if not sequence.target_start:
            return rule.verify(tree, choices, probs, random)
        begun = range(len(sequence.target_start))
        return longest(begun, [rule.verify(tree, choices, probs, random, node) for node in begun])

    def _starts(
        self, sequence: SlotState, verdict: Verdict, logits: Tensor, probs: Tensor | None
    ) -> list[int]:
        """The tokens that the target draws behind the accepted path, without replacement, to begin
        the next tree with; none unless the drafter asks for them."""
        wanted = self.drafter.target_width if self.drafter is not None else 0
        token = verdict.token
        if wanted <= 1 or token is None:
            return [] if token is None else [token] * wanted
        end = verdict.path[-1] + 1 if verdict.path else 0
        at = Places(
            [sequence.sampling],
            [sequence.random],
            [len(sequence.tokens) + len(verdict.path)],
            logits[end : end + 1],
            lambda: logits[end : end + 1].argmax(dim=-1),
        )
        at.probs = None if probs is None else probs[end : end + 1]
        return [token, *rule_of(sequence.sampling).others(verdict, at, wanted - 1)]

    def _commit(
        self,
        slot: _Active,
        tree: TokenTree,
        verdict: Verdict,
        starts: list[int],
        outcome: Outcome,
        texts: bool,
    ) -> Chunk:
        """Keep what was accepted, cut at the end of the request, and account for the round."""
        sequence, path = slot.sequence, verdict.path
        read = [node for node in path if node < tree.read]
        self.target.keep(sequence.slot, len(sequence.tokens), read)
        begun, sequence.target_start = len(sequence.target_start), starts
        tokens = [tree.tokens[node] for node in path]
        origins = [tree.origins[node] for node in path]
        if not starts and verdict.token is not None:
            tokens.append(verdict.token)
            origins.append(Origin.CORRECTION if verdict.corrected else Origin.BONUS)
        position = len(slot.origins)
        tokens, text, reason = self._cut(slot, tokens, texts)
        origins = origins[: len(tokens)]
        sequence.tokens += tokens
        slot.origins += origins
        outcome.path = path[: len(tokens)]
        slot.rounds.append(
            Round(
                position=position,
                drafted=len(tree) - begun,
                accepted=len(outcome.path) - bool(begun),
                generated=len(tokens),
                draft_forwards=tree.draft_forwards,
                draft_seconds=0.0,
                target_seconds=0.0,
                other_seconds=0.0,
                depth=tree.depth - bool(begun),
                draft_tokens=tree.draft_tokens,
                arm=tree.arm,
            )
        )
        if reason is not None:
            self._leave(slot)
            return Chunk(slot.request.id, text, tokens, origins, self._finish(slot, reason))
        if self.drafter is not None:
            self.drafter.observe(sequence, outcome)
        return Chunk(slot.request.id, text, tokens, origins)

    def _leave(self, slot: _Active) -> None:
        """The request leaves its slot, finished or cancelled."""
        del self._active[slot.sequence.slot]
        if self.drafter is not None:
            self.drafter.close(slot.sequence)

    def _cut(
        self, slot: _Active, tokens: list[int], texts: bool
    ) -> tuple[list[int], str, FinishReason | None]:
        """`tokens` up to the end of the request, their text, and why the request ends, if so."""
        request, decoder = slot.request, slot.decoder
        reason: FinishReason | None = None
        if not request.ignore_eos:
            ends = (i for i, token in enumerate(tokens) if token in self.pair.eos_token_ids)
            if (end := next(ends, None)) is not None:
                tokens, reason = tokens[: end + 1], "stop"
        if reason is None and len(tokens) == slot.remaining:
            reason = "length"
        if reason is None and not texts and not request.stop:
            return tokens, "", None
        unread = len(request.tokens) + decoder.used
        text = decoder.push([*slot.sequence.tokens[unread:], *tokens])
        if decoder.stopped:
            return tokens[: decoder.used - len(slot.origins)], text, "stop"
        return tokens, text if reason is None else text + decoder.finish(), reason

    @staticmethod
    def _finish(slot: _Active, reason: FinishReason) -> Generation:
        return Generation(
            request_id=slot.request.id,
            prompt_tokens=len(slot.request.tokens),
            tokens=slot.generated,
            text=slot.decoder.text,
            origins=slot.origins,
            rounds=slot.rounds,
            finish_reason=reason,
            prefill_seconds=slot.prefill_seconds,
            token_seconds=slot.token_seconds,
        )

    def _draft_runner(self, name: str | None) -> ModelRunner:
        """The runner of a draft of the pair; the first draft's without a name."""
        name = self.pair.draft_name(name)
        if name not in self._draft_runners:
            self._draft_runners[name] = self.pair.open_runner(name, self.slots)
        return self._draft_runners[name]
