"""Recordings of rejection sampling replay as drafts are accepted when they are decoded."""

from itertools import pairwise

import numpy as np
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.policy import build_policy
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import RecordedPrompts, Trace
from specdec_core.recordings.track import Track
from specdec_core.recordings.verified import verified
from tests.specdec_core.recordings.test_record import record

SAMPLING = Sampling(temperature=1)
TOKENS, TEXT, LONGEST = 6, 10_000, 6


@pytest.fixture(scope="module")
def sampled(tiny_pair, tmp_path_factory):
    return record(tiny_pair, tmp_path_factory.mktemp("sampled"), sampling=SAMPLING)


class Chains:
    """A target and a draft: p and q (token, token) of the next token, given the last one."""

    def __init__(self):
        self.random = np.random.default_rng(3)
        self.p, self.q = self.random.dirichlet(np.full(TOKENS, 0.5), (2, TOKENS))
        self.q = 0.5 * self.p + 0.5 * self.q

    def draw(self, probabilities):
        return min(int(probabilities.cumsum().searchsorted(self.random.random())), TOKENS - 1)

    def recorded(self, header, top_k):
        """A long text of the target, with what the draft drafts at each of its tokens."""
        text, rows = [0], []
        for t in range(TEXT):
            last = text[-1]
            x, y = self.draw(self.p[last]), self.draw(self.q[last])
            text.append(x)
            rows.append((t, 0, last, y, x))
        for t, _, _, y, x in rows[:]:
            for step in range(1, LONGEST if x != y else 1):
                last, y = y, self.draw(self.q[y])
                rows.append((t, step, last, y, x))
        position, step, last, y, x = np.array(rows).T
        q, p = self.q[last], self.p[last]
        chosen = np.arange(len(rows))
        columns = {
            "prompt": np.zeros_like(position),
            "position": position,
            "step": step,
            "draft_token": y,
            "top_probability": q.max(1),
            "top_probs": np.sort(q)[:, : -top_k - 1 : -1],
            "probability": q[chosen, y],
            "target_token": x,
            "rank": (q > q[chosen, x][:, None]).sum(1),
            "target_probability": p[chosen, x],
            "draft_token_target_probability": p[chosen, y],
            "overlap": np.minimum(p, q).sum(1),
        }
        changes = {"max_new_tokens": TEXT + LONGEST, "max_draft": LONGEST, "top_k": top_k}
        header = header.model_copy(update={"eos_token_ids": (), **changes})
        prompts = RecordedPrompts([0], ["text"], [np.array([0])], [np.array(text[1:])])
        return Trace(header, prompts, columns)

    def decoded(self, longest, threshold):
        """Speculative sampling (Leviathan et al., Alg. 1): a round's tokens, its candidates, and
        the share of them that is accepted."""
        last, tokens, rounds, drafted, accepted = 0, 0, 0, 0, 0
        while tokens < TEXT:
            contexts = [last]
            while len(contexts) <= longest:
                contexts.append(self.draw(self.q[contexts[-1]]))
                if self.q[contexts[-2]].max() < threshold:
                    break
            rounds, drafted = rounds + 1, drafted + len(contexts) - 1
            for last, y in pairwise(contexts):
                p, q = self.p[last], self.q[last]
                if self.random.random() * q[y] >= p[y]:
                    residual = np.maximum(p - q, 0)
                    last = self.draw(residual / residual.sum())
                    break
                accepted, tokens = accepted + 1, tokens + 1
            else:
                last = self.draw(self.p[contexts[-1]])
            tokens += 1
        return tokens / rounds, drafted / rounds, accepted / drafted


@pytest.mark.parametrize(
    "policy", [FixedSettings(max_tokens=4), ConfidenceSettings(threshold=0.4, max_tokens=6)]
)
@pytest.mark.parametrize("top_k", [TOKENS, 2])
def test_rounds_are_as_long_as_those_of_speculative_sampling(policy, top_k, sampled):
    chains = Chains()
    recorded = chains.recorded(sampled.header, top_k)
    rule = build_policy(policy, lambda head: None)

    def replayed(trace):
        track = Track(trace)
        counts = track.walk_all(track.chains(rule.lengths(track))).counts
        rounds = counts.n_target
        return counts.n / rounds, counts.n_drafted / rounds, counts.n_accepted / counts.n_drafted

    decoded = chains.decoded(policy.max_tokens, getattr(policy, "threshold", 0))
    found = replayed(verified(recorded))
    assert found == pytest.approx(decoded, rel=0.03)
    assert replayed(recorded)[0] < 0.9 * decoded[0]  # tokens drawn apart agree too seldom


def test_candidates_are_accepted_as_often_as_the_distributions_overlap(sampled):
    trace = sampled.trace(hidden=False)
    rows = trace.trajectory
    agreeing = np.mean([verified(trace, seed).agrees for seed in range(8)], axis=0)
    assert (agreeing[trace.agrees] == 1).all()
    apart = agreeing - trace.overlap[rows]  # Σ min(p, q)
    assert abs(apart.mean()) < 4 * apart.std() / np.sqrt(len(rows))


def test_a_token_of_the_targets_whose_probability_was_too_small_to_record_is_accepted(sampled):
    recorded = Chains().recorded(sampled.header, TOKENS)
    rare = recorded.columns["target_probability"].copy()
    rare[:50] = 0
    columns = {**recorded.columns, "target_probability": rare}
    with np.errstate(all="raise"):
        found = verified(Trace(recorded.header, recorded.prompts, columns))
    places = recorded.trajectory < 50
    assert found.agrees[places].mean() > verified(recorded).agrees[places].mean()


def test_what_is_not_recorded_of_rejection_sampling_is_refused(sampled, tiny_pair, tmp_path):
    replay = Replay(sampled, hidden=False, drawn=True)
    assert not replay.can(Configuration(drafter=PromptLookupSettings(), sampling=SAMPLING))
    with pytest.raises(UserError, match=r"greedy decoding or sampling\.coupling gumbel"):
        Replay(sampled)
    bare = record(tiny_pair, tmp_path, 2, sampling=SAMPLING, continuations=False)
    with pytest.raises(UserError, match=r"cannot be replayed; that takes continuations$"):
        Replay(bare, drawn=True)
