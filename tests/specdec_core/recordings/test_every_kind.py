"""Every kind says whether a recording knows what it would do; where it does, its replay has the
very rounds that decoding takes. What a kind forgets to say is found here."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.config.kinds import DRAFTERS, POLICIES
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.modules import build_head
from specdec_core.drafting.heads.storage import save_head
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.recordings.record import Recorder
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Header, Recording, save_header, write_shard
from specdec_core.tokens.statistics import Counts, Round, rounds_frame
from specdec_core.training.datastores.build import write_datastore
from tests.specdec_core.drafting.proofs import PROMPTS
from tests.specdec_core.kinds import drafter, policy

TOKENS = 32
# What is not recorded (of a token cache: what is useful, as it comes without being asked).
UNKNOWN = {"target_tree", "target_fork", "dynamic_tree", "lookahead", "ouroboros", "pearl"}
KNOWN = {"token_cache": {"learn_from": "output"}, "post_use": {"cache": {"learn_from": "output"}}}
COLUMNS = [
    "request_id",
    "round",
    *(f.name for f in fields(Round) if not f.name.endswith("_seconds")),
]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [Request(str(n), tokens, TOKENS, seed=n) for n, tokens in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def replay(
    tiny_pair: Pair, requests: list[Request], tmp_path_factory: pytest.TempPathFactory
) -> Replay:
    folder = tmp_path_factory.mktemp("every-kind")
    header = Header(
        pair=tiny_pair.spec,
        fingerprints=tiny_pair.fingerprints,
        eos_token_ids=tuple(tiny_pair.eos_token_ids),
        prompts=PromptSet(source="proofs", count=len(requests), digest="0"),
        max_new_tokens=TOKENS,
        mixing=0,
    )
    save_header(header, folder)
    write_shard(Recorder(tiny_pair, header).record(list(enumerate(requests))), folder, 0)
    return Replay(Recording.open(folder))


@pytest.fixture
def home(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace with the heads and the datastore that kinds ask for."""
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    hidden, own = tiny_pair.drafts["draft"].config.hidden_size, tiny_pair.fingerprints
    for kind in ("specdecpp", "t1"):
        card = HeadCard(
            kind=kind, draft="draft", depth=1, width=16, hidden_size=hidden, top_k=10, w_acc=1,
            w_rej=1, sampling=Sampling(), pair={"target": own["target"], "draft": own["draft"]},
        )  # fmt: skip
        save_head(build_head(kind, hidden, 10, depth=1, width=16), card, tmp_path / "heads" / kind)
    write_datastore(PROMPTS, ["prompts"], tiny_pair.tokenizer, tmp_path / "datastores" / "own")


def assert_replayed(
    replay: Replay, pair: Pair, configuration: Configuration, requests: list[Request]
) -> None:
    replayed = replay.run(configuration)
    live = Engine(pair, configuration).generate(requests)
    pd.testing.assert_frame_equal(
        replayed.frame()[COLUMNS], rounds_frame(live)[COLUMNS], check_dtype=False
    )
    assert replayed.counts == Counts.of(live)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_is_replayed_as_it_decodes_or_says_why_not(
    tiny_pair: Pair, replay: Replay, requests: list[Request], kind: str
) -> None:
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
def test_every_policy_is_replayed_as_it_decodes(
    tiny_pair: Pair, replay: Replay, requests: list[Request], kind: str
) -> None:
    settings = policy(kind)
    configuration = Configuration(drafter=DraftModelSettings(policy=settings))
    assert settings.replayed
    if settings.decodes:
        assert_replayed(replay, tiny_pair, configuration, requests)
    else:
        assert replay.run(configuration).counts.n_discarded == 0
        with pytest.raises(UserError, match="only a replay"):
            Engine(tiny_pair, configuration)


def test_a_policy_that_asks_for_more_than_was_recorded_is_not_replayed(replay: Replay) -> None:
    class Unrecorded(type(policy("svip"))):
        replayed = False

    configuration = Configuration(drafter=DraftModelSettings(policy=Unrecorded()))
    assert not replay.can(configuration)
    with pytest.raises(UserError, match="policy svip asks for more than was recorded"):
        replay.run(configuration)
