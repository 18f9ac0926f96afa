"""Every kind says whether a recording knows what it would do; where it does, its replay has the
very rounds that decoding takes. What a kind forgets to say is found here."""

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.config.kinds import DRAFTERS, POLICIES
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.engine import Engine
from specdec_core.recordings.replay import Replay
from tests.conftest import save_random_head
from tests.specdec_core.kinds import drafter, policy
from tests.specdec_core.recordings.recorded import assert_replayed, recorded

# What is not recorded (of a token cache: what is useful, as it comes without being asked).
UNKNOWN = {"target_tree", "target_fork", "dynamic_tree", "pearl"}
KNOWN = {"token_cache": {"learn_from": "output"}, "post_use": {"cache": {"learn_from": "output"}}}


@pytest.fixture(scope="module")
def replay(tiny_pair, requests, tmp_path_factory):
    return Replay(recorded(tiny_pair, requests, tmp_path_factory.mktemp("every-kind"), mixing=0))


@pytest.fixture
def home(tiny_pair, tmp_path, monkeypatch):
    """A workspace with the heads that kinds ask for."""
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    for kind in ("specdecpp", "t1"):
        save_random_head(tiny_pair, kind, tmp_path / "heads" / kind)


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
