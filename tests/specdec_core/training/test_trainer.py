"""A training ends with its budget or without improvement, and resumes where it was stopped."""

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from specdec_core.training.optimiser import Optimiser
from specdec_core.training.trainer import Loop, LoopReport, ModelTrainer, planned

ROWS = torch.randn(12, 8, 16, generator=torch.Generator().manual_seed(0))


class Batches:
    def __len__(self):
        return len(ROWS)

    def __getitems__(self, numbers):
        return {"rows": ROWS[numbers[0]], "count": 8}


class Stop(TrainerCallback):
    """Stops a training after a few steps, as if its process were killed behind a checkpoint."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step % 5 == 0:
            control.should_log = control.should_save = control.should_training_stop = True


def adamw(model):
    return Optimiser(model, None, 1e-2)


def muon(model):
    return Optimiser(model, 0.02, 1e-2)


def make(folder, optimiser=adamw, **changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 16))
    model[0].bias.requires_grad_(False)

    def loss(rows):
        noisy = rows + 0.1 * torch.randn(rows.shape)  # what is drawn is drawn again
        return (model(noisy) - rows).square().mean()

    def judge():
        error = float((model(ROWS) - ROWS).square().mean())
        return -error, {"error": error}

    loop = {"rate": lambda share: 1 - share, "judge": judge, "evaluations": 3, **changes}
    settings = {"num_train_epochs": 2, "use_cpu": True}
    made = Loop(**loop)
    return model, ModelTrainer(model, loss, Batches(), folder, made, optimiser(model), **settings)


@pytest.mark.parametrize("optimiser", [adamw, muon])
def test_a_stopped_training_ends_with_the_same_weights(tmp_path, optimiser):
    whole, trainer = make(tmp_path / "whole", optimiser)
    trainer.run()
    steps = 0
    while steps < 24:
        parts, part = make(tmp_path / "parts", optimiser)
        part.add_callback(Stop())
        part.run()
        steps = part.state.global_step
    assert part.count == trainer.count == 24 * 8
    assert [e["eval_score"] for e in part.curve] == [e["eval_score"] for e in trainer.curve]
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], weight, rtol=0, atol=0)


def test_matrices_of_layers_are_trained_by_muon_and_the_rest_by_adamw():
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "layer": nn.Linear(4, 4)})
    model["lm_head"] = nn.Linear(4, 9, bias=False)
    frozen = model["frozen"] = nn.Linear(4, 4)
    frozen.requires_grad_(False)
    rest, hidden = (
        [id(p) for group in part.param_groups for p in group["params"]]
        for part in Optimiser(model, 0.02, 1e-2).parts
    )
    assert hidden == [id(model["layer"].weight)]
    others = model["embed"].weight, model["layer"].bias, model["lm_head"].weight
    assert rest == [*map(id, others)]
    [whole] = Optimiser(model, None, 1e-2).parts
    assert sum(len(group["params"]) for group in whole.param_groups) == 4


def test_it_is_evaluated_at_equal_shares_and_reports_how_far_it_is(tmp_path):
    heard: list[LoopReport] = []
    _, trainer = make(tmp_path, report=heard.append)
    trainer.run()
    evaluated = [standing for standing in heard if standing.evaluation is not None]
    assert [round(24 * standing.share) for standing in evaluated] == [8, 16, 24]
    errors = [standing.evaluation["error"] for standing in evaluated if standing.evaluation]
    assert errors == [-entry["eval_score"] for entry in trainer.curve]
    assert errors == sorted(errors, reverse=True)
    assert evaluated[-1].loss < evaluated[0].loss
    assert heard[-1].count == 24 * 8
    assert heard[-1].seconds > 0


def scores(*values):
    left = list(values)
    return lambda: (left.pop(0), {})


def test_the_best_weights_are_kept_and_patience_ends_it(tmp_path):
    kept: list[Tensor] = []
    judged = scores(1, 3, 2, 0, 5)

    def judge():
        kept.append(model[1].weight.detach().clone())
        return judged()

    model, trainer = make(tmp_path, judge=judge, evaluations=24, patience=1)
    trainer.run()
    assert [entry["eval_score"] for entry in trainer.curve] == [1, 3, 2, 0]
    assert trainer.share < 0.5
    torch.testing.assert_close(model[1].weight, kept[1])


def test_what_was_good_before_is_kept_unless_it_gets_better(tmp_path):
    kept: list[Tensor] = []
    judged = scores(4, 1, 3, 2, 0, 5)

    def judge():
        kept.append(model[1].weight.detach().clone())
        return judged()

    loop = {"judge": judge, "evaluations": 24, "judges_start": True, "patience": 1}
    model, trainer = make(tmp_path, **loop)
    trainer.run()
    assert [entry["eval_score"] for entry in trainer.curve] == [4, 1, 3, 2, 0]
    assert trainer.curve[0]["count"] == 8  # after a step
    torch.testing.assert_close(model[1].weight, kept[0])
    assert not torch.equal(kept[1], kept[3])


def test_a_batch_is_fed_at_a_time_however_many_gpus_there_are(tmp_path, monkeypatch):
    several = property(lambda own: 1 if own._n_gpu == 1 else 2)
    monkeypatch.setattr(TrainingArguments, "n_gpu", several)
    _, trainer = make(tmp_path)
    assert len(trainer.get_train_dataloader()) == len(ROWS)
    trainer.run()


def test_minutes_end_a_training(tmp_path):
    _, trainer = make(tmp_path, minutes=1e-4)
    trainer.run()
    assert trainer.share == 1
    assert trainer.state.global_step < 24


@pytest.mark.parametrize("most", [1, 100])
def test_every_sequence_is_in_one_batch_that_is_no_larger_than_asked(most):
    lengths = [1 + number % 37 for number in range(700)]
    batches = planned(lengths, most)
    assert sorted(number for batch in batches for number in batch) == list(range(700))
    sizes = [len(batch) * max(lengths[n] for n in batch) for batch in batches]
    assert all(size <= most or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))
