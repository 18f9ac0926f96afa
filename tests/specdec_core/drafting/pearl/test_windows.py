"""PEARL's windows, and how long it waits for candidates."""

from dataclasses import dataclass, field
from functools import partial

import pytest

from specdec_core.config import Configuration, PairSpec, RunnerSettings, Sampling, kinds
from specdec_core.drafting.draft_model.drafter import DraftModelDrafter
from specdec_core.drafting.draft_model.settings import CascadeSettings, DraftModelSettings
from specdec_core.drafting.drafter import Resources, SlotState
from specdec_core.drafting.heads.storage import load_pair_head
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.pearl.pace import DraftPace
from specdec_core.drafting.pearl.settings import PearlSettings
from specdec_core.drafting.policies.heads import DecisionSettings
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import load_pair
from specdec_core.prompts.prompt_sets import load_prompts
from specdec_core.tokens.sampling import RandomStream
from specdec_core.tokens.statistics import Generation, TokenOrigin
from tests.specdec_core.drafting.pearl.in_turns import InTurns, linked
from tests.specdec_core.kinds import policy

HEADS = {"specdecpp": "bundled:small-specdecpp-d3-w1", "decision": "bundled:small-joint"}
COUPLED = Sampling(temperature=1.0, coupling="gumbel")


# Nothing that decodes can follow the oracle.
POLICIES = [
    policy(kind, **({"head": HEADS[kind]} if kind in HEADS else {}))
    for kind in kinds.POLICIES
    if kind != "oracle"
]
LEARNING = [p for p in POLICIES if p.kind in ("break_even", "pre_cut")]
POLICIES.append(DecisionSettings(head=HEADS["decision"], threshold=0.3, cumulative=True))


@dataclass
class Window:
    """What a policy was asked and told of a round."""

    text: list[int]  # before it
    limit: int
    tokens: list[int] = field(default_factory=list)  # that the policy has seen
    going: bool = True  # by the policy's last answer
    outcome: PolicyOutcome | None = None

    @property
    def drafted(self) -> int:
        return len(self.tokens) if self.outcome is None else self.outcome.drafted

    @property
    def stopped(self) -> bool:
        """By the policy, at its limit or at the text's end; else its verdict came before that."""
        return not self.going or self.drafted >= max(self.limit, len(self.tokens) + 1)


class Watched:
    """A policy that checks the order of its calls."""

    def __init__(self, policy, link):
        self.policy, self.link = policy, link
        self.windows: list[Window | None] = []  # None where a request begins
        self.open: dict[int, Window] = {}

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def limit(self, slot):
        assert slot not in self.open, "asked for another limit before the verdict"
        limit = self.policy.limit(slot)
        text = self.link.draft._slots[slot].state.tokens
        self.open[slot] = Window(list(text), limit)
        self.windows.append(self.open[slot])
        return limit

    def go_on(self, signals):
        answers = self.policy.go_on(signals)
        asked = zip(signals.slots, signals.tokens, signals.positions, answers, strict=True)
        for slot, token, position, going in asked:
            window = self.open[slot]
            assert window.going, "asked again after it has stopped"
            assert position == len(window.tokens) + 1
            assert position <= window.limit or self.policy.learns
            window.tokens.append(token)
            window.going = going
        return answers

    def observe(self, slot, outcome):
        window = self.open.pop(slot)
        window.outcome = outcome
        # A policy that does not learn is not asked about the last possible candidate.
        unseen = outcome.drafted - len(window.tokens)
        assert unseen == 0 or (unseen == 1 and not self.policy.learns and window.going)
        assert 0 <= outcome.accepted <= outcome.drafted
        assert 1 <= outcome.draft_calls <= outcome.drafted
        self.policy.observe(slot, outcome)

    def reset(self, slot):
        self.open.pop(slot, None)
        self.windows.append(None)
        self.policy.reset(slot)


class Drafting:
    """The bundled pair in float32, and what its target writes alone."""

    def __init__(self):
        settings = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=512)
        self.pair = load_pair(PairSpec(drafts={"small": "bundled:draft-small"}, runner=settings))
        prompts = load_prompts("bundled:held_out", 2, self.pair.tokenizer)
        self.prompts = [tuple(self.pair.tokenizer(p.text)["input_ids"])[-40:] for p in prompts]
        self._alone: dict[Sampling, list[Generation]] = {}

    def requests(self, sampling):
        return [
            Request(str(n), prompt, 40 + n, sampling, seed=n)
            for n, prompt in enumerate(self.prompts)
        ]

    def alone(self, sampling):
        if sampling not in self._alone:
            self._alone[sampling] = Engine(self.pair, slots=2).generate(self.requests(sampling))
        return self._alone[sampling]

    def asynchronously(self, drafter, sampling, slots, patch):
        """What an asynchronous draft's target writes, and what the policy was asked."""
        link, watched, rightly = InTurns(self.pair, 0), [], Resources.policy

        def policy(resources, draft, settings):
            watched.append(Watched(rightly(resources, draft, settings), link))
            return watched[0]

        with patch.context() as own:
            own.setattr(Resources, "policy", policy)
            engine = Engine(linked(self.pair, link), Configuration(drafter=drafter), slots)
            found = engine.generate(self.requests(sampling))
        return watched[0], found


@pytest.fixture(scope="module")
def drafting():
    return Drafting()


def plain(policy):
    return DraftModelSettings(policy=policy)


def sped_up(policy):
    return CascadeSettings(proposer=PromptLookupSettings(max_tokens=5), policy=policy)


# Every policy in one way, and each way.
WINDOWS = [
    *((policy, plain, 1, Sampling()) for policy in POLICIES),
    (LEARNING[0], plain, 3, COUPLED),
    (POLICIES[0], sped_up, 1, Sampling()),
    (LEARNING[-1], sped_up, 1, Sampling()),
]


@pytest.mark.parametrize(
    ("policy", "drafter", "width", "sampling"),
    WINDOWS,
    ids=[f"{policy.kind} {n}" for n, (policy, *_) in enumerate(WINDOWS)],
)
def test_a_window_stops_where_a_chain_of_one_process_would(
    drafting, policy, drafter, width, sampling, monkeypatch
):
    """Given the same text and, of earlier rounds, the same outcomes; and no token is another."""
    pearl = PearlSettings(drafter=drafter(policy), window=6, wait=3, width=width, least=0.0)
    watched, found = drafting.asynchronously(pearl, sampling, 1, monkeypatch)
    assert [g.tokens for g in found] == [g.tokens for g in drafting.alone(sampling)]
    pair = drafting.pair
    runner = pair.open_runner("small", 1)
    sizes = runner.vocab_size, pair.eos_token_ids
    resources = Resources(lambda name: runner, partial(load_pair_head, pair), *sizes)
    chain = DraftModelDrafter(plain(policy), resources)
    request, outcomes = -1, []
    for window in watched.windows:
        if window is None:
            request += 1
            chain.policy.reset(0)
            continue
        runner.truncate(0, 0)
        # A verdict that came before the policy has stopped leaves it no room for more.
        room = 99 if window.stopped else max(window.drafted, 1)
        stream = RandomStream(request, runner.vocab_size)
        [tree] = chain.propose([SlotState(0, window.text, sampling, stream, room)])
        assert tree.tokens[: len(window.tokens)] == window.tokens
        if (told := window.outcome) is None:
            continue
        assert len(tree) == told.drafted
        assert told.draft_calls == told.drafted or drafter is sped_up
        written = [*drafting.prompts[request], *found[request].tokens][len(window.text) :]
        agreed = [own == said for own, said in zip(tree.tokens, written, strict=False)]
        assert told.accepted == [*agreed, False].index(False)
        chain.policy.observe(0, told)
        outcomes.append(told)
    assert request == len(found) - 1
    assert any(told.accepted < told.drafted for told in outcomes)
    assert max(told.drafted for told in outcomes) > 2
    assert len({told.accepted for told in outcomes}) > 2


@pytest.mark.parametrize("policy", [POLICIES[0], LEARNING[0]], ids=lambda own: own.kind)
def test_requests_of_a_batch_have_windows_of_their_own(drafting, policy, monkeypatch):
    pearl = PearlSettings(drafter=sped_up(policy), window=5, wait=2, width=2)
    watched, found = drafting.asynchronously(pearl, Sampling(temperature=0.8), 2, monkeypatch)
    assert all(g.tokens for g in found)
    told = [window.outcome for window in watched.windows if window and window.outcome]
    assert sum(outcome.accepted for outcome in told) > 8


@pytest.mark.parametrize("policy", LEARNING, ids=lambda own: own.kind)
def test_rounds_that_others_propose_for_judge_windows_too(drafting, policy, monkeypatch):
    pearl = PearlSettings(drafter=plain(policy), window=5, wait=2)
    hybrid = HybridSettings(lookup=SuffixSettings(), otherwise=pearl, min_match=1)
    watched, found = drafting.asynchronously(hybrid, Sampling(), 1, monkeypatch)
    assert [g.tokens for g in found] == [g.tokens for g in drafting.alone(Sampling())]
    assert any(TokenOrigin.LOOKUP in g.origins for g in found)
    request = -1
    for window in watched.windows:
        if window is None:
            request += 1
        elif told := window.outcome:
            written = [*drafting.prompts[request], *found[request].tokens][len(window.text) :]
            agreed = [own == said for own, said in zip(window.tokens, written, strict=False)]
            assert told.accepted == [*agreed, False].index(False)


def pace(t_draft, t_target, acceptance, t_notice=0.0):
    found = DraftPace(12)
    found.t_draft.add(t_draft)
    found.t_target.add(t_target)
    found.waited(0, t_notice)
    found.acceptance.value = acceptance
    return found


def test_one_waits_for_cheap_candidates_that_are_likely_accepted():
    assert pace(0.1, 4.0, 0.8).wait() > pace(0.5, 4.0, 0.8).wait() > 0
    assert pace(0.5, 4.0, 0.02).wait() == 0
    assert pace(3.0, 4.0, 0.8).wait() == 0
    assert pace(0.5, 4.0, 0.8, t_notice=8.0).wait() == 0
    assert DraftPace(12).wait() == 12  # nothing was seen yet


def test_rates_are_those_of_the_rounds_written_out():
    # A draft as slow as the target: one candidate comes during a round. Without waiting a round
    # after a rejection feeds none and adds 1 token; any other round feeds one and adds 1 + α.
    alpha = 0.5
    behind = (1 - alpha**2) / (1 - alpha**2 + alpha)
    expected = (behind * 1 + (1 - behind) * (1 + alpha)) / 2.0
    assert pace(2.0, 2.0, alpha).rate(0) == pytest.approx(expected)


def test_acceptance_and_times_are_what_was_seen():
    found = DraftPace(12)
    for _ in range(2000):
        found.judged(3, rejected=True)
        found.t_draft.add(0.25)
        found.t_target.add(4.0)
        found.waited(2, 1.5)
    assert found.acceptance.value == pytest.approx(0.75, abs=0.02)
    times = [mean.value for mean in (found.t_draft, found.t_target, found.t_notice)]
    assert times == pytest.approx([0.25, 4.0, 1.0])
