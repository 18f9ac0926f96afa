"""Recordings hold what decoding gives, and replay the acceptance of sampled drafts."""

import json
import warnings
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.policy import build_policy
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.engine import Request
from specdec_core.recordings import schema
from specdec_core.recordings.find import finish, latest_recording
from specdec_core.recordings.record import Recorder, record_requests
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.track import RuleSignals, Track
from specdec_core.recordings.verified import verified
from tests.conftest import generated

N = 40


def record(pair, folder, prompts=6, **settings):
    """Record a few short prompts of the tiny pair in shards of two."""
    given = {"fingerprints": {"target": "t", "draft": "d"}, **settings}
    recording = record_requests(pair, requests(2), folder, **given)
    recorder, numbered = Recorder(pair, recording.header), list(enumerate(requests(prompts)))
    for first in range(2, prompts, 2):
        schema.write_shard(recorder.record(numbered[first : first + 2]), folder, first // 2)
    return recording


def requests(count, new_tokens=N):
    return [Request(f"p{i}", (3 + i, 9, 4 * i + 1), new_tokens, seed=i) for i in range(count)]


@pytest.fixture(scope="module")
def recording(tiny_pair, tmp_path_factory):
    return record(tiny_pair, tmp_path_factory.mktemp("recording"), mixing=0.3)


@torch.inference_mode()
def test_the_trajectory_is_the_targets_greedy_text(tiny_pair, recording):
    for request, output in zip(requests(6), recording.prompts.outputs, strict=True):
        assert output.tolist() == generated(tiny_pair.target, request.tokens, N)


@torch.inference_mode()
def test_many_answers_share_the_memory_of_a_few_long_ones(tiny_pair, recording):
    alone = replace(tiny_pair, drafts={})
    recorder = Recorder(alone, recording.header)
    limits = recorder.engine.scheduler.limits
    assert (limits.slots, limits.cache_tokens) == (32, 8 * alone.max_length)
    numbered = list(enumerate(requests(32, new_tokens=120)))  # more than the cache holds
    output = recorder.record(numbered)["prompts"]["output"].to_pylist()
    assert recorder.engine.scheduler.preemptions
    expected = [generated(tiny_pair.target, request.tokens, 120) for _, request in numbered[-3:]]
    assert output[-3:] == expected


@torch.inference_mode()
def test_columns_are_those_of_both_models_along_the_text(tiny_pair, recording):
    trace = recording.trace()
    for number in range(6):
        prompt, output = recording.prompts.tokens[number], recording.prompts.outputs[number]
        text = torch.tensor(np.concatenate([prompt, output[:-1]]), dtype=torch.long)[None]
        states = tiny_pair.drafts["draft"](text, output_hidden_states=True)
        q = states.logits[0, len(prompt) - 1 :].softmax(-1)
        p = tiny_pair.target(text).logits[0, len(prompt) - 1 :].softmax(-1)
        rows = trace.trajectory[trace.prompt[trace.trajectory] == number]
        x, y = torch.tensor(output, dtype=torch.long), q.argmax(-1)
        entropy = torch.special.entr(q).sum(-1)
        expected = {
            "draft_token": y,
            "target_token": x,
            "entropy": entropy,
            "top_probability": q.amax(-1),
            "probability": q.amax(-1),
            "top_probs": q.topk(10).values,
            "hidden": states.hidden_states[-1][0, len(prompt) - 1 :],
            "rank": (q > q.gather(1, x[:, None])).sum(-1),
            "target_probability": p.gather(1, x[:, None])[:, 0],
            "draft_token_target_probability": p.gather(1, y[:, None])[:, 0],
            "overlap": torch.minimum(p, q).sum(-1),
            "cross_entropy": -(q * p.log()).sum(-1),
            "target_entropy": torch.special.entr(p).sum(-1),
        }
        for name, values in expected.items():
            found = getattr(trace, name)[rows]
            np.testing.assert_allclose(found, values.numpy(), rtol=2e-4, atol=2e-5, err_msg=name)


@contextmanager
def every_warning_an_error():
    """Also those that torch gives once a process."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch.set_warn_always(always)


def test_recorded_signals_are_read_without_a_warning_and_states_without_a_copy(recording):
    trace = recording.trace()
    with every_warning_an_error():
        signals = RuleSignals(trace)
        read = {
            "top_probability": signals.measure("top_probability"),
            "entropy": signals.measure("entropy"),
            "top_probs": signals.top_probabilities(10),
            "hidden": signals.hidden,
        }
    for name, values in read.items():
        np.testing.assert_array_equal(values.numpy(), getattr(trace, name))
    assert read["hidden"].data_ptr() == trace.hidden.ctypes.data


@torch.inference_mode()
def test_a_continuation_is_what_the_draft_writes_behind_its_own_token(tiny_pair, recording):
    trace = recording.trace()
    draft = tiny_pair.drafts["draft"]
    rows = trace.trajectory
    differing = np.flatnonzero(~trace.agrees)
    assert len(differing) > 5
    for place in differing[:12]:
        number, t = int(trace.prompt[rows[place]]), int(trace.position[rows[place]])
        own = (trace.prompt == number) & (trace.position == t) & (trace.step > 0)
        prefix = [*recording.prompts.tokens[number], *recording.prompts.outputs[number][:t]]
        y = int(trace.draft_token[rows[place]])
        longest = min(recording.header.max_draft - 1, N - 2 - t)
        found = trace.draft_token[own].tolist()
        if y in tiny_pair.eos_token_ids or longest < 1:
            assert found == []
            continue
        assert found == generated(draft, [*prefix, y], longest)


@torch.inference_mode()
def test_examples_hold_the_state_of_each_token_of_the_mixed_text(tiny_pair, recording):
    trace, table = recording.trace(), recording.examples().to_pandas()
    assert 0.15 < 1 - table.from_draft.mean() < 0.45
    for number, own in table.groupby("prompt"):
        rows = trace.trajectory[trace.prompt[trace.trajectory] == number]
        x, y = trace.target_token[rows], trace.draft_token[rows]
        mixed = np.where(own.from_draft, y, x)
        np.testing.assert_array_equal(own.acceptance, x == y)
        text = torch.tensor([[*recording.prompts.tokens[number], *mixed]], dtype=torch.long)
        states = tiny_pair.drafts["draft"](text, output_hidden_states=True).hidden_states[-1]
        hidden = states[0, -len(mixed) :].numpy()
        np.testing.assert_allclose(np.stack(own.hidden), hidden, rtol=1e-3, atol=1e-4)


def test_sampled_examples_carry_the_acceptance_probability(tiny_pair, tmp_path):
    sampled = record(tiny_pair, tmp_path, 2, sampling=Sampling(temperature=1), continuations=False)
    trace, table = sampled.trace(), sampled.examples().to_pandas()
    ratio = trace.draft_token_target_probability / trace.probability
    np.testing.assert_allclose(table.acceptance, np.minimum(ratio, 1), rtol=1e-5)
    assert table.acceptance.between(0.01, 0.99).any()
    with pytest.raises(UserError, match="cannot be replayed"):
        Replay(sampled)


def test_prompts_with_gaps_are_counted_from_0(tiny_pair, tmp_path):
    recording = record(tiny_pair, tmp_path, 2)
    recorder = Recorder(tiny_pair, recording.header)
    schema.write_shard(recorder.record([(7, requests(8)[7])]), tmp_path, 5)
    again = schema.Recording.open(tmp_path)
    assert again.prompts.numbers == [0, 1, 7]
    assert sorted(set(again.trace().prompt)) == [0, 1, 2]
    assert again.trace().lengths.tolist() == [len(own) for own in again.prompts.outputs]


def test_a_truncated_file_is_one_line(tiny_pair, tmp_path):
    recording = record(tiny_pair, tmp_path, 2)
    file = tmp_path / "drafts/draft/shard-00000.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"shard-00000.parquet: not a whole Parquet file") as error:
        recording.trace()
    assert "\n" not in str(error.value)
    file.unlink()
    with pytest.raises(UserError, match="missing from the recording"):
        recording.trace()


def test_rows_of_other_prompts_than_the_recorded_are_refused(tiny_pair, tmp_path):
    one, two = (record_requests(tiny_pair, requests(n), tmp_path / f"{n}") for n in (1, 2))
    files = [each.folder / "drafts/draft/shard-00000.parquet" for each in (one, two)]
    rows = [file.read_bytes() for file in files]
    for recording, file, other in zip((one, two), files, reversed(rows), strict=True):
        file.write_bytes(other)
        with pytest.raises(UserError, match="drafts/draft: not of the same prompts and outputs"):
            recording.trace()


def test_a_copied_shard_is_no_further_one(tiny_pair, tmp_path):
    recording = record(tiny_pair, tmp_path, 2)
    file = tmp_path / "prompts/shard-00000.parquet"
    file.with_stem("shard-00000 (copy)").write_bytes(file.read_bytes())
    assert schema.shards(tmp_path) == [0]
    assert len(recording.trace().prompts.ids) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no recording in it"),
        ("{}", "not a recording's header"),
        ("not json", "not a recording's header"),
    ],
)
def test_a_folder_without_a_readable_header_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "recording.json").write_text(content)
    with pytest.raises(UserError, match=message):
        schema.Recording.open(tmp_path)


def test_a_header_that_cannot_be_read_is_one_line_and_no_hindrance_to_others(tiny_pair, tmp_path):
    whole, broken = tmp_path / "traces/whole", tmp_path / "traces/broken"
    record(tiny_pair, whole, 2, fingerprints=tiny_pair.fingerprints)
    finish(whole)
    (broken / "recording.json").mkdir(parents=True)
    with pytest.raises(UserError, match=r"broken/recording\.json: is a directory"):
        schema.Recording.open(broken)
    assert latest_recording(tiny_pair.spec, tmp_path, Sampling()).folder == whole


def test_a_header_names_the_weights_of_every_model(recording, tmp_path):
    file = schema.save_header(recording.header, tmp_path)
    content = json.loads(file.read_text())
    for name in list(content["fingerprints"]):
        kept = {n: value for n, value in content["fingerprints"].items() if n != name}
        file.write_text(json.dumps(content | {"fingerprints": kept}))
        with pytest.raises(
            UserError, match=f"not a recording's header: .*fingerprints: none of {name}"
        ):
            schema.Recording.open(tmp_path)


def test_a_recording_of_another_version_is_refused(recording, tmp_path):
    schema.save_header(recording.header.model_copy(update={"version": 99}), tmp_path)
    with pytest.raises(UserError, match=r"not a recording's header: version: .*99"):
        schema.Recording.open(tmp_path)


def test_what_depends_on_the_text_cannot_be_recorded(tiny_pair, tmp_path):
    for sampling in (Sampling(frequency_penalty=0.5), Sampling(logit_bias={3: 1})):
        with pytest.raises(ValueError, match=r"cannot be recorded.*are run live"):
            record(tiny_pair, tmp_path, sampling=sampling)


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
        prompts = schema.RecordedPrompts([0], ["text"], [np.array([0])], [np.array(text[1:])])
        return schema.Trace(header, prompts, columns)

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
        found = verified(schema.Trace(recorded.header, recorded.prompts, columns))
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
