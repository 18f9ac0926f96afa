"""What comes nearest, also to a schedule; what another engine drafts beyond this one is counted."""

import pytest

from specdec_core.config import Configuration, parse
from specdec_core.cost import ForwardCost, Measurement, Profile
from specdec_core.recordings.replay import Replay
from specdec_core.search.chains import whole_chains
from specdec_core.search.nearest import estimated, find_nearest, rank
from specdec_core.servers.server import DraftFile, Models
from specdec_core.servers.table import SERVERS
from tests.specdec_core.recordings.test_record import record


@pytest.mark.parametrize("tokens", [1, 6])
def test_chains_are_drafted_in_full_behind_prompts_and_at_the_end(replay, tokens):
    """Chains drafted from the prompt are verified in the next round."""
    policy = {"kind": "fixed", "max_tokens": tokens}
    drafter = {"kind": "draft_model", "policy": policy}
    option = parse(Configuration, {"drafter": drafter}, "test")
    rounds = replay.run(option)
    counts, full = rounds.counts, whole_chains(option, rounds).counts
    assert full.n_draft == full.n_draft_tokens == tokens * counts.n_target
    assert full.n_drafted == tokens * (counts.n_target - counts.requests) > counts.n_drafted
    assert full.n_discarded == full.n_drafted - counts.n_accepted
    assert (full.n, full.n_target) == (counts.n, counts.n_target)


def test_lookups_find_what_they_find(replay):
    option = parse(Configuration, {"drafter": {"kind": "suffix"}}, "test")
    rounds = replay.run(option)
    assert whole_chains(option, rounds) is rounds


def test_rounds_are_priced_by_the_candidates_that_each_verifies(replay):
    """Not by their mean: two tokens take as long as a whole block of four, one takes less."""
    widths = [1.0, 4.0, 4.0, 4.0, 9.0, 9.0, 9.0, 9.0, 16.0]
    taken = [Measurement(width=w, context=64, batch=1, seconds=s) for w, s in enumerate(widths, 1)]
    times = profile(0.1).model_copy(update={"target": ForwardCost.fit(taken).in_steps()})
    option = parse(Configuration, {"drafter": {"kind": "suffix", "max_tokens": 8}}, "test")
    rounds = replay.run(option)
    assert len({*rounds.drafted}) > 2
    found = estimated(option, replay, times).metrics["estimated_seconds"]
    assert found == pytest.approx(sum(widths[n] for n in rounds.drafted))


MODELS = Models("org/target", {"draft": DraftFile("org/draft", "model")})
SVIP = {"kind": "draft_model", "policy": {"kind": "svip", "threshold": 1.5}}


@pytest.fixture(scope="module")
def replay(tiny_pair, tmp_path_factory):
    return Replay(record(tiny_pair, tmp_path_factory.mktemp("recording"), 4))


def profile(draft):
    """Of a machine: a forward of the draft takes `draft` seconds, one of the target a second."""
    costs = {"draft": ForwardCost.constant(draft)}
    types = {"device": "known", "target_dtype": "float32", "draft_dtype": "float32"}
    return Profile(target=ForwardCost.constant(1.0), drafts=costs, **types)


def nearest(server, drafter, replay, draft):
    option = parse(Configuration, {"drafter": drafter}, "test")
    return find_nearest(SERVERS[server], MODELS, option, replay, profile(draft))


def test_a_schedule_is_replaced_by_what_is_nearest_for_one_request_and_rests_where_it_does(replay):
    alone = nearest("vllm", SVIP, replay, 0.001)
    ranked = rank(SERVERS["vllm"], MODELS, replay, profile(0.001))
    assert ranked[0].configuration.drafter == alone.drafter
    assert len(ranked) == alone.tried
    resting = {"kind": "schedule", "ranges": {1: SVIP, 4: {"kind": "suffix"}, 8: None}}
    found = nearest("vllm", resting, replay, 0.001)
    assert found.share == alone.share
    assert found.drafter.ranges == {1: alone.drafter, 4: alone.drafter, 8: None}
    # One that drafts at every load, and a server that cannot rest, get the same for all.
    ranges = {1: SVIP, 4: {"kind": "suffix"}}
    assert nearest("vllm", {"kind": "schedule", "ranges": ranges}, replay, 0.001) == alone
    assert nearest("sglang", resting, replay, 0.001) == nearest("sglang", SVIP, replay, 0.001)


def test_lookups_rest_where_a_server_can_be_told(replay):
    resting = {"kind": "schedule", "ranges": {1: SVIP, 8: None}}
    for server in ("vllm", "trtllm"):
        alone = nearest(server, SVIP, replay, 9.0).drafter  # no draft model pays
        assert not alone.drafts
        found = nearest(server, resting, replay, 9.0).drafter
        if server == "vllm":
            assert found == alone
        else:
            assert found.ranges == {1: alone, 8: None}
