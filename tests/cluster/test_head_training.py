"""A grid of heads is trained once each, whatever happens to its workers."""

from dataclasses import replace

import pytest

from cluster.head_training import train_heads
from specdec_core.base.errors import UserError
from specdec_core.drafting.heads.card import HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.storage import load_card, load_head, save_head
from specdec_core.training.heads.training import HeadTraining
from tests.commands import children
from tests.observers import Heard
from tests.specdec_core.drafting.heads.examples import PAIR, learnable

pytestmark = pytest.mark.usefixtures("ray_running")

SETTINGS = HeadTrainingSettings(learning_rate=1e-2, batch_size=256, epochs=3)
SPECS = [HeadSpec(depth=0), HeadSpec(depth=2, w_rej=6), HeadSpec(kind="t2", width=8)]
NAMES = ["small-specdecpp-d0-w1", "small-specdecpp-d2-w6", "small-t2"]
EXAMPLES = {"specdecpp": learnable(), "t2": learnable("t2")}


def test_heads_are_those_of_a_training_in_this_process_and_are_not_trained_twice(tmp_path):
    first = Heard()
    heads, _ = train_heads(SPECS, EXAMPLES, [SETTINGS], tmp_path, first)
    assert [head.label for head in heads] == NAMES
    assert first.steps == 3
    for head, spec in zip(heads, SPECS, strict=True):
        trained = HeadTraining(spec, EXAMPLES[spec.kind], SETTINGS).run()
        assert (head.folder / "model.safetensors").read_bytes() == trained.weights
        assert head.card.curve == trained.card.curve
        assert load_head(head.folder, PAIR["draft"], PAIR["target"]).card == head.card

    (tmp_path / NAMES[1] / "head.json").unlink()  # as if it had been interrupted there
    again = Heard()
    found, tried = train_heads(SPECS, EXAMPLES, [SETTINGS], tmp_path, again)
    assert found == tried == heads
    assert again.steps == 1


def test_a_head_of_another_pair_with_a_draft_of_the_same_name_is_kept(tmp_path):
    trained = HeadTraining(SPECS[0], EXAMPLES["specdecpp"], SETTINGS).run()
    card = save_head(trained.weights, trained.card, tmp_path / NAMES[0])
    other = replace(EXAMPLES["specdecpp"], pair={**PAIR, "target": "0"})
    for rates in ([SETTINGS], [SETTINGS, SETTINGS.model_copy(update={"learning_rate": 1e-3})]):
        with pytest.raises(UserError, match=f"{NAMES[0]}: has a head of another draft or target"):
            train_heads(SPECS[:1], {"specdecpp": other}, rates, tmp_path)
    assert load_card(tmp_path / NAMES[0]) == card


def test_where_every_training_fails_that_is_one_line_with_the_reasons(tmp_path):
    wider = replace(EXAMPLES["specdecpp"], hidden_size=9)  # than its features are
    with pytest.raises(UserError, match=f"no head could be trained: {NAMES[0]}: .") as caught:
        train_heads(SPECS[:1], {"specdecpp": wider}, [SETTINGS], tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_of_several_learning_rates_the_one_with_the_least_eval_loss_is_kept(tmp_path):
    rates = [SETTINGS.model_copy(update={"learning_rate": rate}) for rate in (1e-6, 1e-2, 1e-5)]
    heard = Heard()
    heads, _ = train_heads(SPECS[:2], EXAMPLES, rates, tmp_path, heard)
    assert heard.steps == 6
    assert [head.label for head in heads] == NAMES[:2]
    for head in heads:
        assert head.folder == tmp_path / head.label
        assert head.card.settings.learning_rate == 1e-2
        load_head(head.folder, PAIR["draft"], PAIR["target"])
    longer = SETTINGS.model_copy(update={"epochs": 4})
    [head], _ = train_heads(SPECS[:1], EXAMPLES, [longer], tmp_path)  # trained by others
    assert len(head.card.curve) == 4


@pytest.mark.long
def test_a_head_whose_worker_is_killed_is_trained_again(tmp_path):
    class Killer(Heard):
        def step(self):
            if not self.steps:  # the other worker is at work on the next one
                workers = children("train_head")
                assert workers
                for worker in workers:
                    worker.kill()
            super().step()

    heard = Killer()
    specs = [HeadSpec(depth=0), *(HeadSpec(depth=d) for d in (3, 4))]
    settings = SETTINGS.model_copy(update={"epochs": 12})
    heads, _ = train_heads(specs, EXAMPLES, [settings], tmp_path, heard)
    assert len(heads) == heard.steps == 3
    for head in heads:
        assert len(head.card.curve) == 12
