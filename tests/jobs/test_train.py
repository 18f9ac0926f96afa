"""`specdec train draft` and `specdec train eagle` train on recorded answers, once."""

import pytest

from jobs import train_draft, train_eagle
from specdec_core.models.pair import load_pair
from specdec_core.models.reduced_draft import ReducedDraft
from specdec_core.training.eagle.training import EagleTrainingCard
from specdec_core.training.recorded.finished import load_card
from specdec_core.training.reduced_draft.training import DraftTrainingCard
from tests.commands import printed
from tests.registered import runs_in
from tests.specdec_core.training.conftest import recorded_answers

SMALL = ("draft_vocab_size=100", "batch_tokens=100", "epochs=2")
DRAFT = ("width=16", "layers=1", "inner=16", "heads=2", "key_value_heads=1")


def trained_twice(command, main, home, pair, settings):
    """What the first of two runs on the same recordings printed, and the data of its MLflow run."""
    found = recorded_answers(pair, home / "traces", prompts=60, new_tokens=12)
    arguments = [part for setting in (*SMALL, *settings) for part in ("--set", setting)]
    for recording, name in zip(found.recordings, ("greedy", "sampled"), strict=True):
        recording.folder.rename(home / "traces" / name)
        arguments += ["--recording", name]
    first, second = (
        printed(command(main, home, *arguments, "--out", home / "out")) for _ in range(2)
    )
    assert "resuming: 100 of 100 done" in second
    client, (training,), _ = runs_in(home)
    assert training.info.status == "FINISHED"
    return first, training.data, [a.path for a in client.list_artifacts(training.info.run_id)]


@pytest.mark.long
def test_a_draft_is_trained_and_not_trained_again(command, tiny_pair, tiny_spec, home):
    said, data, files = trained_twice(command, train_draft.main, home, tiny_pair, DRAFT)
    assert "Σ min(p, q)" in said
    folder = home / "out" / "draft"
    card = load_card(folder, DraftTrainingCard)
    assert card.best in card.curve
    pair = load_pair(tiny_spec.model_copy(update={"drafts": {"d": str(folder)}}))
    assert isinstance(pair.drafts["d"], ReducedDraft)
    assert data.metrics["kept_agreement"] == card.best.agreement
    assert files == ["draft"]


@pytest.mark.long
def test_a_head_is_trained_and_not_trained_again(command, tiny_pair, home):
    said, data, files = trained_twice(command, train_eagle.main, home, tiny_pair, ["steps=2"])
    assert "tokens a round" in said
    card = load_card(home / "out" / "head", EagleTrainingCard)
    assert card.best in card.curve
    assert 50 < sum(card.texts.values()) <= 60  # an answer may be empty
    assert "kept_acceptance_greedy_2" in data.metrics
    assert files == ["head"]
