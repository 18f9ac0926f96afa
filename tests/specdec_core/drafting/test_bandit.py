"""A bandit chooses the drafter of each round, never changes the output, and learns from each
round."""

import numpy as np
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.config.base import READ
from specdec_core.drafting.bandit.drafter import build_bandit
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.states import save_state
from specdec_core.engine import Engine, Request
from specdec_core.models.runner import ModelRunner
from specdec_core.servers import model_files
from tests.specdec_core.drafting.proofs import COUNTING as PROMPTS
from tests.specdec_core.kinds import chain, configured

CHAIN, LOOKUP, SUFFIX = chain(max_tokens=4), {"kind": "prompt_lookup"}, {"kind": "suffix"}
MIXED = (
    CHAIN,
    chain("confidence", threshold=0.3, max_tokens=6),
    chain("break_even", max_tokens=5),
    {"kind": "tree", "branching": (3, 2)},
    {"kind": "post_use", "policy": {"kind": "fixed", "max_tokens": 4}},
    LOOKUP,
    SUFFIX,
)
LENGTHS = (1, 2, 3, 4)


def decode(pair, drafter, slots=3, new_tokens=40, **sampling):
    engine = Engine(pair, Configuration(drafter=drafter, sampling=Sampling(**sampling)), slots)
    requests = [
        Request(str(i), prompt, new_tokens - 3 * i, seed=i, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    return engine, engine.generate(requests)


def test_every_request_of_a_batch_has_its_own_length_and_one_pass_drafts_them_all(
    tiny_pair, monkeypatch
):
    """The paper's second setting: arms K ∈ {1, …, 4} in one batch."""
    drafter = BanditSettings(rule="exp3", arms=LENGTHS, seed=4)
    engine = Engine(tiny_pair, Configuration(drafter=drafter), 4)
    for i, prompt in enumerate(PROMPTS[:4]):
        engine.add(Request(str(i), prompt, 60, ignore_eos=True))
    for _ in range(2):  # the first rounds; then the draft's prefill
        engine.step()
    widths: list[int] = []
    forward = ModelRunner.forward

    def counted(self, batch):
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


def test_the_bandit_learns_what_the_rounds_added(tiny_pair):
    drafter = BanditSettings(arms=MIXED)
    engine, generations = decode(tiny_pair, drafter)
    bandit = engine.drafter.bandit
    # a request's last round is cut by the end of the text and counts for no arm
    told = [r for g in generations for r in g.rounds[:-1]]
    assert bandit.rounds == [sum(r.arm == arm for r in told) for arm in range(len(MIXED))]
    assert bandit.tokens == [
        sum(r.generated for r in told if r.arm == arm) for arm in range(len(MIXED))
    ]
    for arm in range(len(MIXED)):
        whole = sum(r.draft_seconds + r.target_seconds for r in told if r.arm == arm)
        target = sum(r.target_seconds for r in told if r.arm == arm)
        assert target <= bandit.seconds[arm] <= whole


def test_memory_of_a_request_ends_with_it(tiny_pair):
    drafter = BanditSettings(arms=MIXED, memory="request")
    engine, generations = decode(tiny_pair, drafter, slots=2)
    for generation in generations:
        first = [r.arm for r in generation.rounds[1 : 1 + len(MIXED)]]
        assert first == list(range(len(first)))
    assert engine.drafter.bandit.selections == 0
    _, generations = decode(tiny_pair, drafter.model_copy(update={"memory": "all"}), slots=1)
    assert [r.arm for r in generations[1].rounds[1 : 1 + len(MIXED)]] != list(range(len(MIXED)))


def test_a_saved_state_goes_on_in_another_engine(tiny_pair, tmp_path):
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


def test_a_saved_state_goes_on_where_a_target_forward_costs_something_else(tmp_path):
    def bandit(cost, **more):
        return BanditSettings(arms=(1, chain("break_even", target_cost=cost)), **more)

    learned = build_bandit(bandit(12.5))
    learned.selections, learned.rounds = 7, [3, 4]
    path = save_state(learned.state(), tmp_path / "state.json")
    for cost in ("profile", 19.0):
        assert build_bandit(bandit(cost, state=str(path))).rounds == [3, 4]
    both = (bandit(12.5).arms[1], bandit(19.0).arms[1])
    assert len(set(build_bandit(BanditSettings(arms=both)).ids)) == 2


def test_a_saved_state_goes_on_where_a_head_lies_elsewhere(tmp_path):
    """As in a plug-in: its file has paths where a workspace has names."""

    def bandit(head, **more):
        return BanditSettings(arms=(1, chain("specdecpp", head=head, threshold=0.5)), **more)

    learned = build_bandit(bandit("mine"))
    learned.selections, learned.rounds = 7, [3, 4]
    place, path = str(tmp_path / "mine"), str(save_state(learned.state(), tmp_path / "state.json"))
    assert build_bandit(bandit(place, state=path)).rounds == [3, 4]
    with pytest.raises(UserError, match="of other arms"):
        build_bandit(bandit("another", state=path))


def test_the_keys_that_name_what_is_read_are_those_that_are_placed():
    assert set(READ) == set(model_files.READ_AT)


def decode_again(engine):
    generations = engine.generate([Request("again", PROMPTS[1], 40, ignore_eos=True)])
    return engine, [[r.arm for r in g.rounds] for g in generations]


def test_a_cancelled_request_teaches_nothing(tiny_pair):
    engine = Engine(tiny_pair, Configuration(drafter=BanditSettings(rule="exp3", arms=MIXED)), 2)
    engine.add(Request("a", PROMPTS[1], 40, ignore_eos=True))
    engine.add(Request("b", PROMPTS[2], 40, ignore_eos=True))
    engine.step()
    assert engine.drafter.bandit.selections == 0, "no arm is selected in a first round"
    engine.step()
    engine.cancel("a")
    before = sum(engine.drafter.bandit.rounds)
    assert before == 2
    engine.step()
    assert sum(engine.drafter.bandit.rounds) == 3
    (generation,) = engine.generate([Request("c", PROMPTS[1], 20, ignore_eos=True)])
    assert len(generation.tokens) == 20


def test_nothing_random_is_drawn_from_a_requests_stream_to_choose(tiny_pair):
    """All rules leave a sampled request the numbers that its tokens are made from."""
    same = (CHAIN, chain("confidence", threshold=0.0, max_tokens=4))
    asked = [Request(str(i), p, 30, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    warm = Sampling(temperature=0.9)
    plain = Engine(tiny_pair, configured(CHAIN, warm), 2).generate(asked)
    for rule in ("ucb", "exp3", "thompson"):
        drafter = BanditSettings(rule=rule, arms=same)
        engine = Engine(tiny_pair, configured(drafter, warm), 2)
        found = engine.generate(asked)
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        assert len({r.arm for g in found for r in g.rounds[1:]}) == 2
    assert np.isfinite(engine.drafter.bandit.losses).all()


def test_a_draft_model_that_is_not_asked_reads_nothing(tiny_pair):
    lookups = (LOOKUP, SUFFIX, CHAIN)
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
    engine.configure(configured(CHAIN))
    assert not draft.lazy


def test_drafters_made_of_others_can_be_arms_and_have_them(tiny_pair):
    inner = BanditSettings(arms=(1, CHAIN, LOOKUP), rule="exp3")
    chain_lookup = {"kind": "hybrid", "lookup": SUFFIX, "otherwise": inner, "min_match": 1}
    extended = {"kind": "hybrid", "otherwise": CHAIN, "extend": True, "min_match": 9}
    drafter = BanditSettings(arms=(inner, extended, chain_lookup, 3))
    engine, generations = decode(tiny_pair, drafter)
    told = [r for g in generations for r in g.rounds[:-1]]
    assert engine.drafter.bandit.rounds == [sum(r.arm == arm for r in told) for arm in range(4)]
    nested = engine.drafter.arms[0]
    assert sum(nested.bandit.rounds) == sum(r.arm == 0 for r in told)
    assert sum(n > 0 for n in nested.bandit.rounds) > 1  # its own choices, not the outer's
