"""`specdec train eagle` has a target answer, trains on its features, and refuses bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.train_eagle import main
from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec
from specdec_core.training.eagle.training import EagleTrainingCard
from specdec_core.training.recorded.answers import AnswersCard, claim, read_card
from specdec_core.training.recorded.finished import load_card
from tests.commands import Command
from tests.registered import runs_in

SMALL = (
    *("--limit", 60, "--new-tokens", 12, "--prompts", "bundled:train"),
    *("--set", "draft_vocab_size=100", "--set", "steps=2"),
    *("--set", "batch_tokens=100", "--set", "epochs=2"),
)


@pytest.mark.long
def test_a_head_is_trained_with_the_best_rate_and_not_trained_again(
    command: Command, ray_running: None, tiny_spec: PairSpec, home: Path
) -> None:
    arguments = ["--target", tiny_spec.target, *SMALL, "--learning-rate", "1e-3,3e-3"]
    first, second = (command(main, home, *arguments, "--out", home / "out") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert "resuming: 200 of 200 done" in second.stdout
    assert "tokens a round" in first.stdout
    out = home / "out"
    card = load_card(out / "head", EagleTrainingCard)
    trials = [
        load_card(path.parent, EagleTrainingCard)
        for path in out.glob(".training/*/head/training.json")
    ]
    assert {trial.settings.learning_rate for trial in trials} == {1e-3, 3e-3}
    assert card.best.acceptance.length == max(t.best.acceptance.length for t in trials)
    assert read_card(out / "answers").prompts == card.texts["train"] + card.texts["held_out"]
    client, (training,), runs = runs_in(home)
    assert len(runs) == 2  # one of each rate
    assert all(run.info.status == "FINISHED" for run in (training, *runs))
    assert all("kept_acceptance_greedy_2" in run.data.metrics for run in (training, *runs))
    assert {a.path for a in client.list_artifacts(runs[0].info.run_id)} == {"head"}


def test_answers_fit_in_as_many_tokens_as_asked(tiny_spec: PairSpec, tmp_path: Path) -> None:
    options = {"target": tiny_spec.target, "prompts": "bundled:train", "out": tmp_path / "out"}
    with pytest.raises(UserError, match="160 new ones were asked for, but the context holds 100"):
        main(**options, limit=2, max_length=100)


def test_answers_that_a_head_cannot_be_judged_on_are_refused_where_they_are(
    tiny_spec: PairSpec, tmp_path: Path
) -> None:
    card = AnswersCard(
        target=tiny_spec.target,
        fingerprint="0",
        prompts=1,
        digest="0",
        max_new_tokens=1,
        temperatures=(0.5, 0.7),
    )
    claim(tmp_path / "answers", card)
    with pytest.raises(UserError, match="answers: no answers at temperature 0 or 1"):
        main(target=tiny_spec.target, answers=tmp_path / "answers", out=tmp_path / "out")


def test_prompts_are_rendered_and_those_that_are_too_long_left_out(
    tiny_spec: PairSpec, tmp_path: Path
) -> None:
    from specdec_core.models.loading import load_tokenizer
    from specdec_core.training.recorded.gather import token_prompts

    tokenizer = load_tokenizer(tiny_spec.target)
    path = tmp_path / "chats.jsonl"
    chats = [{"messages": [{"role": "user", "content": "def f" * n}]} for n in (1, 2, 90)]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    found = dict(token_prompts(str(path), tokenizer, None, 50))
    assert found.keys() == {"chats/0", "chats/1"}
    assert tokenizer.decode(found["chats/1"]) == "<def fdef f>"
    with pytest.raises(UserError, match="no prompts of at most 3 tokens"):
        token_prompts(str(path), tokenizer, None, 3)
