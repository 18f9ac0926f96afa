"""Ouroboros: phrases speed up and lengthen drafts (Zhao et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec_core.drafting.drafter import Outcome, Resources, SlotState
from specdec_core.drafting.ouroboros.settings import OuroborosSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.post_use.drafter import PostUseDrafter
from specdec_core.drafting.post_use.settings import PostUseSettings
from specdec_core.drafting.token_cache import TokenCacheSettings
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree


@dataclass(slots=True)
class _Line:
    """Guesses at the coming tokens; `nodes` are theirs in the latest guessed tree."""

    tokens: list[int]
    nodes: list[int] = field(default_factory=list)


class OuroborosDrafter(PostUseDrafter):
    """A draft model that drafts phrase by phrase, and phrases after its drafts.

    As published: the draft model tries pooled phrases, several tokens a forward; K phrases after
    the end of the draft go to the target with it; runs of rejected drafts that the target confirms
    become phrases; the pool is kept from request to request.

    Unlike published: the draft model finds new phrases by iterating one line of `window` guesses
    (Jacobi decoding). The published code has lookahead's two-dimensional window, whose forwards are
    several times as wide. Runs of the line, of tried phrases and of rejected drafts become phrases
    where the verifier's own choices confirm them. All proposals are one-hot and verified by the
    common rule, which is lossless under sampling too; the published code verifies greedily or
    compares samples.
    """

    def __init__(self, settings: OuroborosSettings, resources: Resources) -> None:
        cache = TokenCacheSettings(
            phrases=settings.phrases,
            phrase_length=settings.phrase_length,
            pool=settings.pool,
            per_key=settings.per_key,
            memory="all",
        )
        reuse = PostUseSettings.model_construct(
            draft=settings.draft,
            policy=FixedSettings(max_tokens=settings.max_tokens),
            at_draft=settings.phrases,
            at_target=settings.phrases,
            anchors=1,
            cache=cache,
        )
        super().__init__(reuse, resources)
        self.window = settings.window
        self._lines: dict[int, _Line] = {}

    def open(self, sequences: Sequence[SlotState]) -> None:
        super().open(sequences)
        for sequence in sequences:
            self._lines[sequence.slot] = _Line(self._filled([], sequence.tokens))

    def guess(self, sequence: SlotState, drafted: Sequence[int], room: int) -> TokenTree:
        tree = super().guess(sequence, drafted, room)
        line, node = self._lines[sequence.slot], ROOT
        line.nodes = []
        for token in line.tokens[:room]:
            node = tree.graft(node, [token], TokenOrigin.CACHE)
            line.nodes.append(node)
        return tree

    def learn(self, sequence: SlotState, drafted: Sequence[int], outcome: Outcome) -> None:
        super().learn(sequence, drafted, outcome)
        # Jacobi: the next guess at a place is the draft model's choice after the guesses before it.
        line = self._lines[sequence.slot]
        answers = [outcome.choices[node + 1] for node in (ROOT, *line.nodes)]
        decided = outcome.accepted + 1
        line.tokens = self._filled(answers[decided:], [*sequence.tokens, *drafted])

    def close(self, sequence: SlotState) -> None:
        super().close(sequence)
        self._lines.pop(sequence.slot, None)

    def _filled(self, line: list[int], text: list[int]) -> list[int]:
        """The line, filled up to `window` tokens with the sequence's last ones."""
        missing = self.window - len(line)
        return [*line, *text[len(text) - missing :]] if missing > 0 else line[: self.window]
