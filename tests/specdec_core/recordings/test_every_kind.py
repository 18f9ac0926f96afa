"""Replays have the rounds that decoding takes, with drafters and drafts of every kind."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.config.kinds import DRAFTERS, POLICIES
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.engine import Engine
from specdec_core.recordings.record import record_requests
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import NOTHING
from tests.conftest import save_random_head
from tests.specdec_core.drafting.pearl.in_turns import InTurns, linked
from tests.specdec_core.kinds import chain, configured, drafter, policy
from tests.specdec_core.models.eagle.pair_heads import head_of
from tests.specdec_core.models.reduced_draft.drafts import copied_pair, narrowed_pair
from tests.specdec_core.recordings.recorded import SAMPLINGS, assert_replayed
from tests.specdec_core.recordings.short_pair import POSITIONS, short_pair

# What is not recorded (of a token cache: what is useful, as it comes without being asked).
UNKNOWN = {"target_tree", "target_fork", "dynamic_tree", "pearl"}
KNOWN = {"token_cache": {"learn_from": "output"}, "post_use": {"cache": {"learn_from": "output"}}}


@pytest.fixture(scope="module")
def replay(tiny_pair, requests, tmp_path_factory):
    return Replay(
        record_requests(tiny_pair, requests, tmp_path_factory.mktemp("every-kind"), mixing=0)
    )


@pytest.fixture
def home(tiny_pair, bare_home):
    """A workspace with the heads that kinds ask for."""
    for kind in ("specdecpp", "t1"):
        save_random_head(tiny_pair, kind, bare_home / "heads" / kind)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_is_replayed_as_it_decodes_or_says_why_not(tiny_pair, replay, requests, kind):
    configuration = Configuration(drafter=drafter(kind, **KNOWN.get(kind, {})))
    reason = configuration.unsupported_reason(replay.facts)
    assert (reason is not None) == (kind in UNKNOWN)
    if reason is None:
        assert_replayed(replay, tiny_pair, configuration, requests)
    else:
        with pytest.raises(UserError, match=f"cannot replay .*: {reason}"):
            replay.run(configuration)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("kind", POLICIES)
def test_every_policy_is_replayed_as_it_decodes(tiny_pair, replay, requests, kind):
    settings = policy(kind)
    configuration = Configuration(drafter=DraftModelSettings(policy=settings))
    assert settings.replayed
    if settings.decodes:
        assert_replayed(replay, tiny_pair, configuration, requests)
    else:
        assert replay.run(configuration).counts.n_discarded == 0
        with pytest.raises(UserError, match="only a replay"):
            Engine(tiny_pair, configuration)


def test_a_policy_that_asks_for_more_than_was_recorded_is_not_replayed(replay):
    class Unrecorded(type(policy("svip"))):
        replayed = False

    configuration = Configuration(drafter=DraftModelSettings(policy=Unrecorded()))
    assert not replay.can(configuration)
    with pytest.raises(UserError, match="policy svip asks for more than was recorded"):
        replay.run(configuration)


@pytest.fixture(scope="module", params=["own", "copied"])
def reduced_pair(request, tiny_spec, tmp_path_factory):
    if request.param == "own":
        return narrowed_pair(tiny_spec)
    return copied_pair(tiny_spec, tmp_path_factory.mktemp("copied") / "draft")


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_its_rounds_are_replayed_as_they_are_decoded(reduced_pair, requests, tmp_path, sampling):
    replay = Replay(record_requests(reduced_pair, requests, tmp_path, sampling=sampling))
    drafters = [chain("svip", threshold=2.0, max_tokens=10)]
    if sampling.greedy:
        drafters.append({"kind": "tree", "branching": [3, 2, 1]})
    for settings in drafters:
        configuration = configured(settings, sampling)
        assert_replayed(replay, reduced_pair, configuration, requests)
        assert replay.run(configuration).counts.n_accepted > 20  # or nothing was compared


def test_pearl_writes_the_targets_own_tokens(reduced_pair, requests):
    pearl = configured({"kind": "pearl", "drafter": chain(max_tokens=4)})
    expected = Engine(reduced_pair).generate(requests)
    found = Engine(linked(reduced_pair, InTurns(reduced_pair, 0)), pearl, 3).generate(requests)
    assert [g.tokens for g in found] == [g.tokens for g in expected]
    assert sum(r.accepted for g in found for r in g.rounds) > 20


HEAD = "head"
HEAD_CHAIN = {"kind": "draft_model", "draft": HEAD}
HEAD_POLICIES = [
    {"kind": "svip", "threshold": 2.0, "max_tokens": 10},
    {"kind": "heuristic"},
    {"kind": "pre_cut", "target_cost": 5},
]


@pytest.fixture(scope="module")
def headed_pair(tiny_pair):
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
def headed_replay(headed_pair, requests, tmp_path_factory, request):
    facts = {"sampling": SAMPLINGS[request.param], "eagle_heads": (HEAD,)}
    return Replay(record_requests(headed_pair, requests, tmp_path_factory.mktemp("heads"), **facts))


def decoding(drafter, headed_replay):
    return configured(drafter, headed_replay.header.sampling)


@pytest.mark.parametrize("policy", HEAD_POLICIES, ids=lambda policy: policy["kind"])
def test_chains_are_replayed_as_they_are_decoded(headed_pair, headed_replay, requests, policy):
    configuration = decoding({**HEAD_CHAIN, "policy": policy}, headed_replay)
    assert_replayed(headed_replay, headed_pair, configuration, requests)
    assert headed_replay.run(configuration).counts.n_accepted > 20  # or nothing was compared


def test_so_are_drafters_that_a_head_is_part_of(headed_pair, headed_replay, requests):
    other = {"kind": "draft_model", "draft": "draft"}
    for settings in (
        {"kind": "hybrid", "otherwise": HEAD_CHAIN},
        {"kind": "bandit", "arms": [HEAD_CHAIN, other, {"kind": "suffix"}]},
    ):
        assert_replayed(headed_replay, headed_pair, decoding(settings, headed_replay), requests)


def test_what_a_head_drafts_depends_on_where_the_draft_begins(headed_replay):
    """Or the recording of a draft model would do."""
    track = headed_replay.track(HEAD)
    starts = np.flatnonzero((track.agreeing > 0) & (track.left > 4))
    tokens = track.trace.draft_token[track.windows]
    later, first = tokens[starts, 1:4], tokens[starts + 1, :3]
    assert (later != first).any()


@pytest.mark.parametrize("kind", ["tree", "fork", "cascade", "post_use"])
def test_trees_and_guesses_are_not_known(headed_replay, kind):
    known = KNOWN.get(kind, {})
    configuration = decoding({"kind": kind, "draft": HEAD, **known}, headed_replay)
    with pytest.raises(UserError, match=r"of a head|a head would|greedy decoding only"):
        headed_replay.run(configuration)
    other = decoding({"kind": kind, "draft": "draft", **known}, headed_replay)
    assert headed_replay.can(other) == (
        kind not in ("tree", "fork") or headed_replay.header.sampling.greedy
    )


def test_a_heads_oracle_is_known_as_far_as_its_chains(headed_replay):
    """That of a draft model is known however far: what agrees with the target is its output."""
    most = headed_replay.header.max_draft
    assert most < headed_replay.header.max_new_tokens - 1
    for draft, length, known in ((HEAD, most, True), (HEAD, most + 1, False), ("draft", 99, True)):
        oracle = {"kind": "oracle", "max_tokens": length}
        chain = {"kind": "draft_model", "draft": draft, "policy": oracle}
        assert headed_replay.can(decoding(chain, headed_replay)) == known


def test_examples_of_mixed_texts_are_refused(headed_replay):
    assert len(headed_replay.recording.examples("draft"))
    with pytest.raises(UserError, match="is an EAGLE head"):
        headed_replay.recording.examples(HEAD)


def test_of_a_recording_with_rejection_sampling_other_drafts_are_replayed(
    headed_pair, requests, tmp_path
):
    facts = {"sampling": Sampling(temperature=1.0), "eagle_heads": (HEAD,)}
    drawn = Replay(record_requests(headed_pair, requests, tmp_path, **facts), drawn=True)
    assert drawn.can(decoding({"kind": "draft_model"}, drawn))
    assert not drawn.can(decoding(HEAD_CHAIN, drawn))


@pytest.fixture(scope="module")
def pair_of_short(tiny_pair, tmp_path_factory):
    return short_pair(tiny_pair, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module", params=SAMPLINGS)
def recording(pair_of_short, requests, tmp_path_factory, request):
    return record_requests(
        pair_of_short,
        requests,
        tmp_path_factory.mktemp("recording"),
        pair=pair_of_short.spec.model_copy(
            update={"drafts": {**pair_of_short.spec.drafts, HEAD: "head"}}
        ),
        sampling=SAMPLINGS[request.param],
        eagle_heads=(HEAD,),
        short_drafts={"draft": POSITIONS, HEAD: POSITIONS},
    )


OTHERS = {"svip": chain("svip"), "pre-cut": chain("pre_cut"), "a head": HEAD_CHAIN}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", [*sorted({*DRAFTERS} - UNKNOWN), *OTHERS])
def test_every_drafter_is_replayed_as_it_decodes(pair_of_short, recording, requests, name):
    own = OTHERS.get(name) or drafter(name, **KNOWN.get(name, {}))
    configuration = configured(own, recording.header.sampling)
    if (replay := Replay(recording)).can(configuration):
        assert_replayed(replay, pair_of_short, configuration, requests)
    else:
        assert not recording.header.sampling.greedy
        assert name not in OTHERS


def test_nothing_is_learned_from_behind_the_drafts_end(recording):
    prompts = np.array([len(tokens) for tokens in recording.prompts.tokens])
    for name in ("draft", HEAD):
        trace = recording.trace(name)
        text = prompts[trace.prompt] + trace.position
        assert (trace.draft_token[text > POSITIONS] == NOTHING).all()
        assert (trace.draft_token[text <= POSITIONS] != NOTHING).all()
        assert (text[trace.drafted] <= POSITIONS).all()
    examples = recording.examples("draft")
    text = prompts[examples["prompt"].to_numpy()] + examples["position"].to_numpy()
    from_draft = examples["from_draft"].to_numpy()
    assert from_draft[text <= POSITIONS].any()
    assert not from_draft[text > POSITIONS].any()
