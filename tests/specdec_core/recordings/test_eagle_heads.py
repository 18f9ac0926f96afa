"""The rounds of a head are replayed as they are decoded, and what was not recorded is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.recordings.replay import Replay
from tests.specdec_core.kinds import configured
from tests.specdec_core.models.eagle.pair_heads import head_of
from tests.specdec_core.recordings.recorded import SAMPLINGS, assert_replayed, recorded
from tests.specdec_core.recordings.test_every_kind import KNOWN
from tests.specdec_core.training.heads.rows import rows_after

HEAD = "head"
CHAIN = {"kind": "draft_model", "draft": HEAD}
POLICIES = [
    {"kind": "svip", "threshold": 2.0, "max_tokens": 10},
    {"kind": "heuristic"},
    {"kind": "pre_cut", "target_cost": 5},
]


@pytest.fixture(scope="module")
def pair(tiny_pair):
    """The pair with a head that often agrees with the target: its last layer, read again."""
    head = head_of(tiny_pair, tokens=tiny_pair.target.config.vocab_size, feature_layers=(2,))
    head.fc.weight.data.copy_(torch.eye(32))
    for name, weight in head.layers.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= 0.3
    head.lm_head.weight.data.copy_(tiny_pair.target.get_input_embeddings().weight)
    prints = {**tiny_pair.fingerprints, HEAD: "0"}
    spec = tiny_pair.spec.model_copy(update={"drafts": {**tiny_pair.spec.drafts, HEAD: "head"}})
    found = replace(tiny_pair, spec=spec, drafts={**tiny_pair.drafts, HEAD: head})
    found.__dict__["fingerprints"] = prints
    return found


@pytest.fixture(scope="module", params=SAMPLINGS)
def replay(pair, requests, tmp_path_factory, request):
    facts = {"sampling": SAMPLINGS[request.param], "eagle_heads": (HEAD,)}
    return Replay(recorded(pair, requests, tmp_path_factory.mktemp("heads"), **facts))


def decoding(drafter, replay):
    return configured(drafter, replay.header.sampling)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["kind"])
def test_chains_are_replayed_as_they_are_decoded(pair, replay, requests, policy):
    configuration = decoding({**CHAIN, "policy": policy}, replay)
    assert_replayed(replay, pair, configuration, requests)
    assert replay.run(configuration).counts.n_accepted > 20  # or nothing was compared


def test_so_are_drafters_that_a_head_is_part_of(pair, replay, requests):
    other = {"kind": "draft_model", "draft": "draft"}
    for drafter in (
        {"kind": "hybrid", "otherwise": CHAIN},
        {"kind": "bandit", "arms": [CHAIN, other, {"kind": "suffix"}]},
    ):
        assert_replayed(replay, pair, decoding(drafter, replay), requests)


def test_what_a_head_drafts_depends_on_where_the_draft_begins(replay):
    """Or the recording of a draft model would do."""
    track = replay.track(HEAD)
    starts = np.flatnonzero((track.agreeing > 0) & (track.left > 4))
    tokens = track.trace.draft_token[track.windows]
    later, first = tokens[starts, 1:4], tokens[starts + 1, :3]
    assert (later != first).any()


@pytest.mark.parametrize("kind", ["tree", "fork", "cascade", "post_use"])
def test_trees_and_guesses_are_not_known(replay, kind):
    known = KNOWN.get(kind, {})
    configuration = decoding({"kind": kind, "draft": HEAD, **known}, replay)
    with pytest.raises(UserError, match=r"of a head|a head would|greedy decoding only"):
        replay.run(configuration)
    other = decoding({"kind": kind, "draft": "draft", **known}, replay)
    assert replay.can(other) == (kind not in ("tree", "fork") or replay.header.sampling.greedy)


def test_what_follows_a_candidate_does_not_tell_whether_it_was_accepted(replay):
    """Or an acceptance head would learn to tell the target's features from the head's states."""
    track = replay.track(HEAD)
    candidates, after = rows_after(track.trace, HEAD)
    agrees = track.trace.draft_token[candidates] == track.trace.target_token[candidates]
    assert agrees.any()
    assert not agrees.all()
    # What a round's second candidate is drafted from, live and in replays.
    starts = np.searchsorted(track.trace.trajectory, candidates)
    np.testing.assert_array_equal(after, track.windows[starts, 1])
    assert (track.trace.step[after] == 1).all()


def test_examples_of_mixed_texts_are_refused(replay):
    assert len(replay.recording.examples("draft"))
    with pytest.raises(UserError, match="is an EAGLE head"):
        replay.recording.examples(HEAD)


def test_of_a_recording_with_rejection_sampling_other_drafts_are_replayed(pair, requests, tmp_path):
    facts = {"sampling": Sampling(temperature=1.0), "eagle_heads": (HEAD,)}
    drawn = Replay(recorded(pair, requests, tmp_path, **facts), drawn=True)
    assert drawn.can(decoding({"kind": "draft_model"}, drawn))
    assert not drawn.can(decoding(CHAIN, drawn))
