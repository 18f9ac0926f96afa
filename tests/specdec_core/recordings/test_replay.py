"""Replayed rounds are the live engine's, for every policy and drafter that replay can follow."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import (
    Configuration,
    DrafterSettings,
    PairSpec,
    PolicySettings,
    RunnerSettings,
    Sampling,
)
from specdec_core.cost import Hardware, oracle_counts
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.draft_model.settings import CascadeSettings, DraftModelSettings
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.modules import build_head
from specdec_core.drafting.heads.storage import save_head
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.lookahead import LookaheadSettings
from specdec_core.drafting.policies.break_even import BreakEvenSettings
from specdec_core.drafting.policies.by_batch import ByBatchSettings
from specdec_core.drafting.policies.confidence import ConfidenceProductSettings, ConfidenceSettings
from specdec_core.drafting.policies.decision import DecisionSettings
from specdec_core.drafting.policies.dynamic_confidence import DynamicConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heuristic import HeuristicPolicy, HeuristicSettings
from specdec_core.drafting.policies.oracle import OracleSettings
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.drafting.post_use.settings import PostUseSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.drafting.target_started.settings import TargetTreeSettings
from specdec_core.drafting.token_cache import TokenCacheSettings
from specdec_core.drafting.tree.settings import ForkSettings, TreeSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair, load_pair
from specdec_core.prompts.prompt_sets import load_prompts
from specdec_core.recordings.record import Recorder
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Header, Recording, save_header, write_shard
from specdec_core.search.results import PromptSet
from specdec_core.tokens.statistics import Counts, Generation, Round, rounds_frame

PROMPTS, FEW, TOKENS = 12, 6, 32
LONG = 14  # the prompt where the draft agrees for more tokens than a recorded chain has
COUPLED = Sampling(temperature=1.0, coupling="gumbel")
COLUMNS = [
    "request_id",
    "round",
    *(f.name for f in fields(Round) if not f.name.endswith("_seconds")),
]

# Policies of a request by itself, decoded in a batch, and those that remember earlier requests or
# count who is decoded with them.
OWN: dict[str, PolicySettings] = {
    "fixed": FixedSettings(max_tokens=6),
    "heuristic": HeuristicSettings(start=3),
    "confidence": ConfidenceSettings(threshold=0.6),
    "svip": SvipSettings(threshold=1.1, max_tokens=12),
    "confidence_product": ConfidenceProductSettings(threshold=0.3),
    "break_even": BreakEvenSettings(target_cost=8),
    "dynamic_confidence": DynamicConfidenceSettings(),
    "specdecpp": SpecDecPlusPlusSettings(head="specdecpp", threshold=0.6),
    "t1": DecisionSettings(head="t1", threshold=0.5),
    "t2": DecisionSettings(head="t2", threshold=0.5),
    "joint, cumulative": DecisionSettings(head="joint", threshold=0.3, cumulative=True),
}
LASTING: dict[str, PolicySettings] = {
    "lasting heuristic": HeuristicSettings(transient=False),
    "pre_cut": PreCutSettings(target_cost=5),
    "by batch": ByBatchSettings(tokens={1: 4, 2: 0}),
}
SVIP = SvipSettings(threshold=1.1, max_tokens=12)
CACHE = TokenCacheSettings(learn_from="output")
UNEVEN = TreeSettings(branching=(2, (3, 1), (2, 0, 0, 1), 1, 1))


def chain(policy: PolicySettings) -> DraftModelSettings:
    return DraftModelSettings(draft="small", policy=policy)


# Drafters of a request by itself, and those that remember earlier requests.
DRAFTERS: dict[str, DrafterSettings] = {
    "tree": TreeSettings(branching=(4, 2, 2, 1)),
    "deep tree": TreeSettings(branching=(3, 1, 2, 1, 1, 1, 1)),
    "uneven tree": UNEVEN,
    "fork": ForkSettings(width=3, policy=FixedSettings(max_tokens=6)),
    "suffix": SuffixSettings(),
    "token cache": CACHE,
    "cascade": CascadeSettings(proposer=PromptLookupSettings(max_tokens=4), policy=SVIP),
    "cascade of a tree": CascadeSettings(proposer=CACHE, policy=FixedSettings(max_tokens=9)),
    "cascade that learns": CascadeSettings(proposer=SuffixSettings(), policy=HeuristicSettings()),
    "reuse at the target": PostUseSettings(cache=CACHE, at_draft=0, policy=FixedSettings()),
    "reuse at both": PostUseSettings(cache=CACHE, policy=HeuristicSettings(start=8)),
    "hybrid": HybridSettings(otherwise=chain(SVIP)),
    "hybrid that learns": HybridSettings(otherwise=chain(DynamicConfidenceSettings())),
    "hybrid with a tree": HybridSettings(lookup=CACHE, min_match=1, otherwise=UNEVEN),
    "merged": HybridSettings(otherwise=chain(FixedSettings()), merge=True),
    "merged with a learner": HybridSettings(
        lookup=CACHE, min_match=1, otherwise=chain(HeuristicSettings()), merge=True
    ),
    "extended": HybridSettings(otherwise=chain(SVIP), extend=True),
    "merged and extended": HybridSettings(
        otherwise=chain(FixedSettings(max_tokens=3)), merge=True, extend=True
    ),
    "bandit of a request": BanditSettings(
        memory="request",
        arms=(1, 4, UNEVEN, SuffixSettings(), chain(HeuristicSettings())),
        exploration=0.1,
    ),
}
LASTING_DRAFTERS: dict[str, DrafterSettings] = {
    "suffix of all": SuffixSettings(memory="all"),
    "token cache of all": CACHE.model_copy(update={"memory": "all"}),
    "cascade by its calls": CascadeSettings(
        proposer=SuffixSettings(), policy=PreCutSettings(target_cost=5)
    ),
    "reuse by its calls": PostUseSettings(cache=CACHE, policy=PreCutSettings(target_cost=5)),
    "ucb": BanditSettings(arms=(2, 4, chain(HeuristicSettings(transient=False)), UNEVEN)),
    "thompson": BanditSettings(rule="thompson", arms=(2, chain(SVIP), SuffixSettings())),
    "exp3": BanditSettings(
        rule="exp3",
        arms=(
            3,
            HybridSettings(otherwise=chain(SVIP)),
            CACHE,
            chain(PreCutSettings(target_cost=5)),
        ),
    ),
}


class Recorded:
    """The bundled pair in float32, heads with random weights, and recordings of prompts."""

    def __init__(self, root: Path) -> None:
        settings = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=512)
        drafts = {"small": "bundled:draft-small"}
        self.pair: Pair = load_pair(PairSpec(drafts=drafts, runner=settings))
        self.root = root
        self._lived: dict[Configuration, list[Generation]] = {}
        prompts = list(load_prompts("bundled:held_out", LONG + 1, self.pair.tokenizer))
        self.requests = [
            Request(prompt.id, tuple(self.pair.tokenizer(prompt.text)["input_ids"]), TOKENS, seed=i)
            for i, prompt in enumerate([*prompts[: PROMPTS - 1], prompts[LONG]])
        ]
        for kind in ("specdecpp", "t1", "t2", "joint"):
            self._make_head(kind)

    def _make_head(self, kind: str) -> None:
        """A head that knows nothing, but says different things of different candidates."""
        hidden, pair = self.pair.drafts["small"].config.hidden_size, self.pair.fingerprints
        card = HeadCard(
            kind=kind, draft="small", depth=1, width=16, hidden_size=hidden, top_k=10, w_acc=1,
            w_rej=1, sampling=Sampling(),
            pair={"target": pair["target"], "draft": pair["small"]},
        )  # fmt: skip
        save_head(build_head(kind, hidden, 10, depth=1, width=16), card, self.root / kind)

    def record(self, sampling: Sampling, prompts: int) -> Replay:
        header = Header(
            pair=self.pair.spec,
            fingerprints=self.pair.fingerprints,
            eos_token_ids=tuple(self.pair.eos_token_ids),
            prompts=PromptSet(source="bundled:held_out", count=prompts, digest="0"),
            sampling=sampling,
            max_new_tokens=TOKENS,
            mixing=0,
        )
        folder = self.root / f"recording-{sampling.temperature:g}-{prompts}"
        save_header(header, folder)
        numbered = list(enumerate(self.requests[:prompts]))
        write_shard(Recorder(self.pair, header).record(numbered), folder, 0)
        return Replay(Recording.open(folder))

    def configuration(self, policy: PolicySettings, sampling: Sampling) -> Configuration:
        head = getattr(policy, "head", None)
        if head is not None:
            policy = policy.model_copy(update={"head": str(self.root / head)})
        drafter = DraftModelSettings(draft="small", policy=policy)
        return Configuration(drafter=drafter, sampling=sampling)

    def live(self, configuration: Configuration, prompts: int, slots: int) -> list[Generation]:
        if configuration not in self._lived:
            engine = Engine(self.pair, configuration, slots)
            self._lived[configuration] = engine.generate(self.requests[:prompts])
        return self._lived[configuration]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def greedy(recorded: Recorded) -> Replay:
    return recorded.record(Sampling(), PROMPTS)


@pytest.fixture(scope="module")
def short(recorded: Recorded) -> Replay:
    """Of the first prompts."""
    return recorded.record(Sampling(), FEW)


@pytest.fixture(scope="module")
def coupled(recorded: Recorded) -> Replay:
    return recorded.record(COUPLED, FEW)


def assert_same(replay: Replay, configuration: Configuration, live: list[Generation]) -> None:
    """Round by round the same, and so the same counts."""
    replayed = replay.run(configuration)
    pd.testing.assert_frame_equal(
        replayed.frame()[COLUMNS], rounds_frame(live)[COLUMNS], check_dtype=False
    )
    assert replayed.counts == Counts.of(live)


@pytest.mark.parametrize("name", OWN)
def test_replayed_rounds_equal_live_rounds(recorded: Recorded, greedy: Replay, name: str) -> None:
    configuration = recorded.configuration(OWN[name], Sampling())
    assert_same(greedy, configuration, recorded.live(configuration, PROMPTS, slots=16))


@pytest.mark.parametrize("name", LASTING)
def test_replay_carries_over_what_was_learned(recorded: Recorded, short: Replay, name: str) -> None:
    configuration = recorded.configuration(LASTING[name], Sampling())
    assert_same(short, configuration, recorded.live(configuration, FEW, slots=1))


@pytest.mark.parametrize(
    "name", ["fixed", "svip", "confidence_product", "specdecpp", "joint, cumulative"]
)
def test_coupled_sampling_is_replayed_exactly(
    recorded: Recorded, coupled: Replay, name: str
) -> None:
    configuration = recorded.configuration(OWN[name], COUPLED)
    assert_same(coupled, configuration, recorded.live(configuration, FEW, slots=8))


@pytest.mark.parametrize("name", DRAFTERS)
def test_replayed_drafters_are_the_live_ones(recorded: Recorded, short: Replay, name: str) -> None:
    configuration = Configuration(drafter=DRAFTERS[name])
    assert_same(short, configuration, recorded.live(configuration, FEW, slots=8))


@pytest.mark.parametrize("name", LASTING_DRAFTERS)
def test_replayed_drafters_remember_earlier_requests(
    recorded: Recorded, short: Replay, name: str
) -> None:
    configuration = Configuration(drafter=LASTING_DRAFTERS[name])
    assert_same(short, configuration, recorded.live(configuration, FEW, slots=1))


@pytest.mark.parametrize(
    "drafter",
    [
        chain(HeuristicSettings()),
        DRAFTERS["cascade that learns"],
        DRAFTERS["reuse at both"],
        DRAFTERS["merged with a learner"],
        BanditSettings(arms=(2, chain(HeuristicSettings()), DRAFTERS["cascade that learns"])),
    ],
    ids=lambda drafter: drafter.kind,
)
def test_a_replayed_policy_observes_what_the_live_one_does(
    recorded: Recorded, short: Replay, drafter: DrafterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft calls too: a forward of a cascade brings several candidates."""
    told: list[PolicyOutcome] = []
    observe = HeuristicPolicy.observe

    def noted(self: HeuristicPolicy, slot: int, outcome: PolicyOutcome) -> None:
        told.append(outcome)
        observe(self, slot, outcome)

    monkeypatch.setattr(HeuristicPolicy, "observe", noted)
    configuration = Configuration(drafter=drafter)
    generations = Engine(recorded.pair, configuration).generate(recorded.requests[:FEW])
    live = told.copy()
    told.clear()
    short.run(configuration)
    assert told == live
    # The bandit's first arm has another policy.
    rounds = [r for g in generations for r in g.rounds[:-1] if r.arm != 0]
    calls = [r.draft_forwards for r in rounds if r.draft_forwards]
    assert [outcome.draft_calls for outcome in live] == calls
    fewer = any(outcome.draft_calls < outcome.drafted for outcome in live)
    assert fewer == any(part.kind in ("cascade", "post_use") for part in drafter.walk())


@pytest.mark.parametrize("name", ["cascade", "reuse at both", "merged", "suffix"])
def test_drafters_are_replayed_when_sampling_is_coupled(
    recorded: Recorded, coupled: Replay, name: str
) -> None:
    configuration = Configuration(drafter=DRAFTERS[name], sampling=COUPLED)
    assert_same(coupled, configuration, recorded.live(configuration, FEW, slots=8))


def test_the_test_notices_a_wrong_branching(recorded: Recorded, short: Replay) -> None:
    live = Configuration(drafter=DRAFTERS["deep tree"])
    rounds = recorded.live(live, FEW, slots=8)
    wrong = (
        TreeSettings(branching=(3, 1, 2, 1, 1, 1)),
        TreeSettings(branching=(2, 1, 2, 1, 1, 1, 1)),
        TreeSettings(branching=(3, (1, 1, 2), 2, 1, 1, 1, 1)),
    )
    assert short.run(live).counts == Counts.of(rounds)
    for drafter in wrong:
        assert short.run(Configuration(drafter=drafter)).counts != Counts.of(rounds)


def test_every_arm_is_pulled_and_told_of(recorded: Recorded, short: Replay) -> None:
    """Else a bandit's replay would be one of a single drafter."""
    for name in ("ucb", "exp3", "thompson"):
        drafter = LASTING_DRAFTERS[name]
        rounds = short.run(Configuration(drafter=drafter))
        arms = rounds.arm[rounds.position > 0]
        assert set(arms) == set(range(len(drafter.arms)))


def test_a_bandit_rewarded_in_time_is_modelled_by_a_profile(
    recorded: Recorded, short: Replay
) -> None:
    """With drafting for nothing it comes to prefer the longer arm, with dear drafts the shorter."""
    arms = (chain(FixedSettings(max_tokens=1)), chain(FixedSettings(max_tokens=8)))
    bandit = BanditSettings(arms=arms, reward="time")
    configuration = Configuration(drafter=bandit)
    assert not short.can(configuration)

    def preferred(draft_seconds: float) -> int:
        hardware = Hardware(name="made up", target=1.0, drafts={"*": draft_seconds})
        profile = hardware.profile(["small"])
        replay = Replay(short.recording, profile=profile)
        assert replay.can(configuration)
        rounds = replay.run(configuration)
        return int(np.bincount(rounds.arm[rounds.position > 0]).argmax())

    assert preferred(1e-6) == 1
    assert preferred(0.5) == 0


def test_the_replayed_oracle_is_theorem_4_1s(recorded: Recorded, greedy: Replay) -> None:
    track = greedy.track()
    per_prompt = np.bincount(track.prompt, weights=~track.trace.agrees).astype(int)
    rounds = greedy.run(recorded.configuration(OracleSettings(), Sampling()))
    found = rounds.counts
    assert found.n_discarded == 0
    assert found.n == sum(track.trace.lengths)
    # A text that ends in a disagreement needs no further round, and one that begins with an
    # agreement one more: the first round has no candidates.
    bound = oracle_counts(per_prompt.tolist(), track.trace.lengths.tolist())
    agrees = track.trace.agrees
    ends = int((~agrees)[np.cumsum(track.trace.lengths) - 1].sum())
    begins = int(agrees[track.position == 0].sum())
    assert found.n_target == bound.n_target - ends + begins
    assert rounds.drafted.max() > 20  # without a bound


def test_trees_are_not_known_when_sampling_is_coupled(coupled: Replay) -> None:
    """Ranks are those of the distribution, and coupled candidates are chosen by noise."""
    for drafter in (UNEVEN, ForkSettings(policy=SVIP), HybridSettings(otherwise=UNEVEN)):
        assert not coupled.can(Configuration(drafter=drafter, sampling=COUPLED))


def test_what_the_recording_does_not_know_is_one_line(recorded: Recorded, short: Replay) -> None:
    sampled = recorded.configuration(OWN["fixed"], COUPLED)
    long = recorded.configuration(FixedSettings(max_tokens=30), Sampling())
    unknown = Configuration(drafter=DraftModelSettings(draft="medium"))
    drafters = (
        TreeSettings(draft="medium"),
        ForkSettings(policy=SVIP),
        TargetTreeSettings(branching=(1, 2, 2)),
        DynamicTreeSettings(),
        LookaheadSettings(),
        TokenCacheSettings(),
        PostUseSettings(),
        CascadeSettings(policy=FixedSettings(max_tokens=30)),
        CascadeSettings(policy=OracleSettings()),
        HybridSettings(otherwise=UNEVEN, merge=True),
        HybridSettings(otherwise=UNEVEN, extend=True),
        HybridSettings(otherwise=chain(OracleSettings())),
        BanditSettings(arms=(2, LookaheadSettings())),
    )
    unknowable = [Configuration(drafter=drafter) for drafter in drafters]
    for configuration in (sampled, long, unknown, *unknowable):
        assert not short.can(configuration)
        with pytest.raises(UserError, match="cannot replay") as error:
            short.run(configuration)
        assert "\n" not in str(error.value)
