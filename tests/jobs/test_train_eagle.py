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
def test_a_head_is_trained_with_the_best_rate_and_not_trained_again(
    command, ray_running, tiny_pair, home
):
    found = recorded_answers(tiny_pair, home / "traces", prompts=60, new_tokens=12)
    for recording, name in zip(found.recordings, ("greedy", "sampled"), strict=True):
        recording.folder.rename(home / "traces" / name)
    arguments = [*SMALL, "--learning-rate", "1e-3,3e-3"]
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
    assert sum(card.texts.values()) == 60
    client, (training,), runs = runs_in(home)
    assert len(runs) == 2  # one of each rate
    assert all(run.info.status == "FINISHED" for run in (training, *runs))
    assert all("kept_acceptance_greedy_2" in run.data.metrics for run in (training, *runs))
    assert {a.path for a in client.list_artifacts(runs[0].info.run_id)} == {"head"}
