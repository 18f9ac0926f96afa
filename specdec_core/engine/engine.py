"""The engine. A step is plan → enter → draft → verify → commit, for slots of any lengths.

Requests join and leave between steps. A slot's tokens, its rows in the runners and its random
stream depend on its own request alone. A decoding slot feeds the target the end of its sequence and
its draft tree, a prefilling slot a chunk of its prompt. Where rows are packed, one forward does
both.

A request's first round is the one that prefills the end of its prompt. It has no candidates, so the
first token waits for no drafter. Draft models prefill what the target has prefilled in earlier
steps. So when a draft model is fed the token at position p of a sequence,
`target.lengths[slot] >= p`: the target's features of all tokens before it are known. Only tokens
that were drafted in the round itself go beyond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from time import perf_counter
from weakref import WeakKeyDictionary

import torch

from specdec_core.base.errors import UserError
from specdec_core.base.round_clock import RoundClock
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.heads.storage import load_pair_head
from specdec_core.drafting.pearl.link import no_link
from specdec_core.drafting.states import DrafterMemory
from specdec_core.drafting.target_started.drafter import TargetStarted
from specdec_core.engine.active_request import ActiveRequest, Addition
from specdec_core.engine.draft_runners import DraftRunners
from specdec_core.engine.forward_costs import ForwardCosts
from specdec_core.engine.judging import Judgement, judge, judge_by_rule
from specdec_core.engine.prefixes import CachedPrefixes
from specdec_core.engine.request import Chunk, Request
from specdec_core.engine.scheduler import BLOCK, Limits, Scheduler, StepPlan
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch, CacheLost
from specdec_core.tokens.detokenising import StreamDecoder
from specdec_core.tokens.grammar import grammars_of
from specdec_core.tokens.sampling import RandomStream
from specdec_core.tokens.statistics import Generation
from specdec_core.tokens.token_tree import TokenOrigin, TokenTree
from specdec_core.tokens.topology import after_text

_SEEDS = 1 << 16  # seeds that are counted apart
_MOST_LOSSES = 3  # of rows without a round between them
READY = 600.0  # seconds that an asynchronous draft may take to load


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine's metrics show."""

    waiting: int  # requests without a slot
    cache_usage: float  # share of the cache that running requests take
    preemptions: int
    prefix_hits: int  # prompts with a prefix-cache hit
    prefix_tokens: int  # their tokens that were not prefilled
    read_seconds: float  # of prefills, apart from rounds


class Engine:
    """Decodes requests under one configuration, up to `slots` at a time.

    Models and caches survive a change of configuration (:meth:`configure`). The pair's link to an
    asynchronous draft is opened once, when first needed. The scheduler keeps to `limits`, by
    default to the number of `slots` only. `max_length` is the most tokens of a request, prompt and
    output, that the pair and the whole cache hold. Raises :class:`UserError` where the cache has no
    room for any request.
    """

    def __init__(
        self,
        pair: Pair,
        configuration: Configuration = AUTOREGRESSIVE,
        slots: int = 1,
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits(slots)
        slots, limits = limits.slots, limits.verifying(configuration.candidates)
        self.pair, self.slots = pair, slots
        self._link = cache(pair.open_link or no_link)
        self.max_length = _length(pair, limits)
        self.target = pair.open_runner(None, slots, cache_tokens=limits.cache_tokens)
        self.drafts = DraftRunners(pair, slots, self.target, pair.max_length, limits.cache_tokens)
        self._clock = RoundClock()
        self._grammars = grammars_of(pair.tokenizer, self.target.vocab_size, pair.eos_token_ids)
        self.scheduler = Scheduler(limits, self._place if limits.share_prefixes else None)
        self.prefixes = CachedPrefixes()
        self._begun: dict[int, tuple[int, int]] = {}  # by slot: the source of its prefix, tokens
        self.last = StepPlan()  # the last step's plan
        self._losses = 0  # of the target's rows since the last round
        self._read_seconds = 0.0
        self.costs = ForwardCosts(pair, self.target, self.drafts)
        # How often each drafter's requests had a seed: what it remembers was drawn with these.
        self._seeds = WeakKeyDictionary[Drafter, Counter[int]]()
        self._waiting: dict[str, Request] = {}
        self._active: dict[int, ActiveRequest] = {}
        self._forced: dict[int, TokenTree] = {}  # by slot: this step's, in place of the drafter's
        self.configure(configuration)

    def priced(self, configuration: Configuration) -> Configuration:
        """The configuration with the cost of a target forward here, where its policies need it.
        Raises :class:`UserError` for a draft model that is not in this process."""
        return configuration.priced(self.costs)

    def configure(self, configuration: Configuration, drafter: Drafter | None = None) -> None:
        """Decode by `configuration` from now on, only between requests. `drafter` is one that this
        engine had under the same configuration, with all it has learned; without it the engine
        makes a new drafter."""
        if not self.idle:
            raise RuntimeError("the configuration cannot change while requests are being decoded")
        self.configuration = configuration
        self.scheduler.limits = self.scheduler.limits.verifying(configuration.candidates)
        self.max_length = _length(self.pair, self.scheduler.limits)
        self.drafter: Drafter | None = None
        self._starter: TargetStarted | None = None  # the drafter, where the target begins its trees
        self.drafts.reset()
        if configuration.drafter is not None:
            pair = self.pair  # a drafter may keep the resources, which must not hold the engine
            resources = Resources(
                self.drafts.open,
                partial(load_pair_head, pair),
                self.target.vocab_size,
                pair.eos_token_ids,
                self._clock,
                self.slots,
                open_link=self._link,
            )
            priced = self.priced(configuration)
            assert priced.drafter is not None
            built = resources.build(priced.drafter)  # also opens the draft runners that it needs
            self.drafter = built if drafter is None else drafter
            if isinstance(self.drafter, TargetStarted):
                self._starter = self.drafter
            for shape in self.drafter.shapes:
                self.target.expect(shape)

    def wait_for_draft(self) -> None:
        """Wait until the asynchronous draft of the configuration, if it has one, is ready: before
        that, decoding is autoregressive. Raises :class:`UserError` where it does not get ready."""
        if self.drafter is not None and not self.drafter.prepare(READY):
            raise UserError(f"{self.configuration.label}: the draft did not get ready")

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a prompt, with the special tokens that its tokenizer puts first."""
        return tuple(self.pair.tokenizer(text)["input_ids"])

    @property
    def idle(self) -> bool:
        """Whether no request is active or waiting."""
        return not self._active and not self._waiting

    @property
    def learned(self) -> DrafterMemory | None:
        """What the drafter has learned for later requests; None where it keeps nothing."""
        return None if self.drafter is None else self.drafter.memory

    @property
    def vocab_size(self) -> int:
        """The number of the target's tokens."""
        return self.target.vocab_size

    def status(self) -> EngineStatus:
        """The current counts."""
        holds = self.scheduler.limits.cache_tokens or self.slots * self.max_length
        return EngineStatus(
            len(self.scheduler.waiting),
            self.scheduler.held / holds,
            self.scheduler.preemptions,
            self.prefixes.hits,
            self.prefixes.tokens,
            self._read_seconds,
        )

    def add(self, request: Request) -> None:
        """Queue a request; it enters a free slot at a later step.

        Raises:
            UserError: the prompt is empty, has unknown tokens or does not fit with its output, or a
                setting cannot be met.
            ValueError: a request of this id is unfinished.
        """
        request.check(self.max_length, self.vocab_size)
        request = self.prepared(request)
        if request.id in self._waiting or self._running(request.id):
            raise ValueError(f"request {request.id!r} is unfinished")
        self._waiting[request.id] = request
        self.scheduler.add(request.id, len(request.text))

    def prepared(self, request: Request) -> Request:
        """The request with its grammar compiled, which may take a second. Unlike the other methods
        any thread may call it, also during a step. Raises :class:`UserError`."""
        if request.grammar is None:
            return request
        return replace(request, grammar=self._grammars.prepared(request.grammar))

    def cancel(self, request_id: str) -> None:
        """Drop a request, waiting or active; unknown ids are ignored."""
        if self._waiting.pop(request_id, None) is not None:
            self.scheduler.leave(request_id)
        for request in self._running(request_id):
            self._leave(request)

    def _running(self, request_id: str) -> list[ActiveRequest]:
        return [a for a in self._active.values() if a.request.id == request_id]

    @torch.inference_mode()
    def step(self, texts: bool = True) -> list[Chunk]:
        """One round of each decoding slot, and a prefill chunk of prefilling ones; returns a chunk
        of output for each round.
        With `texts` false a request's text comes with its last chunk, unless it has stop
        strings."""
        try:
            chunks = self._step(texts)
        except CacheLost:
            self._losses += 1
            if self._losses > _MOST_LOSSES:
                raise
            self._resume()
            return []
        if chunks:
            self._losses = 0
        return chunks

    def _step(self, texts: bool) -> list[Chunk]:
        start = perf_counter()
        before, self.last = self.last, (plan := self.scheduler.plan())
        self._enter(plan)
        self._forget()
        self._follow(before, plan)
        fed = self._read_ahead(plan)
        if before.reading or plan.reading:
            self._read_seconds += perf_counter() - start
        if not plan.decoding:
            return []
        active = [self._active[slot] for slot in plan.decoding]
        self._clock.begin()
        drafting = self.drafts.seconds
        trees = self._draft(active)
        judgements = self._verify(active, trees, fed)
        additions = self._commit(active, trees, judgements, texts)
        seconds, now = self._clock.seconds(self.drafts.seconds - drafting), perf_counter()
        pairs = zip(active, additions, strict=True)
        return [request.account(addition, seconds, now) for request, addition in pairs]

    def generate(
        self,
        requests: Sequence[Request],
        on_finish: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Decode `requests` and return their generations in the same order. Raises
        :class:`UserError` for a request that is refused or ends with an error; all requests are
        dropped then."""
        done: dict[str, Generation] = {}
        try:
            for request in requests:
                self.add(request)
            while not self.idle:
                for chunk in self.step(texts=False):
                    if chunk.finished:
                        self.check(chunk.finished)
                        done[chunk.request_id] = chunk.finished
                        if on_finish:
                            on_finish(chunk.finished)
        except BaseException:  # also where rows or a draft's process are lost for good
            self._drop()
            raise
        return [done[request.id] for request in requests]

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Decode one request and yield its chunks. Raises :class:`UserError` where it ends with an
        error."""
        self.add(request)
        finished = False
        try:
            while not finished:
                for chunk in self.step():
                    if chunk.request_id == request.id:
                        if finished := chunk.finished is not None:
                            self.check(chunk.finished)
                        yield chunk
        finally:
            self.cancel(request.id)

    def check(self, generation: Generation) -> None:
        """Raises :class:`UserError` for a generation with an error; all requests are dropped."""
        if (failure := generation.failure) is not None:
            self._drop()
            raise UserError(f"{generation.request_id}: {failure}")

    def _drop(self) -> None:
        """Drop all requests."""
        for name in [*self._waiting, *(a.request.id for a in self._active.values())]:
            self.cancel(name)

    def _resume(self) -> None:
        """The rows of the target or a draft are lost: requests resume as after preemption, and
        nothing of the step counts."""
        self.scheduler.lost()
        for slot in range(self.slots):
            self.target.truncate(slot, 0)
            self.drafts.begin(slot, slot, 0)
        if self.drafter is not None:
            for slot in self.last.decoding:
                self.drafter.missed(self._active[slot].state)
        self.last = StepPlan()

    # A step, in its order.

    def _place(self, name: str, free: Sequence[int]) -> tuple[int, int]:
        """The slot for a waiting request, and the number of its prompt's tokens that the cache
        holds; 0 where the prompt's logits are wanted, which the cache does not have."""
        request, held = self._waiting[name], self.target.lengths
        slot, source, count = self.prefixes.find(
            request.text, held, free, read=not request.prompt_logprobs
        )
        self._begun[slot] = source, count
        return slot, count

    def _randomness(self, request: Request) -> RandomStream:
        """The randomness of a request that enters."""
        drafter, earlier = self.configuration.drafter, 0
        if drafter is not None and drafter.remembers:
            # Two seeds with the same remainder only take other random numbers, as good ones.
            place = request.seed % _SEEDS
            assert self.drafter is not None
            seeds = self._seeds.setdefault(self.drafter, Counter())
            earlier, seeds[place] = seeds[place], seeds[place] + 1
        return RandomStream(request.seed, self.target.vocab_size, len(request.written), earlier)

    def _enter(self, plan: StepPlan) -> None:
        """Empty the rows of preempted requests, and open slots for entering requests."""
        for slot in (*plan.preempted, *plan.entering):
            source, count = self._begun.pop(slot, (slot, 0))
            if source == slot:
                self.target.truncate(slot, count)
            else:
                self.target.fork(source, [slot], [count])
            self.drafts.begin(slot, source, count)
        if not plan.entering:
            return
        start, states = perf_counter(), []
        for slot, name in plan.entering.items():
            request = self._waiting.pop(name)
            sampling = request.sampling or self.configuration.sampling
            state = SlotState(
                slot,
                list(request.text),
                sampling,
                self._randomness(request),
                warper=request.rules(sampling, self.pair.eos_token_ids).warper(self._grammars),
                room=max(request.max_new_tokens - len(request.written) - 1, 0),
                speculate=request.speculate,
            )
            decoder = StreamDecoder(
                self.pair.tokenizer,
                request.stop,
                request.tokens,
                request.min_tokens,
                request.shown,
            )
            active = ActiveRequest.begin(request, state, decoder, start)
            active.cached = min(self.target.lengths[slot], len(request.tokens))
            self._active[slot] = active
            self.prefixes.holds(slot, state.tokens)
            states.append(state)
        if self.drafter is not None:
            # First, so that a draft model on another device prefills while the target does.
            self.drafter.open(states)

    def _forget(self) -> None:
        """Empty rows of free slots that take memory which running requests may need."""
        for slot in self.prefixes.forget(self.target.lengths, self.scheduler.room):
            self.target.truncate(slot, 0)
            self.drafts.begin(slot, slot, 0)

    def _follow(self, before: StepPlan, plan: StepPlan) -> None:
        """Prefill the draft models with what the target has prefilled, of the slots that it
        prefilled in the step `before`: never ahead of it, and not before a request's first step."""
        if self.drafter is None:
            return
        slots = [slot for slot in before.reading if slot not in plan.entering]
        present = [self._active[slot] for slot in slots if slot in self._active]
        if following := [request for request in present if request.request.speculate != 0]:
            start, held = perf_counter(), self.target.lengths
            states = [request.state for request in following]
            # A drafter itself feeds the sequence's last token.
            until = {s.slot: min(len(s.tokens) - 1, held[s.slot]) for s in states}
            self.drafts.read({s.slot: s.tokens for s in states}, until)
            for request in following:
                request.prefill_seconds += perf_counter() - start

    def _read_ahead(self, plan: StepPlan) -> dict[int, list[int]]:
        """Prefill the target with what does not go into the step's forward with the candidates;
        returns what does, by slot. Everything up to a chunk goes into it where rows are packed, or
        only one row is fed; otherwise the last token in each slot that decodes. Prompts with
        logits to return have separate forwards, up to the last token."""
        held, texts = self.target.lengths, {}
        for slot in sorted({*plan.decoding, *plan.reading}):
            text = self._active[slot].state.tokens[held[slot] :]
            texts[slot] = text if slot in plan.decoding else text[: plan.reading[slot]]
        most = dict.fromkeys(plan.decoding, 1)
        if plan.decoding and (self.target.mixes or len(texts) == 1):
            most = dict.fromkeys(texts, self.target.prefill_chunk)
        measured = [slot for slot in texts if self._active[slot].measures]
        most |= {slot: int(slot in plan.decoding) for slot in measured}
        ends = {slot: max(len(text) - most.get(slot, 0), 0) for slot, text in texts.items()}
        ahead = {slot: texts[slot][:end] for slot, end in ends.items() if end}
        for slot in measured:
            prompt = self._active[slot].prompt_logprobs
            assert prompt is not None
            start = held[slot]
            for logits in self.target.predict(slot, ahead.pop(slot, [])):
                prompt.add(start, logits)
                start += len(logits)
        if ahead:
            self.target.prefill(list(ahead), list(ahead.values()))
        return {slot: text[ends[slot] :] for slot, text in texts.items()}

    def _draft(self, active: list[ActiveRequest]) -> list[TokenTree]:
        """A draft tree for each slot; empty where nothing is drafted."""
        self._forced = {
            request.state.slot: tree for request in active if (tree := self._forced_tokens(request))
        }
        trees = [self._forced.get(request.state.slot) or TokenTree() for request in active]
        drafting = [n for n, request in enumerate(active) if self._drafts(request)]
        if self.drafter is not None and drafting:
            for request in active:
                request.state.room = 0 if request.plain else request.room
                request.state.batch = len(active)
            proposed = self.drafter.propose([active[n].state for n in drafting])
            for n, tree in zip(drafting, proposed, strict=True):
                trees[n] = tree
        self._clock.drafted()
        return trees

    def _drafts(self, request: ActiveRequest) -> bool:
        """Whether the drafter drafts in a request's round: not in the first one, and not where the
        grammar gives candidates that cost nothing. A request without speculation is drafted for
        only where the target's tokens begin the trees."""
        if self.drafter is None or not request.begun or request.state.slot in self._forced:
            return False
        if self._starter is not None:
            return True
        return request.request.speculate != 0 and not request.plain

    def _forced_tokens(self, request: ActiveRequest) -> TokenTree | None:
        """The tokens that the request's grammar leaves no choice about, as a chain that no model
        has to draft, where there are at least two. The chain is no deeper than the drafter's
        trees, which the target's forwards expect, or than the cache has room for."""
        drafter, warper = self.drafter, request.state.warper
        if drafter is None or warper is None or warper.matcher is None or not request.begun:
            return None
        if request.plain:
            return None
        if self._starter or self.configuration.asynchronous:
            return None
        most = self.scheduler.limits.ahead
        room = min(request.room, max((len(s) - 1 for s in drafter.shapes), default=most))
        output = request.state.tokens[len(request.request.tokens) :]
        tokens = warper.matcher.forced(output, room) if room > 1 else []
        return TokenTree.chain(tokens, TokenOrigin.GRAMMAR) if len(tokens) > 1 else None

    def _verify(
        self, active: list[ActiveRequest], trees: list[TokenTree], fed: Mapping[int, list[int]]
    ) -> list[Judgement | None]:
        """Feed the target the tokens `fed`, by slot, with the trees after them, in one forward, and
        judge the trees."""
        states = [request.state for request in active]
        rows = [(fed[state.slot], tree) for state, tree in zip(states, trees, strict=True)]
        decoding = {state.slot for state in states}
        chunks = {slot: text for slot, text in fed.items() if text and slot not in decoding}
        batch = Batch(
            [*(state.slot for state in states), *chunks],
            [*(text + tree.tokens for text, tree in rows), *chunks.values()],
            [*(after_text(len(text), tree.parents) for text, tree in rows), *[None] * len(chunks)],
            # Of the sequence's last token, unless the target began the tree, and each candidate.
            [*(len(tree) + (not tree.begun) for tree in trees), *[0] * len(chunks)],
        )
        begun = [n for n, request in enumerate(active) if request.begun]
        self.scheduler.fed([len(trees[n]) for n in begun])
        self._clock.feeds()
        output = self.target.forward(batch)
        likely = output.choices()
        self._clock.read()
        drafted = [n for n, request in enumerate(active) if self._drafts(request)]
        if self.drafter is not None and drafted:
            self.drafter.arrived([states[n] for n in drafted], [trees[n] for n in drafted])
        if any(request.logprobs is not None for request in active):
            _ = output.logits  # now: nothing of a round is kept before all of it is known
        judged = judge_by_rule if self._starter is None else self._starter.judge
        judgements = judge(states, trees, output, likely, judged)
        self._clock.verified()
        return judgements

    def _commit(
        self,
        active: list[ActiveRequest],
        trees: list[TokenTree],
        judgements: list[Judgement | None],
        texts: bool,
    ) -> list[Addition]:
        """Keep what was accepted, up to the end of the request, and report it to the drafter."""
        additions = []
        for request, tree, judgement in zip(active, trees, judgements, strict=True):
            if judgement is None:
                additions.append(self._unjudged(request, tree))
                continue
            state, verdict, path = request.state, judgement.verdict, judgement.verdict.path
            read = [node for node in path if node < tree.read]
            self.target.keep(state.slot, len(state.tokens), read)
            tokens = [tree.tokens[node] for node in path]
            origins = [tree.origins[node] for node in path]
            if verdict.token is not None:
                tokens.append(verdict.token)
                origins.append(TokenOrigin.CORRECTION if verdict.corrected else TokenOrigin.BONUS)
            final = request.request.final(self.pair.eos_token_ids)
            tokens, text, reason = request.cut(tokens, final, texts)
            size = len(tokens)
            logprobs = None
            if request.logprobs is not None:
                logits, starts = judgement.logits(), self._starter is not None
                logprobs = request.logprobs.add(tree, path, tokens, logits, starts)
            addition = Addition(tree, path[:size], tokens, origins[:size], text, reason, logprobs)
            request.add(addition)
            additions.append(addition)
            if reason is not None:
                # Draft models may hold candidates that were rejected.
                self.drafts.cut(state.slot, len(state.tokens) - size)
                self._leave(request)
                continue
            self.scheduler.grew(request.request.id, len(state.tokens))
            if self.drafter is not None and not self._drafts(request):
                self.drafter.missed(state)
            elif self.drafter is not None:
                seconds = self._clock.until_read
                outcome = Outcome(tree, addition.path, judgement.choices, seconds)
                self.drafter.observe(state, outcome)
            request.plain = False
        return additions

    def _unjudged(self, request: ActiveRequest, tree: TokenTree) -> Addition:
        """Add nothing, because the target's logits are no numbers. A candidate may have caused
        that, so the next round has none. Without candidates, the request ends."""
        state = request.state
        request.plain = len(tree) > tree.begun
        if request.plain:
            self.target.truncate(state.slot, len(state.tokens) - (not tree.begun))
            self.drafts.cut(state.slot, len(state.tokens) - 1)
            if self.drafter is not None:
                self.drafter.missed(state)
            return Addition(tree, [], [], [], "", None)
        self.target.truncate(state.slot, 0)
        self.drafts.cut(state.slot, 0)
        self._leave(request)
        return Addition(tree, [], [], [], "", "error")

    def _leave(self, request: ActiveRequest) -> None:
        """The request leaves its slot, finished or cancelled."""
        del self._active[request.state.slot]
        self.prefixes.left(request.state.slot)
        self.scheduler.leave(request.request.id)
        if self.drafter is not None:
            self.drafter.close(request.state)


def _length(pair: Pair, limits: Limits) -> int:
    """The most tokens of a request. Raises :class:`UserError`."""
    most = pair.max_length if limits.most is None else min(pair.max_length, limits.most)
    if most < 2:
        raise UserError(
            f"a cache of {limits.cache_tokens} tokens holds no request: it needs"
            f" {BLOCK * limits.blocks_of(2)}"
        )
    return most
