"""`specdec train eagle` trains on recorded answers."""

import pytest

from jobs.train_eagle import main
from specdec_core.training.eagle.training import EagleTrainingCard
from specdec_core.training.recorded.finished import load_card
from tests.registered import runs_in
from tests.specdec_core.training.conftest import recorded_answers

SMALL = (
    *("--recording", "greedy", "--recording", "sampled"),
    *("--set", "draft_vocab_size=100", "--set", "steps=2"),
    *("--set", "batch_tokens=100", "--set", "epochs=2"),
)


@pytest.mark.long
def test_a_head_is_trained_and_not_trained_again(command, tiny_pair, home):
    found = recorded_answers(tiny_pair, home / "traces", prompts=60, new_tokens=12)
    for recording, name in zip(found.recordings, ("greedy", "sampled"), strict=True):
        recording.folder.rename(home / "traces" / name)
    first, second = (command(main, home, *SMALL, "--out", home / "out") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert "resuming: 100 of 100 done" in second.stdout
    assert "tokens a round" in first.stdout
    out = home / "out"
    card = load_card(out / "head", EagleTrainingCard)
    assert card.best in card.curve
    assert 50 < sum(card.texts.values()) <= 60  # an answer may be empty
    client, (training,), _ = runs_in(home)
    assert training.info.status == "FINISHED"
    assert "kept_acceptance_greedy_2" in training.data.metrics
    assert {a.path for a in client.list_artifacts(training.info.run_id)} == {"head"}
