"""Examples are what was recorded, and prompts are held out whole."""

import numpy as np
import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.engine import Request
from specdec_core.prompts.conversation import turn_id
from specdec_core.recordings.record import record_requests
from specdec_core.recordings.schema import RecordedPrompts
from specdec_core.training.heads.examples import (
    DEV,
    TEST,
    TRAIN,
    acceptance,
    held_out_prompts,
    load_examples,
    split_prompts,
)

PROMPTS = [tuple(range(5 + 3 * i, 20 + 3 * i)) for i in range(24)]
NEW_TOKENS = 12


def record(pair, folder, numbers, name="p{}".format, **changes):
    facts = {"fingerprints": {"target": "t", "draft": "d"}, "top_k": 4, **changes}
    requests = [Request(name(i), PROMPTS[i], NEW_TOKENS, seed=i) for i in numbers]
    return record_requests(pair, requests, folder, **facts)


@pytest.fixture(scope="module")
def recording(tiny_pair, tmp_path_factory):
    return record(tiny_pair, tmp_path_factory.mktemp("recording"), range(len(PROMPTS)))


def states(pair, tokens):
    """What the draft's output layer reads at every token."""
    with torch.no_grad():
        return pair.drafts["draft"].model(torch.tensor([tokens])).last_hidden_state[0]


def test_decision_models_read_what_the_candidate_was_drawn_from(recording, tiny_pair):
    trace = recording.trace("draft")
    found = load_examples([recording], "draft", ["t1", "t2", "joint"])
    rows = trace.trajectory
    assert len(found["t1"].labels) == len(rows)
    row = 5  # of the first prompt
    fed = [*PROMPTS[0], *recording.prompts.outputs[0].tolist()[:row]]
    state = states(tiny_pair, fed)[-1]
    np.testing.assert_allclose(found["t1"].features[row], state.numpy(), atol=1e-4)
    q = tiny_pair.drafts["draft"].lm_head(state).softmax(dim=-1)
    expected = [*q.topk(4).values.tolist(), torch.special.entr(q).sum().item()]
    np.testing.assert_allclose(found["t2"].features[row], expected, atol=1e-4)
    both = np.concatenate([found["t1"].features, found["t2"].features], axis=1)
    np.testing.assert_array_equal(found["joint"].features, both)
    for examples in found.values():
        np.testing.assert_array_equal(examples.labels, trace.agrees.astype(np.float32))


def test_mixed_examples_count_only_where_the_token_is_the_drafts(recording):
    table = recording.examples("draft")
    [examples] = load_examples([recording], "draft", ["specdecpp"]).values()
    from_draft = table["from_draft"].to_numpy()
    assert 0.7 < from_draft.mean() < 0.95
    assert len(examples.labels) == from_draft.sum()
    np.testing.assert_array_equal(examples.labels, table["acceptance"].to_numpy()[from_draft])
    hidden = np.array(table["hidden"].to_pylist(), dtype=np.float32)[from_draft]
    np.testing.assert_array_equal(examples.features, hidden)


def test_under_rejection_sampling_labels_are_acceptance_probabilities(tiny_pair, tmp_path):
    sampling = Sampling(temperature=1.0)
    recording = record(tiny_pair, tmp_path, range(len(PROMPTS)), sampling=sampling)
    trace = recording.trace("draft")
    rows = trace.trajectory
    p, q = trace.draft_token_target_probability[rows], trace.probability[rows]
    labels = acceptance(trace, rows, sampling)
    np.testing.assert_allclose(labels, np.minimum(1, p / q), rtol=1e-6)
    found = load_examples([recording], "draft", ["t1", "t2"])
    assert np.mean((labels > 0) & (labels < 1)) > 0.1
    np.testing.assert_array_equal(found["t1"].labels, labels)
    assert set(found["t2"].labels.tolist()) == {0.0, 1.0}  # outcomes, drawn
    assert abs(found["t2"].labels.mean() - labels.mean()) < 0.1


def test_the_same_prompts_are_in_the_same_split_in_every_recording(recording, tiny_pair, tmp_path):
    split = split_prompts([np.array(tokens) for tokens in PROMPTS])
    assert set(split) == {TRAIN, DEV, TEST}
    many = [np.array([i]) for i in range(2000)]
    shares = np.bincount(split_prompts(many)) / len(many)
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.02)
    # What drafts are evaluated on is what heads are chosen on.
    np.testing.assert_array_equal(held_out_prompts(many), split_prompts(many) == DEV)

    first = 6
    part = record(tiny_pair, tmp_path, range(first, 24))
    both = load_examples([recording, part], "draft", ["t1"])["t1"]
    whole = load_examples([recording], "draft", ["t1"])["t1"]
    owners = recording.trace("draft").prompt[recording.trace("draft").trajectory]
    np.testing.assert_array_equal(whole.split, split[owners])
    again = part.trace("draft").prompt[part.trace("draft").trajectory]
    np.testing.assert_array_equal(both.split, np.append(whole.split, split[first + again]))


def test_turns_of_a_conversation_are_in_one_split(recording, tiny_pair, tmp_path):
    def of_two(number):
        return turn_id(f"chat {number // 2}", 1 + number % 2)

    chats = record(tiny_pair, tmp_path, range(len(PROMPTS)), name=of_two)
    tokens = [tuple(tokens) for tokens in chats.prompts.first_turns]
    assert tokens == [PROMPTS[number // 2 * 2] for number in range(len(PROMPTS))]
    found, single = (load_examples([each], "draft", ["t1"])["t1"] for each in (chats, recording))
    prompt = chats.trace("draft").prompt[chats.trace("draft").trajectory]
    sides = [set(found.split[prompt // 2 == chat]) for chat in range(len(PROMPTS) // 2)]
    assert all(len(side) == 1 for side in sides)
    # A conversation is where its first turn alone is; other prompts stay where they were.
    np.testing.assert_array_equal(found.split[prompt % 2 == 0], single.split[prompt % 2 == 0])
    assert (found.split != single.split).any()
    # A conversation without its first turn is still whole.
    later = RecordedPrompts([1, 2], ["a, turn 2", "a, turn 3"], [*map(np.array, PROMPTS[:2])], [])
    assert [tuple(tokens) for tokens in later.first_turns] == [PROMPTS[0]] * 2


def test_recordings_that_do_not_fit_get_one_line(recording, tiny_pair, tmp_path):
    others: dict[str, dict] = {
        "other target weights": {"fingerprints": {"target": "x", "draft": "d"}},
        "other draft weights": {"fingerprints": {"target": "t", "draft": "x"}},
        "other sampling": {"sampling": Sampling(temperature=1.0)},
    }
    for i, (complaint, changes) in enumerate(others.items()):
        other = record(tiny_pair, tmp_path / str(i), range(2), **changes)
        with pytest.raises(UserError, match=complaint):
            load_examples([recording, other], "draft", ["t1"])
    bare = record(tiny_pair, tmp_path / "bare", range(2), mixing=0)
    with pytest.raises(UserError, match="recorded without examples"):
        load_examples([bare], "draft", ["specdecpp"])
    with pytest.raises(UserError, match="too few prompts"):
        load_examples([bare], "draft", ["t1"])
    with pytest.raises(UserError, match="no draft 'huge'"):
        load_examples([recording], "huge", ["t1"])
