"""PEARL writes what the target alone would write, whichever process is early or late, and though
drafts die."""

import itertools
from dataclasses import replace

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.drafter import Outcome, Resources
from specdec_core.drafting.pearl.asynchronous_draft import AsynchronousDraft
from specdec_core.drafting.pearl.drafter import PearlDrafter
from specdec_core.drafting.pearl.messages import Begin, Compiling, Configured, Drafted, End, Pause
from specdec_core.drafting.pearl.settings import PearlSettings
from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import RemoteDistribution
from tests.specdec_core.drafting.pearl.in_turns import InTurns, linked
from tests.specdec_core.drafting.proofs import sequence
from tests.specdec_core.fits import p_value
from tests.specdec_core.kinds import chain, configured
from tests.specdec_core.tokens.test_lossless import counted, joint, toy_pair

__all__ = ["toy_pair"]  # a fixture

LOOKUPS = [
    {"kind": "prompt_lookup", "max_tokens": 4},
    {"kind": "suffix", "tree": True, "memory": "all"},
    {"kind": "token_cache", "from_prompt": True},
]
# Of a prompt of few tokens, too, there is something to guess by.
SHORT = {"kind": "token_cache", "phrases": 2, "phrase_length": 1, "from_prompt": True}


def pearl(**settings):
    # The models here are unsure of everything: look behind whatever the target may say.
    settings = {"width": 4, "least": 0, **settings}
    return configured({"kind": "pearl", **settings})


def cascade(proposer=LOOKUPS[0], **settings):
    return {"kind": "cascade", "proposer": proposer, **settings}


def requests(pair, count=4, new_tokens=40, **more):
    texts = [
        "def main():",
        "class Draft:\n    pass",
        "import tokenizers",
        "tiny pair in the target",
    ]
    tokens = [tuple(pair.tokenizer(text)["input_ids"]) for text in texts[:count]]
    return [Request(str(n), own, new_tokens + n, **more) for n, own in enumerate(tokens)]


def sped_up(proposer, width):
    policy = {"kind": "confidence", "threshold": 0.1, "max_tokens": 6}
    return pearl(drafter=cascade(proposer, policy=policy), window=5, width=width)


def wholes(window, **more):
    """Drafters that PEARL is a part of."""
    part = {"kind": "pearl", "window": window, "width": 2, "least": 0, **more}
    lookup = {"kind": "suffix", "max_tokens": 2}
    cache = {"kind": "token_cache", "phrases": 1, "phrase_length": 2}
    return [
        {"kind": "hybrid", "lookup": lookup, "otherwise": part},
        {"kind": "hybrid", "lookup": cache, "otherwise": part, "merge": True, "extend": True},
        {"kind": "bandit", "arms": [lookup, part, {"kind": "draft_model"}]},
    ]


SVIP = chain("svip", threshold=0.9, max_tokens=8)
ELSE, MERGED, BANDIT = map(configured, wholes(5))
# Of each the configuration, a temperature, slots, and the chance that the draft dies. Sampling is
# coupled, so that a seed has one output whatever is drafted.
WRITE: dict[str, tuple[Configuration, float, int, float]] = {
    "without waiting": (pearl(drafter=chain(max_tokens=4), window=5, wait=0, width=1), 0, 1, 0),
    "waiting for three": (pearl(drafter=SVIP, window=5, wait=3), 0, 3, 0),
    "waiting as long as it pays": (pearl(drafter=chain("heuristic"), window=5), 0, 3, 0),
    "prompt lookup": (sped_up(LOOKUPS[0], 1), 0, 1, 0.01),
    "suffix": (sped_up(LOOKUPS[1], 3), 1, 3, 0.01),
    "token cache": (sped_up(LOOKUPS[2], 3), 0, 3, 0.01),
    "else": (ELSE, 0, 1, 0.01),
    "merge": (MERGED, 1, 3, 0.01),
    "bandit": (BANDIT, 0, 3, 0.01),
    "dying": (pearl(window=5), 0, 2, 0.05),
    "dying, coupled": (pearl(window=5), 1, 2, 0.05),
}


@pytest.mark.parametrize("name", WRITE)
def test_output_is_the_targets_own(tiny_pair, name):
    """However long it waits, whichever drafter proposes beside it, and though drafts die."""
    configuration, temperature, slots, dies = WRITE[name]
    assert configuration.asynchronous
    sampling = Sampling(temperature=temperature, coupling="gumbel")
    asked = requests(tiny_pair, sampling=sampling, seed=3)
    expected = Engine(tiny_pair).generate(asked)
    link = InTurns(tiny_pair, 0, dies)
    found = Engine(linked(tiny_pair, link), configuration, slots).generate(asked)
    assert [(g.tokens, g.text) for g in found] == [(g.tokens, g.text) for g in expected]
    assert link.deaths > 2 or not name.startswith("dying")
    rounds = [r for g in found for r in g.rounds]
    accepted = {origin for g in found for origin in g.origins}
    assert TokenOrigin.DRAFT in accepted
    if "waiting" in name:
        assert sum(r.accepted for r in rounds) > 20
        # Somewhere a candidate was judged that came while the target was busy: a whole round of
        # the draft's tokens, with none of the target's.
        assert any(r.generated and r.generated == r.accepted == r.drafted for r in rounds)
    if configuration.drafter.kind == "pearl" and configuration.drafter.drafter.kind == "cascade":
        assert sum(r.draft_tokens for r in rounds) > sum(r.draft_forwards for r in rounds)
    if name == "merge":  # a late candidate is judged of a whole with PEARL, too
        assert any(r.generated == r.accepted > 0 for r in rounds)
    if name in ("else", "bandit"):
        assert accepted & {TokenOrigin.LOOKUP, TokenOrigin.CACHE}


def test_a_bandit_is_rewarded_with_the_tokens_that_its_rounds_added(tiny_pair):
    """Also in rounds that accept a late candidate, where the target adds no token."""
    part = {"kind": "pearl", "window": 3, "wait": 2}
    arms = [part, {"kind": "draft_model"}, {"kind": "suffix"}]
    configuration = Configuration.model_validate({"drafter": {"kind": "bandit", "arms": arms}})
    late = 0
    for seed, temperature in enumerate((0.0, 1.0)):
        engine = Engine(linked(tiny_pair, InTurns(tiny_pair, seed)), configuration, 2)
        sampling = Sampling(temperature=temperature)
        found = engine.generate(requests(tiny_pair, sampling=sampling, ignore_eos=True))
        # A request's first round has no candidates; its last is cut by the end of the text.
        told = [r for g in found for r in g.rounds[1:-1]]
        bandit = engine.drafter.bandit
        assert sum(bandit.tokens) == sum(r.generated for r in told)
        for arm in range(len(arms)):
            assert bandit.tokens[arm] == sum(r.generated for r in told if r.arm == arm)
        late += sum(r.generated == r.accepted for r in told)
    assert late > 2


class Scripted:
    """A link to a draft; the test gives its messages."""

    number, connected, configured = 1, True, None

    def __init__(self):
        self.heard: list = []
        self.to_say: list = [Configured(1024)]
        self.timeouts: list[float] = []

    def send(self, message):
        self.heard.append(message)

    def receive(self, timeout=0.0):
        self.timeouts.append(timeout)
        said, self.to_say = self.to_say, []
        return said


def scripted():
    """A drafter with one open sequence, its link, and the number of the sequence's root."""
    link = Scripted()
    resources = Resources(None, None, 100, frozenset(), open_link=lambda: link)
    drafter = PearlDrafter(PearlSettings(window=2, wait=2), resources)
    own = sequence([5, 6], room=20)
    drafter.open([own])
    [root] = [message.root for message in link.heard if isinstance(message, Begin)]
    return drafter, own, link, root


def test_the_target_waits_for_no_candidate_after_a_pause_though_some_before_it_were_judged():
    drafter, own, link, root = scripted()
    numbers = [root, 1, 2, 3, 4]
    chain = [(n, before, 10 + n, True, None) for before, n in itertools.pairwise(numbers)]
    link.to_say += [Drafted(0, chain, 4, 4, 0.0, 0.001), Pause(0, 4)]
    [tree] = drafter.propose([own])
    drafter.arrived([own], [tree])
    assert tree.tokens == [11, 12, 13]
    own.tokens += tree.tokens
    drafter.observe(own, Outcome(tree, [0, 1, 2], tree.tokens, 0.0))
    link.timeouts.clear()
    [tree] = drafter.propose([own])
    assert tree.tokens == [14]
    assert not any(link.timeouts)


def test_the_target_does_not_wait_for_a_slot_whose_grammar_is_compiled():
    drafter, own, link, root = scripted()
    link.to_say.append(Compiling(0, root))
    drafter.propose([own])
    assert not any(link.timeouts)
    link.to_say.append(Drafted(0, [(1, root, 11, True, None)], 1, 1, 0.0, 0.001))
    [tree] = drafter.propose([own])
    assert tree.tokens == [11]


def samples(link, sampling, count, whole=None, **settings):
    configuration = configured(whole) if whole else pearl(**{"window": 2, **settings})
    configuration = configuration.model_copy(update={"sampling": sampling})
    engine = Engine(linked(link.pair, link), configuration, slots=48)
    return counted(engine, count)


@pytest.mark.parametrize(
    ("sampling", "dies"),
    [
        (Sampling(temperature=0.9, top_k=4), 0.0),
        pytest.param(Sampling(temperature=1.0), 0.02, marks=pytest.mark.long),
    ],
    ids=["top-k", "dying"],
)
def test_samples_have_the_targets_joint_distribution(toy_pair, sampling, dies):
    link = InTurns(toy_pair, 0, dies)
    counts = samples(link, sampling, 2_500)
    assert p_value(counts, joint(toy_pair, sampling)) > 1e-3
    assert bool(link.deaths) == bool(dies)


@pytest.mark.parametrize(
    "whole",
    [
        {"kind": "pearl", "window": 3, "wait": 1, "drafter": cascade(SHORT)},
        pytest.param(wholes(2, wait=1)[1], marks=pytest.mark.long),
    ],
    ids=["cascade", "merge"],
)
def test_samples_have_it_where_lookups_take_part(toy_pair, whole):
    sampling = Sampling(temperature=0.8)
    counts = samples(InTurns(toy_pair, 0), sampling, 2_000, whole)
    assert p_value(counts, joint(toy_pair, sampling)) > 1e-3


def test_the_test_notices_guesses_that_were_not_drawn(toy_pair, monkeypatch):
    def wrong(self, places, at, likely):
        drawn = rightly(self, places, at, likely)
        for n, (_, node) in enumerate(places):
            if guesses := node.guesses:
                drawn[n] = guesses[0].token, float(at.probs[n, guesses[0].token])
        return drawn

    rightly = AsynchronousDraft._draw
    monkeypatch.setattr(AsynchronousDraft, "_draw", wrong)
    sampling = Sampling(temperature=0.8)
    whole = {"kind": "pearl", "window": 3, "wait": 1, "drafter": cascade(SHORT)}
    counts = samples(InTurns(toy_pair, 0), sampling, 2_000, whole)
    assert p_value(counts, joint(toy_pair, sampling)) < 1e-9


@pytest.mark.parametrize(
    ("bug", "count"), [("certain", 2_000), pytest.param("late", 4_000, marks=pytest.mark.long)]
)
def test_the_test_notices_wrong_probabilities(toy_pair, monkeypatch, bug, count):
    def wrong(self, tree, *others):
        before, sources = len(tree), tree.draft_probs
        rightly(self, tree, *others)
        if bug == "certain" or tree.fed is not None:
            sources[before:] = [
                RemoteDistribution(0.5 * source.probability, source.fetch)
                for source in sources[before:]
            ]

    rightly = PearlDrafter._extend
    monkeypatch.setattr(PearlDrafter, "_extend", wrong)
    sampling = Sampling(temperature=1.0)
    counts = samples(InTurns(toy_pair, 0), sampling, count, window=1, wait=1)
    assert p_value(counts, joint(toy_pair, sampling)) < 1e-9


def test_no_late_candidate_is_more_than_a_request_speculates(tiny_pair):
    engine = Engine(linked(tiny_pair, InTurns(tiny_pair, 0)), pearl(drafter=chain(), window=5))
    asked = [replace(request, speculate=1) for request in requests(tiny_pair)]
    rounds = [r for g in engine.generate(asked) for r in g.rounds]
    assert max(r.depth for r in rounds) == 1


def test_a_kept_drafter_keeps_what_the_draft_has_learned(tiny_pair, monkeypatch):
    link = InTurns(tiny_pair, 0)
    configuration = pearl(drafter=chain("heuristic", transient=False))
    engine = Engine(linked(tiny_pair, link), configuration)
    kept, seen = engine.drafter, []
    engine.generate(requests(tiny_pair)[:1])
    monkeypatch.setattr(link.draft, "_configure", seen.append)
    engine.configure(configuration, kept)
    engine.generate(requests(tiny_pair)[1:2])
    assert not seen


def test_what_the_draft_does_not_have_is_said_by_name_and_costs_no_token(tiny_pair):
    drafter = chain("specdecpp", head="nowhere")
    engine = Engine(linked(tiny_pair, InTurns(tiny_pair, 0)), pearl(drafter=drafter))
    with pytest.raises(UserError, match="nowhere"):
        engine.drafter.prepare(60)
    expected = Engine(tiny_pair).generate(requests(tiny_pair))
    assert [g.tokens for g in engine.generate(requests(tiny_pair))] == [g.tokens for g in expected]


def test_the_draft_forgets_a_cancelled_request(tiny_pair, monkeypatch):
    link = InTurns(tiny_pair, 0)
    configuration = pearl(drafter=chain(max_tokens=6))
    engine = Engine(linked(tiny_pair, link), configuration, slots=2)
    for request in requests(tiny_pair, 2):
        engine.add(request)
    engine.step()
    engine.cancel("0")
    while any(isinstance(message, End) for message in link.to_draft):
        engine.step()
    slots, limit = set(), link.draft._windows._policy.limit

    def noted(slot):
        slots.add(slot)
        return limit(slot)

    monkeypatch.setattr(link.draft._windows._policy, "limit", noted)
    while not engine.idle:
        engine.step()
    assert slots == {1}


def test_without_a_device_for_the_draft_there_is_no_pearl(tiny_pair):
    with pytest.raises(UserError, match="--cluster"):
        Engine(tiny_pair, pearl())
