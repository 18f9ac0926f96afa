"""Where a text has more tokens than a draft has positions, replays have the engine's rounds, and
nothing is learned from what a draft cannot read."""

import numpy as np
import pytest

from specdec_core.config import Configuration
from specdec_core.config.kinds import DRAFTERS
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import NOTHING
from tests.specdec_core.kinds import chain, configured, drafter
from tests.specdec_core.recordings.recorded import SAMPLINGS, assert_replayed, recorded
from tests.specdec_core.recordings.short_pair import HEAD, POSITIONS, short_pair
from tests.specdec_core.recordings.test_every_kind import (
    KNOWN,
    UNKNOWN,
    home,  # noqa: F401 (a fixture)
)
from tests.specdec_core.training.heads.rows import rows_after


@pytest.fixture(scope="module")
def pair(tiny_pair, tmp_path_factory):
    return short_pair(tiny_pair, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module", params=SAMPLINGS)
def recording(pair, requests, tmp_path_factory, request):
    return recorded(
        pair,
        requests,
        tmp_path_factory.mktemp("recording"),
        pair=pair.spec.model_copy(update={"drafts": {**pair.spec.drafts, HEAD: "head"}}),
        sampling=SAMPLINGS[request.param],
        eagle_heads=(HEAD,),
        short_drafts={"draft": POSITIONS, HEAD: POSITIONS},
    )


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("kind", sorted({*DRAFTERS} - UNKNOWN))
def test_every_drafter_is_replayed_as_it_decodes(pair, recording, requests, kind):
    sampling = recording.header.sampling
    configuration = Configuration(drafter=drafter(kind, **KNOWN.get(kind, {})), sampling=sampling)
    if (replay := Replay(recording)).can(configuration):
        assert_replayed(replay, pair, configuration, requests)
    else:
        assert not sampling.greedy


@pytest.mark.parametrize("kind", ["svip", "pre_cut"])
def test_policies_are_replayed_as_they_decode(pair, recording, requests, kind):
    configuration = configured(chain(kind), recording.header.sampling)
    assert_replayed(Replay(recording), pair, configuration, requests)


def test_a_head_is_replayed_as_it_decodes(pair, recording, requests):
    configuration = configured({"kind": "draft_model", "draft": HEAD}, recording.header.sampling)
    assert_replayed(Replay(recording), pair, configuration, requests)


def test_nothing_is_learned_from_behind_the_drafts_end(recording):
    prompts = np.array([len(tokens) for tokens in recording.prompts.tokens])
    for name in ("draft", HEAD):
        trace = recording.trace(name)
        text = prompts[trace.prompt] + trace.position
        assert (trace.draft_token[text > POSITIONS] == NOTHING).all()
        assert (trace.draft_token[text <= POSITIONS] != NOTHING).all()
        assert (text[trace.drafted] <= POSITIONS).all()
        candidates, after = rows_after(trace, name)
        assert len(candidates)
        assert (text[candidates] <= POSITIONS).all()
        assert (trace.draft_token[after] != NOTHING).all()
    examples = recording.examples("draft")
    text = prompts[examples["prompt"].to_numpy()] + examples["position"].to_numpy()
    from_draft = examples["from_draft"].to_numpy()
    assert from_draft[text <= POSITIONS].any()
    assert not from_draft[text > POSITIONS].any()
