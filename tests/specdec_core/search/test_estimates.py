"""Estimates from what was timed, and the settings that come nearest."""

import pytest

from specdec_core.config import AUTOREGRESSIVE
from specdec_core.cost import ForwardCost, Measurement
from specdec_core.recordings.replay import Replay
from specdec_core.search.chains import whole_chains
from specdec_core.search.estimates import correct, corrected
from specdec_core.search.nearest import estimated, find_nearest, rank
from specdec_core.search.results import METRIC, SECONDS, Trial
from specdec_core.servers.server import DraftFile, Models
from specdec_core.servers.table import SERVERS
from specdec_core.tokens.statistics import Counts
from tests.specdec_core.cost.examples import constant_profile, profile_of
from tests.specdec_core.kinds import chain, configured
from tests.specdec_core.recordings.test_record import record

# A first round's forward prefills the prompt: 0.1 and 0.2 s more than the 10 ms of another.
PROFILE = profile_of(
    ForwardCost.constant(10e-3).with_prefill({64: 0.11, 128: 0.21}),
    {"draft": ForwardCost.constant(1e-3).with_prefill({64: 0.01, 128: 0.02})},
)
PROMPTS = (64, 128)
FIXED = [configured(chain(max_tokens=k)) for k in (2, 4)]
CONFIDENT = configured(chain("confidence"))
LOOKUPS = [configured({"kind": "prompt_lookup", "max_tokens": k}) for k in (4, 8, 12)]
SUFFIX = configured({"kind": "suffix"})


def trial(configuration, rounds, drafts=0):
    """100 tokens in `rounds` rounds."""
    kept = 100 - rounds
    counts = Counts(
        2, 100, drafts, rounds, 0, n_drafted=kept, n_accepted=kept, n_target_tokens=rounds
    )
    return Trial.of(configuration, counts, PROFILE, 64, PROMPTS)


def test_an_estimate_includes_what_reading_the_prompts_takes():
    alone, lookup, drafted = (
        trial(AUTOREGRESSIVE, 100),
        trial(LOOKUPS[0], 40),
        trial(FIXED[0], 40, 80),
    )
    assert alone.metrics[SECONDS] == pytest.approx(100 * 10e-3 + 0.3)
    assert lookup.metrics[SECONDS] == pytest.approx(40 * 10e-3 + 0.3)
    assert drafted.metrics[SECONDS] == pytest.approx(40 * 10e-3 + 80 * 1e-3 + 0.33)
    assert lookup.metrics[METRIC] == pytest.approx(1.3 / 0.7)


def test_what_a_family_takes_beyond_its_forwards_is_expected_of_its_others():
    trials = [
        trial(AUTOREGRESSIVE, 100),
        trial(LOOKUPS[0], 40),
        trial(LOOKUPS[1], 30),
        trial(SUFFIX, 30),
    ]
    # The machine is 10 % slower than when it was profiled; a lookup adds 2 ms to a round.
    taken = {
        AUTOREGRESSIVE.id: 1.1 * 1.3,
        LOOKUPS[0].id: 1.1 * 0.7 + 40 * 2e-3,
        SUFFIX.id: 1.1 * 0.6 + 30 * 5e-3,
    }
    expected = corrected(trials, taken)
    assert expected[LOOKUPS[1].id] == pytest.approx(1.1 * 0.6 + 30 * 2e-3)
    correct(trials, taken)
    assert trials[2].metrics[SECONDS] == pytest.approx(expected[LOOKUPS[1].id])
    assert trials[2].metrics[METRIC] == pytest.approx(
        taken[AUTOREGRESSIVE.id] / expected[LOOKUPS[1].id]
    )


def test_a_configurations_own_time_does_not_enter_its_estimate():
    trials = [trial(AUTOREGRESSIVE, 100), trial(FIXED[0], 40, 80), trial(FIXED[1], 30, 120)]
    taken = {AUTOREGRESSIVE.id: 1.3, FIXED[0].id: 0.9, FIXED[1].id: 0.8}
    before = corrected(trials, taken)
    after = corrected(trials, {**taken, FIXED[0].id: 9.0})
    assert after[FIXED[0].id] == before[FIXED[0].id]
    assert after[FIXED[1].id] > before[FIXED[1].id]


def test_a_family_of_which_none_was_timed_takes_after_all_others():
    trials = [
        trial(AUTOREGRESSIVE, 100),
        trial(LOOKUPS[0], 40),
        trial(SUFFIX, 50),
        trial(CONFIDENT, 40, 60),
    ]
    taken = {AUTOREGRESSIVE.id: 1.3, LOOKUPS[0].id: 0.7 + 40 * 1e-3, SUFFIX.id: 0.8 + 50 * 3e-3}
    forwards = trials[3].metrics[SECONDS]
    assert corrected(trials, taken)[CONFIDENT.id] == pytest.approx(forwards + 40 * 2e-3)


def test_an_estimate_stays_above_zero_where_those_timed_take_less_than_their_forwards():
    """The profile overestimates the draft: of 80 ms of drafting a round 40 are not taken. A round
    of a lookup has no more than its forward of 10 ms."""
    trials = [trial(AUTOREGRESSIVE, 100), trial(FIXED[1], 20, 1600), trial(LOOKUPS[0], 20)]
    alone, chain, lookup = (each.metrics[SECONDS] for each in trials)
    taken = {AUTOREGRESSIVE.id: alone, FIXED[1].id: chain - 20 * 40e-3}
    assert corrected(trials, taken)[LOOKUPS[0].id] == pytest.approx(0.1 * lookup)
    correct(trials, taken)
    assert trials[2].metrics[METRIC] == pytest.approx(10 * alone / lookup)


def test_nothing_is_corrected_without_the_time_of_autoregressive_decoding():
    trials = [trial(AUTOREGRESSIVE, 100), trial(LOOKUPS[0], 40)]
    assert corrected(trials, {LOOKUPS[0].id: 2.0}) == {}
    before = trials[1].metrics[METRIC]
    correct(trials, {LOOKUPS[0].id: 2.0})
    assert trials[1].metrics[METRIC] == before


@pytest.mark.parametrize("tokens", [1, 6])
def test_chains_are_drafted_in_full_behind_prompts_and_at_the_end(replay, tokens):
    """Chains drafted from the prompt are verified in the next round."""
    option = configured(chain(max_tokens=tokens))
    rounds = replay.run(option)
    counts, full = rounds.counts, whole_chains(option, rounds).counts
    assert full.n_draft == full.n_draft_tokens == tokens * counts.n_target
    assert full.n_drafted == tokens * (counts.n_target - counts.requests) > counts.n_drafted
    assert full.n_discarded == full.n_drafted - counts.n_accepted
    assert (full.n, full.n_target) == (counts.n, counts.n_target)


def test_lookups_find_what_they_find(replay):
    rounds = replay.run(SUFFIX)
    assert whole_chains(SUFFIX, rounds) is rounds


def test_rounds_are_priced_by_the_candidates_that_each_verifies(replay):
    """Not by their mean: two tokens take as long as a whole block of four, one takes less."""
    widths = [1.0, 4.0, 4.0, 4.0, 9.0, 9.0, 9.0, 9.0, 16.0]
    taken = [Measurement(width=w, context=64, batch=1, seconds=s) for w, s in enumerate(widths, 1)]
    times = profile(0.1).model_copy(update={"target": ForwardCost.fit(taken).in_steps()})
    option = configured({"kind": "suffix", "max_tokens": 8})
    rounds = replay.run(option)
    assert len({*rounds.drafted}) > 2
    found = estimated(option, replay, times).metrics["estimated_seconds"]
    assert found == pytest.approx(sum(widths[n] for n in rounds.drafted))


MODELS = Models("org/target", {"draft": DraftFile("org/draft", "model")})
SVIP = chain("svip", threshold=1.5)


@pytest.fixture(scope="module")
def replay(tiny_pair, tmp_path_factory):
    return Replay(record(tiny_pair, tmp_path_factory.mktemp("recording"), 4))


def profile(draft):
    """Of a machine: a forward of the draft takes `draft` seconds, one of the target a second."""
    return constant_profile(1.0, draft, device="known")


def nearest(server, drafter, replay, draft):
    times = profile(draft)
    return find_nearest(SERVERS[server], MODELS, configured(drafter), replay, times)


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


def test_what_was_wanted_is_replayed_with_the_first_draft_of_its_own_pair(replay):
    other = Models("org/target", {"other": DraftFile("org/other", "model"), **MODELS.drafts})
    server, asked, times = SERVERS["vllm"], configured(SVIP), profile(0.001)
    assert find_nearest(server, MODELS, asked, replay, times).share is not None
    assert find_nearest(server, other, asked, replay, times).share is None  # it is not recorded
