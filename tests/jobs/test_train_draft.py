"""`specdec train draft` trains a draft on recorded answers, once."""

import pytest

from jobs.train_draft import main
from specdec_core.models.pair import load_pair
from specdec_core.models.reduced_draft import ReducedDraft
from specdec_core.training.recorded.finished import load_card
from specdec_core.training.reduced_draft.training import DraftTrainingCard
from tests.registered import runs_in
from tests.specdec_core.training.conftest import recorded_answers

SMALL = (
    *("--recording", "0", "--recording", "1"),
    *("--set", "draft_vocab_size=100", "--set", "width=16", "--set", "layers=1"),
    *("--set", "inner=16", "--set", "heads=2", "--set", "key_value_heads=1"),
    *("--set", "batch_tokens=100", "--set", "epochs=2"),
)


@pytest.mark.long
def test_a_draft_is_trained_and_not_trained_again(command, tiny_pair, tiny_spec, home):
    out = home / "out"
    recorded_answers(tiny_pair, home / "traces", prompts=60, new_tokens=12)
    arguments = [*SMALL, "--out", out]
    first, second = (command(main, home, *arguments) for _ in range(2))
    for done in (first, second):
        assert done.returncode == 0, done.stderr
    assert "Σ min(p, q)" in first.stdout
    assert "resuming: 100 of 100 done" in second.stdout
    card = load_card(out / "draft", DraftTrainingCard)
    assert card.best in card.curve
    pair = load_pair(tiny_spec.model_copy(update={"drafts": {"d": str(out / "draft")}}))
    assert isinstance(pair.drafts["d"], ReducedDraft)
    client, (training,), _ = runs_in(home)
    assert training.info.status == "FINISHED"
    assert training.data.metrics["kept_agreement"] == card.best.agreement
    assert {a.path for a in client.list_artifacts(training.info.run_id)} == {"draft"}
