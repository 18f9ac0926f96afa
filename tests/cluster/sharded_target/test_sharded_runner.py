"""A target whose weights are spread over actors decodes as one in this process does."""

import os
import signal
from dataclasses import dataclass
from resource import RLIMIT_AS, prlimit
from threading import Thread

import psutil
import pytest
import torch

from cluster.placement import Placement
from cluster.sharded_target import sharded_runner, target_group
from cluster.sharded_target.sharded_pair import ShardedPair, sharded_pair
from cluster.sharded_target.sharded_runner import ShardedRunner, _Output
from cluster.sharded_target.target_group import ShardLost
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.pearl.asynchronous_draft import serve
from specdec_core.drafting.pearl.link import SocketLink
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair, load_pair
from specdec_core.models.runner import NO_TOKEN, Batch, CacheLost, time_forward
from specdec_core.tokens.statistics import TokenOrigin
from tests.cluster.clusters import process_of
from tests.configurations import LOSSY, PEARL, drafting
from tests.specdec_core.drafting.pearl.in_turns import linked
from tests.specdec_core.kinds import chain, configured

NEW_TOKENS = 24
PROMPTS = [[7 + (3 * i * n) % 300 for i in range(n)] for n in (4, 9, 21)]
REQUESTS = [Request(str(i), tuple(p), NEW_TOKENS, seed=i) for i, p in enumerate(PROMPTS)]
CONFIGURATIONS = {
    "autoregressive": Configuration(),
    "chain": configured(chain("svip", threshold=0.7)),
    "tree": drafting("tree", branching=(3, 2, 1)),
    "target tree": LOSSY,
    "sampled chain": configured(chain(max_tokens=3), Sampling(temperature=0.8, top_k=20)),
}


@dataclass
class Both:
    """One pair with its target on two devices, and with it in this process."""

    split: str
    sharded: ShardedPair
    whole: Pair


@pytest.fixture(scope="module", params=["heads", "layers"])
def both(request, tiny_spec, gpt2_folder, ray_running):
    """A Llama with grouped queries of which each rank has half the heads; a GPT-2 of which one rank
    has one layer, the other two."""
    split = request.param
    spec = tiny_spec.with_runner(pack=False)
    if split == "layers":
        spec = spec.model_copy(update={"target": gpt2_folder})
    placement = Placement.model_validate(
        {"draft": {"devices": 0}, "target": {"devices": 2, "split": split}}
    )
    with sharded_pair(spec, placement) as sharded:
        yield Both(split, sharded, load_pair(spec))


def test_logits_are_those_of_the_whole_model(both):
    """Of ragged rows, of a tree, and of what is kept of it."""
    runners = [pair.open_runner(None, 2) for pair in (both.sharded, both.whole)]
    logits: list[list[torch.Tensor]] = []
    choices: list[list[list[int]]] = []
    for runner in runners:
        runner.prefill([0, 1], [PROMPTS[1], PROMPTS[2]])
        own = [runner.forward(Batch([0, 1], [[5, 6, 7], [8]])).logits]
        own.append(runner.forward(Batch([0], [[9, 10, 11, 12]], [[-1, 0, 0, 1]])).logits)
        runner.keep(0, len(PROMPTS[1]) + 3, [0, 2])
        runner.truncate(1, 5)
        last = runner.forward(Batch([1, 0], [[3, 9, 8], [4]], wanted=[0, 1]))
        logits.append([*own, last.logits])
        choices.append(last.choices())
        assert choices[-1] == [[], last.chosen.tolist()]
    for ours, theirs in zip(*logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert choices[0] == choices[1]
    assert runners[0].lengths == runners[1].lengths
    assert all(runner.mixes for runner in runners)


def assert_as_the_whole(both, runner, prompt, more):
    """Behind `prompt`, which the runner has, the logits of `more` are those of the whole model."""
    whole = both.whole.open_runner(None, 1)
    whole.prefill([0], [prompt])
    ours, theirs = (each.forward(Batch([0], [more])).logits for each in (runner, whole))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_pair_says_where_its_models_are(both):
    assert both.sharded.placement.target.split == both.split
    assert both.whole.placement is None


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_it_decodes_as_the_whole_model(both, name):
    results = []
    for pair in (both.sharded, both.whole):
        generations = Engine(pair, CONFIGURATIONS[name], slots=2).generate(REQUESTS)
        results.append([(g.tokens, [r.accepted for r in g.rounds]) for g in generations])
    assert results[0] == results[1]


@pytest.mark.parametrize("both", ["layers"], indirect=True)
@pytest.mark.parametrize("name", ["chain", "tree", "sampled chain"])
def test_it_decodes_so_where_its_layers_are_pipelined(both, name, monkeypatch):
    monkeypatch.setitem(sharded_runner.PIPELINED_FROM, "CPU", 0)
    sent, ask = [], both.sharded.group.ask
    monkeypatch.setattr(both.sharded.group, "ask", lambda calls: sent.extend(calls) or ask(calls))
    test_it_decodes_as_the_whole_model(both, name)
    fed = [len(arguments[0]) for _, call, arguments in sent if call == "forward"]
    assert 2 in fed


def test_a_draft_beside_it_changes_no_token(both):
    """The draft runs as it would on a device of its own, in a thread."""
    coupled = Sampling(temperature=1.0, coupling="gumbel")
    sampling = Sampling() if both.split == "heads" else coupled
    requests = [Request(r.id, r.tokens, 100, sampling, seed=r.seed) for r in REQUESTS]
    expected = [g.tokens for g in Engine(both.whole, slots=2).generate(requests)]
    link = SocketLink("127.0.0.1")
    draft = Thread(target=serve, args=("127.0.0.1", link.port, link.key, both.whole))
    draft.start()
    try:
        assert link.wait(30)
        engine = Engine(linked(both.sharded, link), PEARL, slots=2)
        origins: set[TokenOrigin] = set()
        while TokenOrigin.DRAFT not in origins:  # it needs a moment to get ready
            found = engine.generate(requests)
            assert [g.tokens for g in found] == expected
            origins = {origin for g in found for origin in g.origins}
    finally:
        link.close()
        draft.join()


def test_what_all_shards_refuse_is_refused(both):
    """As this process would, and the runner goes on as if it had not been asked."""
    runner = both.sharded.open_runner(None, 1)
    runner.prefill([0], [PROMPTS[0]])
    with pytest.raises(ValueError, match="do not fit"):
        runner.forward(Batch([0], [[5] * 500]))
    assert runner.lengths == [len(PROMPTS[0])]
    assert_as_the_whole(both, runner, PROMPTS[0], [5, 6])
    assert both.sharded.group.rebuilt == 0


@pytest.mark.parametrize("both", ["heads"], indirect=True)
def test_a_killed_shard_costs_no_token_and_changes_none(both, monkeypatch):
    """The engine resumes its requests, once: its runners of target and draft lose their rows
    together. Another runner over the same shards starts with empty rows."""
    other = both.sharded.open_runner(None, 1)
    other.prefill([0], [PROMPTS[1]])
    configuration = CONFIGURATIONS["tree"]
    expected = Engine(both.whole, configuration, slots=2).generate(REQUESTS[:2])
    engine, group = Engine(both.sharded, configuration, slots=2), both.sharded.group
    told: dict[str, list[int]] = {request.id: [] for request in REQUESTS[:2]}
    resumed, resume = [], engine._resume
    monkeypatch.setattr(engine, "_resume", lambda: resumed.append(resume()))
    for request in REQUESTS[:2]:
        engine.add(request)
    rounds = 0
    while not engine.idle:
        if rounds == 2:
            os.kill(process_of(group._shards[1]), signal.SIGKILL)
        for chunk in engine.step():
            told[chunk.request_id] += chunk.tokens
        rounds += 1
    assert rounds > 3
    assert group.rebuilt == len(resumed) == 1
    assert list(told.values()) == [generation.tokens for generation in expected]

    with pytest.raises(CacheLost):
        other.forward(Batch([0], [[4]]))
    assert other.lengths == [0]
    other.prefill([0], [PROMPTS[1]])
    assert_as_the_whole(both, other, PROMPTS[1], [4])


@pytest.mark.parametrize("both", ["heads"], indirect=True)
def test_logits_of_a_sequence_are_the_whole_models_also_after_the_loss_of_a_shard(both):
    os.kill(process_of(both.sharded.group._shards[0]), signal.SIGKILL)
    for draft in (None, "draft"):
        ours, theirs = (pair.logits(PROMPTS[2], draft) for pair in (both.sharded, both.whole))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("both", ["heads"], indirect=True)
def test_a_group_that_did_not_start_again_is_lost_and_may_start_later(both, monkeypatch):
    """Whoever asks it meanwhile does not wait for shards that are not there."""
    group = both.sharded.group
    with monkeypatch.context() as patched:
        patched.setattr(target_group, "START_LIMIT", 0)
        with pytest.raises(UserError, match="did not start within 0 s"):
            group.rebuild()
    with pytest.raises(ShardLost):
        group.ask([])
    expected, found = (Engine(pair).generate(REQUESTS[:1]) for pair in (both.whole, both.sharded))
    assert found[0].tokens == expected[0].tokens


@pytest.mark.parametrize("both", ["layers"], indirect=True)
def test_a_shard_that_fails_alone_is_heard(both):
    """One that answers nothing else, while the other waits for what it will never send."""
    pid = process_of(both.sharded.group._shards[0])
    room = psutil.Process(pid).memory_info().vms + (64 << 20)
    prlimit(pid, RLIMIT_AS, (room, room))
    runner = both.sharded.open_runner(None, 10_000)  # caches of a gigabyte
    with pytest.raises(UserError, match=r"a cache of 10000 rows of .* tokens does not fit on cpu"):
        runner.forward(Batch([0], [[5]]))


@pytest.mark.parametrize("both", ["heads"], indirect=True)
def test_logits_are_fetched_where_they_are_looked_at_and_come_along_from_then_on(both, monkeypatch):
    fetched = []
    fetch = ShardedRunner._fetch_logits

    def of_target():
        return [runner for runner in fetched if runner._opening[2] is None]

    monkeypatch.setattr(
        ShardedRunner,
        "_fetch_logits",
        lambda runner, *of: fetched.append(runner) or fetch(runner, *of),
    )
    for fixed in (chain(), {"kind": "cascade", "policy": {"kind": "fixed"}}):
        Engine(both.sharded, configured(fixed), slots=2).generate(REQUESTS)
    assert not fetched, "a fixed length looks at none of the draft's"
    Engine(both.sharded, CONFIGURATIONS["chain"], slots=2).generate(REQUESTS)
    assert not of_target(), "greedy decoding looks at none of the target's"
    Engine(both.sharded, CONFIGURATIONS["sampled chain"], slots=2).generate(REQUESTS)
    assert len(of_target()) == 1
    runner = both.sharded.open_runner(None, 1)
    earlier = runner.forward(Batch([0], [[5]]))
    runner.forward(Batch([0], [[6]]))
    with pytest.raises(RuntimeError, match="of an earlier forward"):
        _ = earlier.logits


@pytest.mark.parametrize("both", ["heads"], indirect=True)
def test_a_forward_is_timed_without_its_logits(both, monkeypatch):
    runner = both.sharded.open_runner(None, 2)
    monkeypatch.setattr(runner, "_fetch_logits", lambda _: pytest.fail("logits are sent"))
    assert time_forward(runner, 3, 2) > 0
    assert runner.lengths == [0, 0]


def test_a_row_without_a_choice_has_a_token_that_the_model_has():
    output = _Output([2], [NO_TOKEN, 3], lambda: torch.zeros(2, 9), None)
    assert output.choices() == [[NO_TOKEN, 3]]
    assert output.chosen.tolist() == [0, 3]
