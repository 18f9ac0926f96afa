"""Useful tokens of drafts are used again, in the draft model and in the target (Post-use & Pre-cut,
§5.1, Alg. 1–3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec_core.drafting.chain import ChainDrafter
from specdec_core.drafting.drafter import Outcome, Resources, SlotState
from specdec_core.drafting.post_use.settings import PostUseSettings
from specdec_core.drafting.token_cache import TokenCacheDrafter, useful_phrases
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree


class PostUseDrafter(ChainDrafter):
    """A draft model's chain with a token cache on both sides.

    At the draft model (Alg. 2) W phrases after the chain's last token go through it in one masked
    pass; the best of them lengthens the chain as far as the draft model agrees, and at least by its
    own token. At the target (Alg. 3) W phrases after each of the chain's last m tokens join the
    tree; of a chain shorter than m also after the sequence.

    Where the paper leaves a choice, or this differs from it:

    - Alg. 2 appends a phrase when more than one of its tokens matches. One is enough here: the
      draft model's own token after it costs nothing.
    - Verified phrases return to the cache (line 19 of Alg. 2, line 20 of Alg. 3) as far as they
      are USEFUL (Eq. 7), with the verifier's next token. Its token after a mismatch belongs to
      another sequence and is left out.
    - Alg. 3 chooses the longest match. The tree's verification does so when greedy, and tries the
      siblings in the cache's order when sampling, where the choice must not depend on the outcome.
    - Under sampling a phrase is a one-hot proposal in both models, which keeps both exact.
    """

    def __init__(self, settings: PostUseSettings, resources: Resources) -> None:
        super().__init__(settings, resources)
        self.settings = settings
        self.cache = TokenCacheDrafter(settings.cache, resources)
        self.parts = (self.cache,)
        self._learns = settings.cache.learn_from == "useful"

    def guess(self, sequence: SlotState, drafted: Sequence[int], room: int) -> TokenTree:
        tree = TokenTree()
        last = drafted[-1] if drafted else sequence.tokens[-1]
        self._graft(tree, sequence, ROOT, last, self.settings.at_draft, room)
        return tree

    def learn(self, sequence: SlotState, drafted: Sequence[int], outcome: Outcome) -> None:
        """Alg. 2, line 19: USEFUL tokens of the phrases, the appended ones too."""
        if self._learns:
            before = drafted[-1] if drafted else sequence.tokens[-1]
            verified = replace(outcome, path=[])
            for key, phrase in useful_phrases(verified, before, self.settings.cache.phrase_length):
                self.cache.learn(sequence, key, phrase)

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        trees = super().propose(sequences)
        for sequence, tree in zip(sequences, trees, strict=True):
            self._reuse_at_target(sequence, tree)
        return trees

    def _reuse_at_target(self, sequence: SlotState, tree: TokenTree) -> None:
        """Alg. 3: phrases after the chain's last tokens."""
        drafted = list(tree.tokens)
        for anchor in range(max(len(drafted) - self.settings.anchors, ROOT), len(drafted)):
            last = drafted[anchor] if anchor >= 0 else sequence.tokens[-1]
            room = sequence.room - anchor - 1
            self._graft(tree, sequence, anchor, last, self.settings.at_target, room)

    def _graft(
        self, tree: TokenTree, sequence: SlotState, parent: int, key: int, count: int, room: int
    ) -> None:
        if count and room > 0 and key not in self.eos_token_ids:
            for phrase in self.cache.phrases(sequence, key, count):
                tree.graft(parent, phrase[:room], TokenOrigin.CACHE)
