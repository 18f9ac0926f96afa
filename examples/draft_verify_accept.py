"""Speculative decoding in three steps, without the engine: draft, verify, accept."""

from __future__ import annotations

from specdec_core.config import PairSpec
from specdec_core.models.pair import load_pair
from specdec_core.models.runner import Batch
from specdec_core.tokens.token_tree import TokenOrigin, TokenTree
from specdec_core.tokens.verification import verify_greedy

K = 5  # candidates a round
pair = load_pair(PairSpec(drafts={"small": "bundled:draft-small"}))
target, draft = pair.open_runner(None, slots=1), pair.open_runner("small", slots=1)

text = list(pair.tokenizer("def main(")["input_ids"])
prompt, rounds = len(text), 0
for runner in (target, draft):
    runner.prefill([0], [text[:-1]])

while len(text) - prompt < 48:
    # Draft: the small model continues the text, one token a forward.
    candidates: list[int] = []
    unread = text[draft.lengths[0] :]
    for _ in range(K):
        output = draft.forward(Batch([0], [unread]))
        unread = output.choices()[0][-1:]
        candidates += unread

    # Verify: one forward gives the target's choice after the text and after each candidate.
    output = target.forward(Batch([0], [[text[-1], *candidates]]))
    verdict = verify_greedy(TokenTree.chain(candidates, TokenOrigin.DRAFT), output.choices()[0])

    # Accept: the candidates on which both agree, and the target's own token after them.
    accepted = [candidates[node] for node in verdict.path]
    committed = len(text) + len(accepted)
    target.truncate(0, committed)
    draft.truncate(0, min(committed, draft.lengths[0]))
    text += [*accepted, verdict.token]
    rounds += 1

print(pair.tokenizer.decode(text))
print(f"{len(text) - prompt} tokens in {rounds} forwards of the target")
