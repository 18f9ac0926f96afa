"""The engine. A step is admit → draft → verify → commit, for a batch of slots of any lengths.

Requests join and leave between steps. A slot's tokens, its rows in the runners and its random
stream depend on its own request alone. The target is fed the unread end of a slot's text, and then
the slot's draft tree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter

import torch
from torch import Tensor

from specdec_core.base.round_clock import RoundClock
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.heads.storage import load_pair_head
from specdec_core.drafting.pearl.link import Link, no_link
from specdec_core.engine import target_start
from specdec_core.engine.active_request import ActiveRequest, Addition
from specdec_core.engine.draft_runners import DraftRunners
from specdec_core.engine.request import Chunk, Request
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch
from specdec_core.tokens.acceptance import Reading, rule_of
from specdec_core.tokens.detokenising import StreamDecoder
from specdec_core.tokens.sampling import RandomStream, distributions
from specdec_core.tokens.statistics import Generation
from specdec_core.tokens.token_tree import Origin, TokenTree
from specdec_core.tokens.topology import after_text
from specdec_core.tokens.verification import Verdict

PREFILL_BUDGET = 512  # tokens of prompts that a step reads, unless one prompt is longer


@dataclass(frozen=True, slots=True)
class _Judgement:
    """The verdict on a slot's tree. `choices` are the target's own tokens: [0] after the text,
    [i + 1] after node i; `target_start` those that begin the next tree."""

    verdict: Verdict
    choices: list[int]
    target_start: list[int]


class Engine:
    """Decodes requests under one configuration, up to `slots` at a time.

    Models and caches survive a change of configuration (:meth:`configure`). `open_link` connects to
    an asynchronous draft, where there is one; it is called once, when first needed.
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
        self.drafts = DraftRunners(pair, slots)
        self._clock = RoundClock()
        self._active: dict[int, ActiveRequest] = {}
        self._waiting: deque[Request] = deque()
        self.configure(configuration)

    def configure(self, configuration: Configuration) -> None:
        """Decode by `configuration` from now on. Only between requests."""
        if not self.idle:
            raise RuntimeError("the configuration cannot change while requests are being decoded")
        self.configuration = configuration
        self.drafter: Drafter | None = None
        self.drafts.reset()
        if configuration.drafter is not None:
            resources = Resources(
                self.drafts.open,
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
                self.target.expect(shape if self.drafter.target_width else after_text(1, shape))

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a prompt, with the special tokens its tokenizer puts first."""
        return tuple(self.pair.tokenizer(text)["input_ids"])

    @property
    def idle(self) -> bool:
        """Whether no request is active or waiting."""
        return not self._active and not self._waiting

    def add(self, request: Request) -> None:
        """Queue a request; it enters a free slot at the next step.

        Raises:
            UserError: the prompt is empty, has unknown tokens or does not fit with its output.
        """
        request.check(self.max_length, self.target.vocab_size)
        self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """Drop a request, waiting or active; unknown ids are ignored."""
        self._waiting = deque(r for r in self._waiting if r.id != request_id)
        for request in [a for a in self._active.values() if a.request.id == request_id]:
            self._leave(request)

    @torch.inference_mode()
    def step(self, texts: bool = True) -> list[Chunk]:
        """One round of all active slots: a chunk for each. Without `texts` a request's text comes
        with its last chunk, unless it has stop strings."""
        self._admit()
        active = list(self._active.values())
        if not active:
            return []
        self._clock.begin()
        drafting = self.drafts.seconds
        trees = self._draft(active)
        judgements = self._verify(active, trees)
        additions = self._commit(active, trees, judgements, texts)
        seconds, now = self._clock.seconds(self.drafts.seconds - drafting), perf_counter()
        pairs = zip(active, additions, strict=True)
        return [request.account(addition, seconds, now) for request, addition in pairs]

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
        """Decode one request; yields a chunk a round."""
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

    # A step, in its order.

    def _admit(self) -> None:
        """Move waiting requests to free slots; those that enter together are prefilled together."""
        entering = self._entering()
        if not entering:
            return
        start = perf_counter()
        states = [
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
            self.target.truncate(slot, 0)
            self.drafts.empty(slot)
        if self.drafter is not None:
            # First, so that a draft on another device reads the texts while the target does.
            self.drafter.open(states)
        self.target.prefill(list(entering), [state.tokens[:-1] for state in states])
        seconds = perf_counter() - start
        for state, request in zip(states, entering.values(), strict=True):
            decoder = StreamDecoder(self.pair.tokenizer, request.stop, request.tokens)
            self._active[state.slot] = ActiveRequest(request, state, decoder, start, seconds)

    def _entering(self) -> dict[int, Request]:
        """Requests that enter now, by slot: so many that their prompts take :data:`PREFILL_BUDGET`
        tokens at most, or else one. The others enter at the next steps, between which those that
        are active go on."""
        entering: dict[int, Request] = {}
        left = PREFILL_BUDGET
        for slot in range(self.slots):
            if slot in self._active:
                continue
            if not self._waiting or (entering and len(self._waiting[0].tokens) > left):
                break
            entering[slot] = self._waiting.popleft()
            left -= len(entering[slot].tokens)
        return entering

    def _draft(self, active: list[ActiveRequest]) -> list[TokenTree]:
        """A draft tree for each slot."""
        trees = [TokenTree() for _ in active]
        if self.drafter is not None:
            for request in active:
                # The target adds its own token to every round.
                request.state.room = request.remaining - 1
                request.state.batch = len(active)
            trees = self.drafter.propose([request.state for request in active])
        self._clock.drafted()
        return trees

    def _verify(self, active: list[ActiveRequest], trees: list[TokenTree]) -> list[_Judgement]:
        """Feed the trees to the target in one forward, and judge them."""
        states = [request.state for request in active]
        unread = [state.tokens[self.target.lengths[state.slot] :] for state in states]
        fed = list(zip(unread, trees, strict=True))
        batch = Batch(
            [state.slot for state in states],
            [text + tree.tokens for text, tree in fed],
            [after_text(len(text), tree.parents) for text, tree in fed],
            [min(len(text), 1) + len(tree) for text, tree in fed],
        )
        self._clock.feeds()
        output = self.target.forward(batch)
        likely = output.choices()
        self._clock.read()
        if self.drafter is not None:
            self.drafter.arrived(states, trees)
        probs: Sequence[Tensor | None] = [None] * len(active)
        if any(rule_of(state.sampling).samples for state in states):
            counted = zip(states, output.counts, strict=True)
            samplings = [state.sampling for state, count in counted for _ in range(count)]
            warped = distributions(output.logits, samplings)
            assert warped is not None
            probs = warped.split(output.counts)
        judgements = [
            self._judge(*slot, partial(output.of_row, n))
            for n, slot in enumerate(zip(states, trees, likely, probs, strict=True))
        ]
        self._clock.verified()
        return judgements

    def _judge(
        self,
        state: SlotState,
        tree: TokenTree,
        likely: list[int],
        probs: Tensor | None,
        logits: Callable[[], Tensor],
    ) -> _Judgement:
        """Accept or reject by the rule for the request's sampling. `logits` returns the forward's
        for this slot."""
        rule = rule_of(state.sampling)
        reading = Reading(tree, likely, probs, state.random, len(state.tokens))
        if state.target_start:
            reading = target_start.with_text(reading)
        choices = rule.choices(reading)
        if state.target_start:
            verdict = target_start.verify(rule, reading, choices, len(state.target_start))
        else:
            verdict = rule.verify(reading, choices)
        start = []
        if self.drafter is not None and (width := self.drafter.target_width):
            start = target_start.next_start(state, verdict, reading.probs, logits, width)
        return _Judgement(verdict, choices, start)

    def _commit(
        self,
        active: list[ActiveRequest],
        trees: list[TokenTree],
        judgements: list[_Judgement],
        texts: bool,
    ) -> list[Addition]:
        """Keep what was accepted, up to the end of the request, and report it to the drafter."""
        additions = []
        for request, tree, judgement in zip(active, trees, judgements, strict=True):
            state, verdict, path = request.state, judgement.verdict, judgement.verdict.path
            read = [node for node in path if node < tree.read]
            self.target.keep(state.slot, len(state.tokens), read)
            started, state.target_start = len(state.target_start), judgement.target_start
            tokens = [tree.tokens[node] for node in path]
            origins = [tree.origins[node] for node in path]
            if not state.target_start and verdict.token is not None:
                tokens.append(verdict.token)
                origins.append(Origin.CORRECTION if verdict.corrected else Origin.BONUS)
            tokens, text, reason = request.cut(tokens, self.pair.eos_token_ids, texts)
            size = len(tokens)
            addition = Addition(tree, path[:size], tokens, origins[:size], text, reason, started)
            request.add(addition)
            additions.append(addition)
            if reason is not None:
                self._leave(request)
            elif self.drafter is not None:
                seconds = self._clock.until_read
                outcome = Outcome(tree, addition.path, judgement.choices, seconds)
                self.drafter.observe(state, outcome)
        return additions

    def _leave(self, request: ActiveRequest) -> None:
        """The request leaves its slot, finished or cancelled."""
        del self._active[request.state.slot]
        if self.drafter is not None:
            self.drafter.close(request.state)
