"""Speculative decoding in three steps, without the engine: draft, verify, accept."""

from __future__ import annotations

from specdec_core.config import PairSpec
from specdec_core.models.pair import load_pair
from specdec_core.models.runner import Batch
from specdec_core.tokens.token_tree import Origin, TokenTree
from specdec_core.tokens.verification import verify_greedy

K = 5  # candidates a round
pair = load_pair(PairSpec(drafts={"small": "bundled:draft-small"}))
target, draft = pair.open_runner(None, slots=1), pair.open_runner("small", slots=1)

text = list(pair.tokenizer("def main(")["input_ids"])
prompt, rounds = len(text), 0
for runner in (target, draft):
    runner.prefill([0], [text[:-1]])

while len(text) - prompt < 48:
    # Draft: the small model goes on with the text, a token a forward.
    candidates: list[int] = []
    unread = text[draft.lengths[0] :]
    for _ in range(K):
        output = draft.forward(Batch([0], [unread]))
        unread = output.choices()[0][-1:]
        candidates += unread

    # Verify: one forward of the target tells its own choice behind the text and each candidate.
    output = target.forward(Batch([0], [[text[-1], *candidates]]))
    verdict = verify_greedy(TokenTree.chain(candidates, Origin.DRAFT), output.choices()[0])

    # Accept: what both agree on, and the target's own token behind it.
    accepted = [candidates[node] for node in verdict.path]
    held = len(text) + len(accepted)
    target.truncate(0, held)
    draft.truncate(0, min(held, draft.lengths[0]))
    text += [*accepted, verdict.token]
    rounds += 1

print(pair.tokenizer.decode(text))
print(f"{len(text) - prompt} tokens in {rounds} forwards of the target")
