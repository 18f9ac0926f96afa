"""Drafting for sequences that another program decodes.

The program announces each sequence and the tokens that it adds to it. Between two additions it gets
a chain of candidates to verify. Its target has made the forwards of all tokens before an addition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Sampling
from specdec_core.drafting.drafter import Outcome, Resources, SlotState
from specdec_core.drafting.heads.storage import load_pair_head
from specdec_core.drafting.recorded import UNKNOWN
from specdec_core.engine.draft_runners import DraftRunners
from specdec_core.engine.forward_costs import ForwardCosts
from specdec_core.models.eagle.runner import ReadRows
from specdec_core.models.loading import load_tokenizer
from specdec_core.models.pair import Pair, check_pair, max_length_of, resolve_dtypes
from specdec_core.tokens.sampling import RandomStream
from specdec_core.tokens.token_tree import TokenTree


def check_chains(configuration: Configuration, program: str) -> None:
    """Raises :class:`UserError` for a configuration that `program` cannot verify the candidates
    of."""
    drafter, label = configuration.drafter, configuration.label
    if not configuration.lossless:
        raise UserError(f"{label} is lossy: {program} verifies every token")
    if drafter is None:
        raise UserError(f"{label} drafts nothing: {program} needs no plug-in for it")
    if configuration.asynchronous:
        raise UserError(f"{label} drafts on a device of its own, which {program} has no place for")
    if drafter.target_started:
        raise UserError(f"{label} begins with the target's tokens, which {program} does not give")
    if not drafter.chain:
        raise UserError(f"{label} drafts trees, {program} verifies chains alone")
    if not all(policy.decodes for _, policy in configuration.policies):
        raise UserError(f"{label} knows the target's next tokens; it can only be replayed")


def opened(spec: PairSpec) -> tuple[PreTrainedTokenizerBase, PairSpec]:
    """The tokenizer of a pair, and the pair with concrete data types. Another program runs the
    target.

    Raises:
        UserError: a draft model is missing, or does not draft for this target.
    """
    if not spec.drafts:
        return load_tokenizer(spec.target), spec
    # The other program limits the length of the target's sequences.
    return check_pair(spec.with_runner(max_length=max_length_of(spec))), resolve_dtypes(spec)


class PlugInDrafter:
    """The drafter of a configuration, for up to `slots` sequences at a time.

    The target of `pair` need not have weights. `read` has the target's features for EAGLE heads, a
    row for each slot. `forward_seconds(n)` times a forward of the target of n tokens, as the other
    program runs it, for policies that ask for its cost. A sequence that is too long for a draft
    model gets no candidates of it.

    Raises:
        UserError: the configuration names a missing draft or head.
    """

    def __init__(
        self,
        pair: Pair,
        configuration: Configuration,
        slots: int,
        read: ReadRows | None = None,
        forward_seconds: Callable[[int], float] | None = None,
    ) -> None:
        self.eos_token_ids = pair.eos_token_ids
        self.vocab_size = pair.target.config.get_text_config(decoder=True).vocab_size
        # The program has taken most of the memory: a pool of tokens grows as they come.
        self.runners = DraftRunners(pair, slots, read, pair.spec.runner.max_length, cache_tokens=0)
        if forward_seconds is not None:
            costs = ForwardCosts(pair, forward_seconds, self.runners)
            configuration = configuration.priced(costs)
        assert configuration.drafter is not None
        resources = Resources(
            self.runners.open,
            partial(load_pair_head, pair),
            self.vocab_size,
            self.eos_token_ids,
            slots=slots,
        )
        self._build = partial(resources.build, configuration.drafter)
        self.sequences: dict[int, SlotState] = {}
        self.forget()

    def forget(self) -> None:
        """Forget what was learned from earlier sequences, and the sequences that have not ended."""
        self.drafter = self._build()
        self.sequences.clear()
        self._trees: dict[int, TokenTree] = {}

    def begin(
        self, slot: int, tokens: Sequence[int], sampling: Sampling | None = None, seed: int = 0
    ) -> None:
        """A sequence begins, in a free slot. `sampling` is how the draft models draw."""
        self.runners.begin(slot, slot, 0)
        random = RandomStream(seed, self.vocab_size)
        sequence = SlotState(slot, list(tokens), sampling or Sampling(), random)
        self.sequences[slot] = sequence
        self.drafter.open([sequence])

    def propose(self, rooms: Mapping[int, int]) -> dict[int, TokenTree]:
        """Chains after the sequences in these slots; `rooms` limits the tokens of each chain."""
        asked = [self.sequences[slot] for slot in rooms]
        for sequence in asked:
            sequence.room, sequence.batch = rooms[sequence.slot], len(asked)
        trees = dict(zip(rooms, self.drafter.propose(asked) if asked else [], strict=True))
        self._trees |= trees
        return trees

    def add(
        self,
        slot: int,
        tokens: Sequence[int],
        choices: Sequence[int] | None = None,
        seconds: float = 0.0,
    ) -> None:
        """The target has added `tokens` to a sequence: accepted candidates, then its own token.
        `choices` are its tokens after the sequence and after each candidate, where they are known;
        drafting and the target's forward took `seconds`."""
        sequence, tree = self.sequences[slot], self._trees.pop(slot, None)
        sequence.tokens += tokens
        if tree is None:
            self.drafter.missed(sequence)
            return
        path = tree.follow(tokens[:-1])
        if choices is None:
            choices = [*tokens, *[UNKNOWN] * (1 + len(tree) - len(tokens))]
        self.drafter.observe(sequence, Outcome(tree, path, list(choices), seconds))

    def end(self, slot: int) -> None:
        """A sequence is complete, or aborted."""
        self._trees.pop(slot, None)
        self.drafter.close(self.sequences.pop(slot))
