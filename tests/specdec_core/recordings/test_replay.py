"""Replayed rounds are the live engine's, for every policy and drafter that replay can follow."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, RunnerSettings, Sampling, Value
from specdec_core.drafting.policies.confidence import SvipPolicy
from specdec_core.drafting.policies.heuristic import HeuristicPolicy
from specdec_core.drafting.policies.policy import PolicyOutcome, Rule
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair, load_pair
from specdec_core.prompts.prompt_sets import load_prompts
from specdec_core.recordings.record import record_requests
from specdec_core.recordings.replay import Replay
from specdec_core.tokens.statistics import Counts
from tests.conftest import save_random_head
from tests.specdec_core.cost.examples import constant_profile
from tests.specdec_core.kinds import NEEDED, configured
from tests.specdec_core.recordings.recorded import assert_same

FEW, TOKENS = 6, 32
LONG = 14  # the prompt where the draft agrees for more tokens than a recorded chain has
COUPLED = Sampling(temperature=1.0, coupling="gumbel")
Drafter = dict[str, Any]


def policy(kind, /, **values):
    return {"kind": kind, **NEEDED.get(kind, {}), **values}


def chain(kind="fixed", /, **values):
    return {"kind": "draft_model", "draft": "small", "policy": policy(kind, **values)}


SVIP = policy("svip", threshold=1.1, max_tokens=12)
SVIP_CHAIN = {"kind": "draft_model", "draft": "small", "policy": SVIP}
CACHE = {"kind": "token_cache", "learn_from": "output"}
SUFFIX = {"kind": "suffix"}
UNEVEN = {"kind": "tree", "branching": (2, (3, 1), (2, 0, 0, 1), 1, 1)}
LOOKUP = {"kind": "prompt_lookup", "max_tokens": 4}
HYBRID, BANDIT, HEURISTIC = {"kind": "hybrid"}, {"kind": "bandit"}, chain("heuristic")

# Drafters that see one request alone, and drafters that remember earlier requests.
DRAFTERS: dict[str, Drafter] = {
    "chain": SVIP_CHAIN,
    "chain that learns": chain("break_even"),
    "chain by a head": chain("decision", head="joint", threshold=0.3, cumulative=True),
    "deep tree": {"kind": "tree", "branching": (3, 1, 2, 1, 1, 1, 1)},
    "uneven tree": UNEVEN,
    "fork": {"kind": "fork", "width": 3, "policy": policy("fixed", max_tokens=6)},
    "suffix": SUFFIX,
    "cascade": {"kind": "cascade", "proposer": LOOKUP, "policy": SVIP},
    "cascade that learns": {"kind": "cascade", "proposer": CACHE, "policy": policy("heuristic")},
    "reuse at the target": {"kind": "post_use", "cache": CACHE, "at_draft": 0},
    "reuse at both": {"kind": "post_use", "cache": CACHE, "policy": policy("heuristic", start=8)},
    "hybrid that learns": {"kind": "hybrid", "otherwise": chain("break_even")},
    "hybrid with a tree": {"kind": "hybrid", "lookup": CACHE, "min_match": 1, "otherwise": UNEVEN},
    "merged": {"kind": "hybrid", "otherwise": chain("heuristic"), "merge": True},
    "extended": {"kind": "hybrid", "otherwise": SVIP_CHAIN, "extend": True},
    "merged, extended": HYBRID | {"otherwise": chain(max_tokens=3), "merge": True, "extend": True},
    "bandit of a request": BANDIT
    | {"memory": "request", "arms": (1, 4, UNEVEN, SUFFIX, HEURISTIC), "exploration": 0.1},
}
LASTING: dict[str, Drafter] = {
    "lasting heuristic": chain("heuristic", transient=False),
    "suffix of all": SUFFIX | {"memory": "all"},
    "cascade by its calls": {"kind": "cascade", "proposer": SUFFIX, "policy": policy("pre_cut")},
    "reuse by its calls": {"kind": "post_use", "cache": CACHE, "policy": policy("pre_cut")},
    "ucb": {"kind": "bandit", "arms": (2, 4, chain("heuristic", transient=False), UNEVEN)},
    "thompson": {"kind": "bandit", "rule": "thompson", "arms": (2, SVIP_CHAIN, SUFFIX)},
    "exp3": BANDIT
    | {"rule": "exp3", "arms": (3, HYBRID | {"otherwise": SVIP_CHAIN}, CACHE, chain("pre_cut"))},
}


class Recorded:
    """The bundled pair in float32, and requests of it."""

    def __init__(self):
        settings = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=512)
        drafts = {"small": "bundled:draft-small"}
        self.pair: Pair = load_pair(PairSpec(drafts=drafts, runner=settings))
        prompts = list(load_prompts("bundled:held_out", LONG + 1, self.pair.tokenizer))
        self.requests = [
            Request(prompt.id, tuple(self.pair.tokenizer(prompt.text)["input_ids"]), TOKENS, seed=i)
            for i, prompt in enumerate([*prompts[: FEW - 1], prompts[LONG]])
        ]

    def live(self, configuration, slots):
        return Engine(self.pair, configuration, slots).generate(self.requests)


@pytest.fixture(scope="module")
def recorded():
    return Recorded()


@pytest.fixture(scope="module")
def short(recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("greedy")
    return Replay(record_requests(recorded.pair, recorded.requests, folder, mixing=0))


@pytest.fixture(scope="module")
def coupled(recorded, tmp_path_factory):
    facts = {"mixing": 0, "sampling": COUPLED}
    folder = tmp_path_factory.mktemp("coupled")
    return Replay(record_requests(recorded.pair, recorded.requests, folder, **facts))


@pytest.fixture
def head(recorded, bare_home):
    """One that knows nothing, but says different things of different candidates."""
    save_random_head(recorded.pair, "joint", bare_home / "heads" / "joint", draft="small")


def test_requests_that_differ_are_no_recording(recorded, tmp_path):
    first, other = recorded.requests[:2]
    for changed in (replace(other, max_new_tokens=8), replace(other, sampling=COUPLED)):
        with pytest.raises(UserError, match="the requests of a recording share"):
            record_requests(recorded.pair, [first, changed], tmp_path)


def test_a_rule_is_evaluated_for_each_of_its_settings(short):
    """Its values may depend on all but what it says that they do not."""

    class Settings(Value):
        power: int
        threshold: float = 0.5

    class Power(Rule):
        apart = ("threshold",)

        def values(self, signals):
            return np.array(signals.top_probability) ** self.settings.power

    track = short.track("small")
    one, two = (track.values(Power(Settings(power=power))) for power in (1, 2))
    assert np.allclose(one**2, two)
    assert not np.allclose(one, two)
    assert track.values(Power(Settings(power=1, threshold=0.9))) is one


def test_the_values_of_a_rule_may_depend_on_its_threshold(recorded, short, monkeypatch):
    def values(self, signals):
        return [entropy - self.settings.threshold for entropy in signals.entropy]

    monkeypatch.setattr(SvipPolicy, "values", values)
    monkeypatch.setattr(SvipPolicy, "stops", lambda self, value: value > 0)
    for threshold in (0.2, 1.2):
        configuration = configured(chain("svip", threshold=threshold))
        assert_same(short, configuration, recorded.live(configuration, slots=8))


def test_a_replayed_policy_that_learns_reads_what_the_live_one_does(recorded, short, monkeypatch):
    def go_on(self, signals):
        top = signals.top_probabilities(2)
        return ((top[:, 0] - top[:, 1] > 0.2) | (signals.hidden[:, 0] > 0)).tolist()

    monkeypatch.setattr(HeuristicPolicy, "go_on", go_on)
    monkeypatch.setattr(HeuristicPolicy, "needs_hidden", True)
    configuration = configured(chain("heuristic"))
    assert configuration.reads_hidden
    assert_same(short, configuration, recorded.live(configuration, slots=8))
    without = Replay(short.recording, hidden=False)
    with pytest.raises(UserError, match="it reads hidden states, which were not opened"):
        without.run(configuration)


@pytest.mark.usefixtures("head")
@pytest.mark.parametrize("name", [*DRAFTERS, *LASTING])
def test_replayed_rounds_equal_live_rounds(recorded, short, name):
    """What was learned is carried over from request to request."""
    configuration = configured({**DRAFTERS, **LASTING}[name])
    assert_same(short, configuration, recorded.live(configuration, 1 if name in LASTING else 8))


@pytest.mark.usefixtures("head")
@pytest.mark.parametrize("name", ["chain", "chain by a head", "cascade", "reuse at both", "merged"])
def test_coupled_sampling_is_replayed_exactly(recorded, coupled, name):
    configuration = configured(DRAFTERS[name], COUPLED)
    assert_same(coupled, configuration, recorded.live(configuration, slots=8))


@pytest.mark.parametrize(
    "drafter",
    [
        DRAFTERS["reuse at both"],
        DRAFTERS["merged"],
        {"kind": "bandit", "arms": (2, chain("heuristic"), DRAFTERS["cascade that learns"])},
    ],
    ids=lambda drafter: drafter["kind"],
)
def test_a_replayed_policy_observes_what_the_live_one_does(recorded, short, drafter, monkeypatch):
    """Draft calls too: a forward of a cascade yields several candidates."""
    told: list[PolicyOutcome] = []
    observe = HeuristicPolicy.observe

    def noted(self, slot, outcome):
        told.append(outcome)
        observe(self, slot, outcome)

    monkeypatch.setattr(HeuristicPolicy, "observe", noted)
    configuration = configured(drafter)
    generations = recorded.live(configuration, slots=1)
    live = told.copy()
    told.clear()
    short.run(configuration)
    assert told == live
    # The bandit's first arm has another policy.
    rounds = [r for g in generations for r in g.rounds[:-1] if r.arm != 0]
    calls = [r.draft_forwards for r in rounds if r.draft_forwards]
    assert [outcome.draft_calls for outcome in live] == calls
    fewer = any(outcome.draft_calls < outcome.drafted for outcome in live)
    assert fewer == any(part.kind in ("cascade", "post_use") for part in configuration.parts)


def test_every_arm_is_pulled_and_told_of(recorded, short):
    """Else a bandit's replay would be one of a single drafter."""
    for name in ("ucb", "exp3", "thompson"):
        rounds = short.run(configured(LASTING[name]))
        arms = rounds.arm[rounds.position > 0]
        assert set(arms) == set(range(len(LASTING[name]["arms"])))


def test_a_bandit_rewarded_in_time_is_modelled_by_a_profile(recorded, short):
    """Where drafting costs nothing it comes to prefer the longer arm, where it is expensive the
    shorter one."""
    configuration = configured({"kind": "bandit", "arms": (1, 8), "reward": "time"})
    assert not short.can(configuration)

    def preferred(draft_seconds):
        profile = constant_profile(1.0, draft_seconds, "small")
        replay = Replay(short.recording, profile=profile)
        assert replay.can(configuration)
        rounds = replay.run(configuration)
        return int(np.bincount(rounds.arm[rounds.position > 0]).argmax())

    assert preferred(1e-6) == 1
    assert preferred(0.5) == 0


def test_the_replayed_oracle_is_theorem_4_1s(short):
    track = short.track()
    per_prompt = np.bincount(track.prompt, weights=~track.trace.agrees).astype(int)
    rounds = short.run(configured(chain("oracle")))
    found = rounds.counts
    assert found.n_discarded == 0
    assert found.n == sum(track.trace.lengths)
    # A verification for each disagreement and one more. A text that ends in a disagreement needs no
    # further round, and one that begins with an agreement one more: the first round has no
    # candidates.
    bound = np.minimum(per_prompt + 1, track.trace.lengths).sum()
    agrees = track.trace.agrees
    ends = int((~agrees)[np.cumsum(track.trace.lengths) - 1].sum())
    begins = int(agrees[track.position == 0].sum())
    assert found.n_target == bound - ends + begins
    assert rounds.drafted.max() > 20  # without a bound


def test_trees_are_not_known_when_sampling_is_coupled(coupled):
    """Ranks are recorded of the distribution; coupled candidates are chosen by noise."""
    for drafter in (UNEVEN, DRAFTERS["fork"], {"kind": "hybrid", "otherwise": UNEVEN}):
        assert not coupled.can(configured(drafter, COUPLED))


def test_what_the_recording_does_not_know_is_one_line(short):
    drafters: tuple[Drafter, ...] = (
        chain(max_tokens=30),
        {"kind": "draft_model", "draft": "medium"},
        {"kind": "fork", "policy": SVIP},
        {"kind": "token_cache"},
        {"kind": "cascade", "policy": policy("fixed", max_tokens=30)},
        {"kind": "cascade", "policy": policy("oracle")},
        {"kind": "hybrid", "otherwise": UNEVEN, "merge": True},
        {"kind": "hybrid", "otherwise": UNEVEN, "extend": True},
        {"kind": "hybrid", "otherwise": chain("oracle")},
        {"kind": "bandit", "arms": (2, {"kind": "dynamic_tree"})},
    )
    for configuration in (configured(SVIP_CHAIN, COUPLED), *map(configured, drafters)):
        assert not short.can(configuration)
        with pytest.raises(UserError, match="cannot replay") as error:
            short.run(configuration)
        assert "\n" not in str(error.value)


def test_the_test_notices_a_wrong_branching(recorded, short):
    live = configured(DRAFTERS["deep tree"])
    rounds = recorded.live(live, slots=8)
    wrong = ((3, 1, 2, 1, 1, 1), (2, 1, 2, 1, 1, 1, 1), (3, (1, 1, 2), 2, 1, 1, 1, 1))
    assert short.run(live).counts == Counts.of(rounds)
    for branching in wrong:
        other = configured({"kind": "tree", "branching": branching})
        assert short.run(other).counts != Counts.of(rounds)
