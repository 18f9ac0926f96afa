"""A recording of conversations is what a sweep of them replays, and of no other rendering."""

import json

import pytest

from cluster.recording import RecordingWorker, run_recording
from cluster.sweep.run import run_sweep
from specdec_core.base.errors import UserError
from specdec_core.engine import Engine
from specdec_core.engine.turns import requests_of
from specdec_core.models.pair import load_pair
from specdec_core.prompts.prompt_sets import load_prompts
from specdec_core.recordings.plan import RecordingPlan, ShardPrompt
from specdec_core.recordings.schema import shard_file
from tests.commands import QUICK, sweep_plan
from tests.observers import Heard

pytestmark = pytest.mark.usefixtures("ray_running")

TOKENS = 16
RECORDS = [
    *({"question_id": n, "turns": [f"Add {n}.", "Why?", "So?"]} for n in range(7)),
    {"prompt": "x = [1, 2, 3]"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "y?"}]},
    {"question_id": 7, "turns": ["Add 0.", "Why?", "So?"]},  # the first one again
]
TURNS = 7 * 3 + 2  # that are recorded


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, RECORDS)))
    return file


@pytest.fixture(scope="module")
def plan(chat_spec, prompts):
    settings = {"prompts": {"source": str(prompts)}, "max_new_tokens": TOKENS, "mixing": 0}
    return RecordingPlan.model_validate({"pair": chat_spec.model_dump(), **settings})


@pytest.fixture(scope="module")
def recorded(plan, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return home, run_recording(plan, home)


def sweep_of(spec, prompts, limit=None, **more):
    return sweep_plan(
        spec,
        prompts,
        prompts={"source": str(prompts), "limit": limit, **more},
        max_new_tokens=TOKENS,
        search=[{"drafter": {"kind": "draft_model", "policy": {"kind": "fixed"}}}],
        race={"seconds": 0},
        **QUICK,
    )


def test_every_turn_is_recorded_as_every_job_asks_it(recorded, chat_spec, prompts):
    found, pair = recorded[1].prompts, load_pair(chat_spec)
    asked = requests_of(load_prompts(str(prompts), None, pair.tokenizer), pair, TOKENS)
    assert found.numbers == list(range(TURNS))
    assert found.ids == [request.id for request in asked[:TURNS]]
    assert [tuple(tokens) for tokens in found.tokens] == [r.tokens for r in asked[:TURNS]]
    assert found.ids[:3] == ["0", "0, turn 2", "0, turn 3"]
    header = recorded[1].header
    assert (header.prompts.count, header.prompts.chat_template) == (len(RECORDS), "auto")


def test_answers_alone_are_recorded_of_the_same_turns(recorded, plan, chat_spec, tmp_path):
    target = plan.model_copy(update={"pair": chat_spec.model_copy(update={"drafts": {}})})
    alone, beside = run_recording(target, tmp_path).prompts, recorded[1].prompts
    assert (alone.numbers, alone.ids) == (beside.numbers, beside.ids)
    for name in ("tokens", "outputs"):
        assert [*map(list, getattr(alone, name))] == [*map(list, getattr(beside, name))]


def test_answers_alone_are_decoded_together(recorded, chat_spec, prompts, monkeypatch):
    decoded, generate = [], Engine.generate

    def counted(engine, requests):
        decoded.append(len(requests))
        return generate(engine, requests)

    monkeypatch.setattr(Engine, "generate", counted)
    worker = RecordingWorker(chat_spec.model_copy(update={"drafts": {}}))
    first, second = load_prompts(str(prompts), 2, worker.pair.tokenizer)
    batch = [ShardPrompt(range(n, n + 3), p, ()) for n, p in ((0, first), (3, second))]
    worker.record(recorded[1].header.model_copy(update={"pair": worker.pair.spec}), batch)
    assert decoded == [2, 2, 6]  # the answers to two turns, and what is recorded


@pytest.mark.long
def test_a_finished_recording_is_found_and_a_lost_shard_recorded_again(plan, recorded):
    home, recording = recorded
    heard = Heard()
    assert run_recording(plan, home, observer=heard).folder == recording.folder
    assert heard.prompts == 0
    file = shard_file(recording.folder, "prompts", 0)  # the conversations and the plain text
    before = file.read_bytes()
    file.unlink()
    run_recording(plan, home, observer=heard)
    assert (heard.prompts, file.read_bytes()) == (TURNS - 1, before)


@pytest.mark.long
def test_a_sweep_replays_the_turns_and_finds_their_counts_live(recorded, chat_spec, prompts, plan):
    home = recorded[0]
    fewer = plan.model_copy(update={"prompts": plan.prompts.model_copy(update={"limit": 9})})
    run_recording(fewer, home)
    result, _ = run_sweep(sweep_of(chat_spec, prompts, limit=9), home)
    assert result.replay.equal == result.replay.checked > 0
    assert result.autoregressive.tokens == [len(output) for output in recorded[1].prompts.outputs]


def test_another_rendering_is_another_set(recorded, chat_spec, prompts, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    plan = sweep_of(chat_spec, prompts, chat_template=str(template))
    plan = plan.model_copy(update={"traces": str(recorded[1].folder)})
    with pytest.raises(UserError, match="recorded with other prompts"):
        run_sweep(plan, tmp_path)
    with pytest.raises(UserError, match=r"prompt chats/8: 2 messages take a chat template"):
        run_sweep(sweep_of(chat_spec, prompts, chat_template="none"), tmp_path)
