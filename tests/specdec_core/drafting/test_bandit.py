"""A bandit over drafters changes who drafts, never what is written, and learns from each round."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from research.drift.toy_pair import FAR, NEAR, exact_distribution, sample_counts, toy_pair
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, READ, Configuration, Sampling
from specdec_core.drafting.bandit.drafter import BanditDrafter, build_bandit
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.policies.break_even import BreakEvenSettings
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.dynamic_confidence import DynamicConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.drafting.post_use.settings import PostUseSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.states import save_state
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.drafting.tree.settings import TreeSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch, ModelRunner, Output
from specdec_core.servers import model_files
from specdec_core.tokens.statistics import Generation
from tests.specdec_core.tokens.test_lossless import p_value

torch.set_num_threads(1)

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 9, 17, 30, 1)]
CHAIN = DraftModelSettings(policy=FixedSettings(max_tokens=4))
MIXED = (
    CHAIN,
    DraftModelSettings(policy=ConfidenceSettings(threshold=0.3, max_tokens=6)),
    DraftModelSettings(policy=DynamicConfidenceSettings(max_tokens=5)),
    TreeSettings(branching=(3, 2)),
    PostUseSettings(policy=FixedSettings(max_tokens=4)),
    PromptLookupSettings(),
    SuffixSettings(),
)
LENGTHS = tuple(DraftModelSettings(policy=FixedSettings(max_tokens=k)) for k in (1, 2, 3, 4))


def decode(
    pair: Pair, drafter: BanditSettings, slots: int = 3, new_tokens: int = 40, **sampling: float
) -> tuple[Engine, list[Generation]]:
    engine = Engine(pair, Configuration(drafter=drafter, sampling=Sampling(**sampling)), slots)
    requests = [
        Request(str(i), prompt, new_tokens - 3 * i, seed=i, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    return engine, engine.generate(requests)


@pytest.mark.parametrize("memory", ["request", "all"])
@pytest.mark.parametrize("reward", ["tokens", "time"])
@pytest.mark.parametrize("rule", ["ucb", "exp3", "thompson"])
def test_greedy_output_is_the_targets(tiny_pair: Pair, rule: str, reward: str, memory: str) -> None:
    """Arms of different kinds share a draft model that falls behind while others draft."""
    plain = Engine(tiny_pair, AUTOREGRESSIVE, 3)
    drafter = BanditSettings(rule=rule, reward=reward, memory=memory, arms=MIXED, seed=1)
    _, generations = decode(tiny_pair, drafter)
    expected = plain.generate(
        [Request(str(i), p, 40 - 3 * i, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    )
    assert [g.tokens for g in generations] == [g.tokens for g in expected]
    assert {g.rounds[0].arm for g in generations} == {None}
    arms = {r.arm for g in generations for r in g.rounds[1:]}
    assert arms == set(range(len(MIXED)))


@pytest.mark.parametrize(
    ("rule", "memory"), [("ucb", "all"), ("exp3", "request"), ("thompson", "all")]
)
def test_samples_have_the_targets_joint_distribution(rule: str, memory: str) -> None:
    pair = toy_pair()
    arms = (
        DraftModelSettings(draft=NEAR, policy=FixedSettings(max_tokens=2)),
        DraftModelSettings(draft=FAR, policy=FixedSettings(max_tokens=1)),
        TreeSettings(draft=NEAR, branching=(2, 2)),
        PromptLookupSettings(),
    )
    sampling = Sampling(temperature=1.0)
    drafter = BanditSettings(rule=rule, memory=memory, arms=arms)
    counts = sample_counts(pair, Configuration(drafter=drafter, sampling=sampling), 8_000, 4)
    assert p_value(counts, exact_distribution(pair, sampling, 4)) > 1e-3


def test_every_request_of_a_batch_has_its_own_length_and_one_pass_drafts_them_all(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's second setting: arms K ∈ {1, …, 4} in one batch."""
    drafter = BanditSettings(rule="exp3", arms=LENGTHS, seed=4)
    engine = Engine(tiny_pair, Configuration(drafter=drafter), 4)
    for i, prompt in enumerate(PROMPTS[:4]):
        engine.add(Request(str(i), prompt, 60, ignore_eos=True))
    for _ in range(2):  # the first rounds; then the draft reads the prompts
        engine.step()
    widths: list[int] = []
    forward = ModelRunner.forward

    def counted(self: ModelRunner, batch: Batch) -> Output:
        if self is not engine.target:
            widths.append(len(batch.rows))
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", counted)
    mixed = 0
    for _ in range(6):
        widths.clear()
        engine.step()
        rounds = [active.rounds[-1] for active in engine._active.values()]
        assert all(r.drafted == r.arm + 1 for r in rounds)
        mixed += len({r.arm for r in rounds}) > 1
        # one forward for each depth, of all requests that go so deep
        deepest = max(r.drafted for r in rounds)
        assert widths == [sum(r.drafted > depth for r in rounds) for depth in range(deepest)]
    assert mixed


def test_the_bandit_learns_what_the_rounds_added(tiny_pair: Pair) -> None:
    drafter = BanditSettings(arms=MIXED)
    engine, generations = decode(tiny_pair, drafter)
    assert isinstance(engine.drafter, BanditDrafter)
    bandit = engine.drafter.bandit
    # a request's last round is cut by the end of the text and counts for nobody
    told = [r for g in generations for r in g.rounds[:-1]]
    assert bandit.rounds == [sum(r.arm == arm for r in told) for arm in range(len(MIXED))]
    assert bandit.tokens == [
        sum(r.generated for r in told if r.arm == arm) for arm in range(len(MIXED))
    ]
    for arm in range(len(MIXED)):
        whole = sum(r.draft_seconds + r.target_seconds for r in told if r.arm == arm)
        target = sum(r.target_seconds for r in told if r.arm == arm)
        assert target <= bandit.seconds[arm] <= whole


def test_one_slot_chooses_as_the_bandit_alone_would(tiny_pair: Pair) -> None:
    """What replay relies on: select for every round but a request's first, update for all of these
    but its last."""
    for rule in ("ucb", "exp3", "thompson"):
        drafter = BanditSettings(rule=rule, arms=MIXED, seed=7)
        _, generations = decode(tiny_pair, drafter, slots=1)
        bandit = build_bandit(drafter)
        for generation in generations:
            first, *rounds = generation.rounds
            assert first.arm is None
            for number, r in enumerate(rounds):
                assert bandit.select() == r.arm
                if number < len(rounds) - 1:
                    bandit.update(r.arm, r.generated)


def test_memory_of_a_request_ends_with_it(tiny_pair: Pair) -> None:
    drafter = BanditSettings(arms=MIXED, memory="request")
    engine, generations = decode(tiny_pair, drafter, slots=2)
    for generation in generations:
        first = [r.arm for r in generation.rounds[1 : 1 + len(MIXED)]]
        assert first == list(range(len(first)))
    assert engine.drafter.bandit.selections == 0
    _, generations = decode(tiny_pair, drafter.model_copy(update={"memory": "all"}), slots=1)
    assert [r.arm for r in generations[1].rounds[1 : 1 + len(MIXED)]] != list(range(len(MIXED)))


def test_a_saved_state_goes_on_in_another_engine(tiny_pair: Pair, tmp_path) -> None:
    drafter = BanditSettings(rule="exp3", arms=MIXED)
    engine, _ = decode(tiny_pair, drafter, slots=1)
    path = save_state(engine.learned.state(), tmp_path / "state.json")
    _, expected = decode_again(engine)
    other = Engine(
        tiny_pair, Configuration(drafter=drafter.model_copy(update={"state": str(path)}))
    )
    assert other.drafter.bandit.state() != build_bandit(drafter).state()
    _, found = decode_again(other)
    assert found == expected


def test_a_saved_state_goes_on_where_a_target_forward_costs_something_else(tmp_path) -> None:
    def bandit(cost: float | str, **more: str) -> BanditSettings:
        even = DraftModelSettings(policy=BreakEvenSettings(target_cost=cost))
        return BanditSettings(arms=(LENGTHS[0], even), **more)

    learned = build_bandit(bandit(12.5))
    learned.selections, learned.rounds = 7, [3, 4]
    path = save_state(learned.state(), tmp_path / "state.json")
    for cost in ("profile", 19.0):
        assert build_bandit(bandit(cost, state=str(path))).rounds == [3, 4]
    both = (bandit(12.5).arms[1], bandit(19.0).arms[1])
    assert len(set(build_bandit(BanditSettings(arms=both)).ids)) == 2


def test_a_saved_state_goes_on_where_a_head_lies_elsewhere(tmp_path) -> None:
    """As in a plug-in, whose file names the places of what a workspace has names for."""

    def bandit(head: str, **more: str) -> BanditSettings:
        policy = SpecDecPlusPlusSettings(head=head, threshold=0.5)
        return BanditSettings(arms=(LENGTHS[0], DraftModelSettings(policy=policy)), **more)

    learned = build_bandit(bandit("mine"))
    learned.selections, learned.rounds = 7, [3, 4]
    place, path = str(tmp_path / "mine"), str(save_state(learned.state(), tmp_path / "state.json"))
    assert build_bandit(bandit(place, state=path)).rounds == [3, 4]
    with pytest.raises(UserError, match="of other arms"):
        build_bandit(bandit("another", state=path))


def test_the_keys_that_name_what_is_read_are_those_that_are_placed() -> None:
    assert set(READ) == set(model_files.READ_AT)


def decode_again(engine: Engine) -> tuple[Engine, list[list[int]]]:
    generations = engine.generate([Request("again", PROMPTS[1], 40, ignore_eos=True)])
    return engine, [[r.arm for r in g.rounds] for g in generations]


def test_a_cancelled_request_teaches_nothing(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, Configuration(drafter=BanditSettings(rule="exp3", arms=MIXED)), 2)
    engine.add(Request("a", PROMPTS[1], 40, ignore_eos=True))
    engine.add(Request("b", PROMPTS[2], 40, ignore_eos=True))
    engine.step()
    assert engine.drafter.bandit.selections == 0, "nobody is asked in a first round"
    engine.step()
    engine.cancel("a")
    before = sum(engine.drafter.bandit.rounds)
    assert before == 2
    engine.step()
    assert sum(engine.drafter.bandit.rounds) == 3
    (generation,) = engine.generate([Request("c", PROMPTS[1], 20, ignore_eos=True)])
    assert len(generation.tokens) == 20


@pytest.mark.parametrize("rule", ["ucb", "exp3", "thompson"])
def test_a_state_of_other_arms_is_refused_in_one_line(tiny_pair: Pair, tmp_path, rule: str) -> None:
    known = BanditSettings(rule=rule, arms=LENGTHS[:2])
    path = save_state(build_bandit(known).state(), tmp_path / "state.json")
    other = BanditSettings(rule=rule, arms=LENGTHS[:3], state=str(path))
    with pytest.raises(UserError, match="of other arms") as caught:
        Engine(tiny_pair, Configuration(drafter=other))
    assert "\n" not in str(caught.value)


def test_nothing_random_is_drawn_from_a_requests_stream_to_choose(tiny_pair: Pair) -> None:
    """All rules leave a sampled request the numbers that its tokens are made from."""
    same = (CHAIN, DraftModelSettings(policy=ConfidenceSettings(threshold=0.0, max_tokens=4)))
    plain = Engine(
        tiny_pair, Configuration(drafter=CHAIN, sampling=Sampling(temperature=0.9)), 2
    ).generate([Request(str(i), p, 30, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)])
    for rule in ("ucb", "exp3", "thompson"):
        drafter = BanditSettings(rule=rule, arms=same)
        engine = Engine(
            tiny_pair, Configuration(drafter=drafter, sampling=Sampling(temperature=0.9)), 2
        )
        found = engine.generate(
            [Request(str(i), p, 30, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]
        )
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        assert len({r.arm for g in found for r in g.rounds[1:]}) == 2
    assert np.isfinite(engine.drafter.bandit.losses).all()


def test_a_draft_model_that_is_not_asked_reads_nothing(tiny_pair: Pair) -> None:
    lookups = (PromptLookupSettings(), SuffixSettings(), CHAIN)
    engine = Engine(tiny_pair, Configuration(drafter=BanditSettings(arms=lookups)))
    engine.add(Request("0", PROMPTS[3], 20, ignore_eos=True))
    draft = engine.drafts.open(None)
    held = []
    while not engine.idle:
        engine.step()
        held.append(draft.lengths[0])
    # after the first round each arm has its turn; the third is the one that has a draft model
    assert held[:3] == [0, 0, 0]
    assert held[3] >= len(PROMPTS[3])
    engine.configure(Configuration(drafter=BanditSettings(arms=LENGTHS)))
    assert not draft.lazy
    engine.configure(Configuration(drafter=BanditSettings(arms=lookups)))
    assert draft.lazy
    engine.configure(Configuration(drafter=CHAIN))
    assert not draft.lazy


def test_drafters_made_of_others_can_be_arms_and_have_them(tiny_pair: Pair) -> None:
    inner = BanditSettings(arms=(LENGTHS[0], CHAIN, PromptLookupSettings()), rule="exp3")
    chain_lookup = HybridSettings(lookup=SuffixSettings(), otherwise=inner, min_match=1)
    extended = HybridSettings(otherwise=CHAIN, extend=True, min_match=9)
    drafter = BanditSettings(arms=(inner, extended, chain_lookup, LENGTHS[2]))
    engine, generations = decode(tiny_pair, drafter)
    expected = Engine(tiny_pair, slots=3).generate(
        [Request(str(i), p, 40 - 3 * i, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    )
    assert [g.tokens for g in generations] == [g.tokens for g in expected]
    told = [r for g in generations for r in g.rounds[:-1]]
    assert engine.drafter.bandit.rounds == [sum(r.arm == arm for r in told) for arm in range(4)]
    nested = engine.drafter.arms[0]
    assert isinstance(nested, BanditDrafter)
    assert sum(nested.bandit.rounds) == sum(r.arm == 0 for r in told)
    assert sum(n > 0 for n in nested.bandit.rounds) > 1  # its own choices, not the outer's
