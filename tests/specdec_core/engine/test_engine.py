"""What the engine promises about a request: its end, its text, its randomness, its accounts."""

import itertools

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import check_pair, load_pair
from specdec_core.models.runner import CacheLost
from specdec_core.tokens.statistics import TokenOrigin
from tests.configurations import FOUR
from tests.specdec_core.kinds import configured

SAMPLED = FOUR.model_copy(update={"sampling": Sampling(temperature=0.9)})
PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 9, 17, 30, 1)]


def requests(new_tokens=24, **options):
    return [Request(str(i), p, new_tokens, seed=i, **options) for i, p in enumerate(PROMPTS)]


def losing(engine, lost):
    """The engine; its target's n-th forward loses all rows where `lost(n)`."""
    target, numbers = engine.target, itertools.count()
    forward = target.forward

    def step(batch):
        if not lost(next(numbers)):
            return forward(batch)
        for slot in range(engine.slots):
            target.truncate(slot, 0)
        raise CacheLost("a test")

    target.forward = step
    return engine


def test_lost_rows_cost_no_token(tiny_pair):
    expected = Engine(tiny_pair, FOUR, 2).generate(requests())
    engine = losing(Engine(tiny_pair, FOUR, 2), lambda n: n in (0, 3, 4, 9))
    assert [g.tokens for g in engine.generate(requests())] == [g.tokens for g in expected]


def test_a_target_that_loses_its_rows_at_every_step_is_given_up(tiny_pair):
    engine = losing(Engine(tiny_pair, FOUR, 2), lambda n: True)
    with pytest.raises(CacheLost):
        engine.generate(requests())
    assert engine.idle


def test_requests_beside_one_that_is_refused_are_dropped(tiny_pair):
    engine = Engine(tiny_pair, FOUR, 2)
    with pytest.raises(UserError, match="the context holds 256"):
        engine.generate([*requests(), Request("long", (5,) * 300, 8)])
    assert engine.idle
    expected = Engine(tiny_pair, FOUR, 2).generate(requests())
    assert [g.tokens for g in engine.generate(requests())] == [g.tokens for g in expected]


def test_long_prompts_do_not_hold_up_those_that_are_answered(tiny_pair):
    sizes = (20, 220, 200, 30, 230)
    asked = [
        Request(str(i), tuple(range(5, 5 + size)), 12, seed=i, ignore_eos=True)
        for i, size in enumerate(sizes)
    ]
    expected = [Engine(tiny_pair, FOUR).generate([request])[0].tokens for request in asked]
    engine = Engine(tiny_pair, FOUR, limits=Limits(5, step_tokens=64))
    engine.add(asked[0])
    engine.step()
    for request in asked[1:]:
        engine.add(request)
    answered: dict[str, list[int]] = {}
    steps = []
    while not engine.idle:
        chunks = engine.step()
        steps.append({chunk.request_id for chunk in chunks})
        answered |= {c.request_id: c.finished.tokens for c in chunks if c.finished}
        read = sum(engine.last.reading.values())
        assert read <= 64
        if "0" not in answered:
            assert "0" in steps[-1], "a round without it"
    assert steps[0] <= {"0", "3"}, "all prompts were read in one step"
    first = {name: next(n for n, step in enumerate(steps) if name in step) for name in "1234"}
    assert first["3"] < min(first["1"], first["2"], first["4"]), "the short prompt waits"
    assert [answered[request.id] for request in asked] == expected


def test_a_request_that_can_never_fit_in_the_cache_is_refused(tiny_pair):
    engine = Engine(tiny_pair, FOUR, limits=Limits(2, cache_tokens=192))
    with pytest.raises(UserError, match="the context holds 128"):
        engine.add(Request("r", tuple(range(5, 105)), 40))
    engine.add(Request("r", tuple(range(5, 105)), 20))
    with pytest.raises(ValueError, match="unfinished"):
        engine.add(Request("r", (5,), 2))


def test_the_cache_has_room_for_all_that_a_round_verifies(tiny_pair):
    wide = configured({"kind": "prompt_lookup", "max_tokens": 128})
    limits, held = Limits(3, cache_tokens=512), []
    engine = Engine(tiny_pair, limits=limits)
    assert engine.max_length == min(tiny_pair.max_length, 512 - 64)
    forward = engine.target.forward

    def counted(batch):
        new = dict(zip(batch.rows, map(len, batch.tokens), strict=True))
        running = {request.slot for request in engine.scheduler.running.values()}
        held.append(sum(engine.target.lengths[row] + new.get(row, 0) for row in running))
        return forward(batch)

    engine.target.forward = counted
    repeating = [Request(str(n), tuple(range(5, 45)) * 2, 170, ignore_eos=True) for n in range(3)]
    expected = engine.generate(repeating)
    engine.configure(wide)
    assert engine.max_length == min(tiny_pair.max_length, 512 - 128)
    held.clear()
    assert [g.tokens for g in engine.generate(repeating)] == [g.tokens for g in expected]
    assert engine.scheduler.preemptions
    assert max(held) <= 512, "candidates pass the limit"


def test_a_stop_string_cuts_text_and_tokens_alike_in_every_configuration(tiny_pair):
    whole = Engine(tiny_pair).generate(requests(ignore_eos=True))[1]
    stop = whole.text[6:9]
    outcomes = [
        Engine(tiny_pair, configuration).generate(
            [Request("r", PROMPTS[1], 24, stop=(stop,), ignore_eos=True)]
        )[0]
        for configuration in (AUTOREGRESSIVE, FOUR)
    ]
    for generation in outcomes:
        assert generation.text == whole.text[: whole.text.index(stop)]
        assert generation.finish_reason == "stop"
        assert len(generation.tokens) == len(generation.origins)
    assert outcomes[0].tokens == outcomes[1].tokens


def test_streamed_text_is_the_text(tiny_pair):
    engine = Engine(tiny_pair, SAMPLED)
    request = Request("r", PROMPTS[2], 40, seed=3)
    chunks = list(engine.stream(request))
    finished = chunks[-1].finished
    assert "".join(chunk.text for chunk in chunks) == finished.text
    assert [t for chunk in chunks for t in chunk.tokens] == finished.tokens
    [at_the_end] = engine.generate([request])
    assert at_the_end.tokens == finished.tokens
    assert at_the_end.text == finished.text


def test_text_can_wait_for_the_last_chunk(tiny_pair):
    engine = Engine(tiny_pair, FOUR)
    engine.add(Request("r", PROMPTS[0], 24, ignore_eos=True))
    chunks = engine.step(texts=False)
    late = engine.step(texts=True)[0].text  # a console opens after all
    while not chunks[-1].finished:
        chunks += engine.step(texts=False)
    assert late
    assert all(not chunk.text for chunk in chunks[:-1])
    assert late + chunks[-1].text == chunks[-1].finished.text


def test_requests_join_and_leave_between_rounds(tiny_pair):
    expected = {g.request_id: g.tokens for g in Engine(tiny_pair, FOUR).generate(requests())}
    engine = Engine(tiny_pair, FOUR, 2)
    waiting, done = requests(), {}
    waiting.append(Request("cancelled", PROMPTS[0], 24))
    while waiting or not engine.idle:
        if waiting:
            engine.add(waiting.pop())
        done |= {c.request_id: c.finished.tokens for c in engine.step() if c.finished}
        engine.cancel("cancelled")
    assert done == expected


def test_the_drafter_closes_every_slot_that_it_opened(tiny_pair):
    engine, slots = Engine(tiny_pair, FOUR, 2), []
    opened, closed = engine.drafter.open, engine.drafter.close
    engine.drafter.open = lambda own: (slots.extend(s.slot for s in own), opened(own))
    engine.drafter.close = lambda own: (slots.remove(own.slot), closed(own))
    for request in requests()[:4]:
        engine.add(request)
    engine.step()
    assert slots == [0, 1]
    for name in ("1", "1", "3", "unknown"):  # active, gone, waiting
        engine.cancel(name)
    assert slots == [0]
    engine.step()
    assert slots == [0, 1]
    while not engine.idle:
        engine.step()
    assert slots == []


def test_every_token_carries_its_origin(tiny_pair):
    for configuration, drafted in (
        (AUTOREGRESSIVE, None),
        (FOUR, TokenOrigin.DRAFT),
        (configured({"kind": "prompt_lookup"}), TokenOrigin.LOOKUP),
    ):
        for generation in Engine(tiny_pair, configuration, 2).generate(requests()):
            assert len(generation.origins) == len(generation.tokens)
            start = 0
            for r in generation.rounds:
                assert r.position == start
                own = generation.origins[start : start + r.generated]
                assert own[: r.accepted] == [drafted] * r.accepted
                expected = TokenOrigin.CORRECTION if r.accepted < r.drafted else TokenOrigin.BONUS
                assert own[r.accepted :] == [expected]
                start += r.generated
            assert start == len(generation.tokens)


def test_a_pair_with_different_vocabularies_is_refused_before_loading(tiny_spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    pair = load_pair(tiny_spec)
    pair.tokenizer.add_tokens(["extra"])
    pair.tokenizer.save_pretrained(folder)
    pair.target.config.save_pretrained(folder)  # no weights there: loading them would fail
    spec = tiny_spec.model_copy(update={"drafts": {"other": str(folder)}})
    with pytest.raises(UserError, match=r"different vocabularies .*'extra'") as error:
        check_pair(spec)
    assert "\n" not in str(error.value)


def test_a_name_that_is_no_folder_may_be_a_hub_id(tiny_spec, monkeypatch):
    # Without a network the hub is tried again for 20 seconds.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^nofolder: no such folder, and as a hub id: "):
        check_pair(tiny_spec.model_copy(update={"target": "nofolder"}))
