"""The loop of all trainings: transformers' `Trainer`, which ends when a budget of steps or minutes
is spent and evaluates at equal shares of it.

A checkpoint is written every few seconds. The same training in the same folder resumes from the
last one, and ends with the weights of a training that was not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from specdec_core.base.files import needs_room

_NEVER = 10**9  # steps: when to log, save and evaluate is decided by `_LoopCallback`
_REPORT_SECONDS = 5.0


class Batches(Protocol):
    """Batches by their numbers; `__getitems__` gets a list of one number."""

    def __len__(self) -> int: ...

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        """The batch as keyword arguments of the loss, and under `count` its number of tokens or
        rows."""


@dataclass(frozen=True)
class LoopReport:
    """How far a training is; `evaluation` has the figures of a model that was just evaluated."""

    share: float  # of the budget
    loss: float  # mean since the last report
    count: int  # tokens or rows so far
    seconds: float  # of training so far, without evaluations
    evaluation: dict[str, Any] | None = None

    @property
    def speed(self) -> float:
        """Tokens or rows a second of training."""
        return self.count / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Loop:
    """How a training continues and ends.

    Attributes:
        rate: the learning rate over its peak, by the share of the budget that is spent.
        minutes: a budget besides `max_steps` or `num_train_epochs`.
        judge: evaluates the present model: a score, the larger the better, and further figures.
            The weights with the best score are kept; without `judge`, the last weights.
        evaluations: over the whole budget.
        judges_start: whether the first step is evaluated, too, so that weights that were good
            before are kept where none become better. It does not count for `patience`.
        patience: the training ends after more evaluations than this without a better score.
        report: is called with the standing, every few seconds and at evaluations.
        save_seconds: between two checkpoints.
    """

    rate: Callable[[float], float]
    minutes: float | None = None
    judge: Callable[[], tuple[float, dict[str, Any]]] | None = None
    evaluations: int = 1
    judges_start: bool = False
    patience: int = _NEVER
    report: Callable[[LoopReport], None] = lambda _: None
    save_seconds: float = 20.0


class ModelTrainer(Trainer):
    """Trains a model by a loss.

    Args:
        model: what is trained: its parameters that require a gradient.
        loss: of a batch, a scalar; called with mixed precision where `settings` have `bf16`.
        batches: what an epoch consists of.
        folder: of the checkpoints.
        loop: how the training continues and ends.
        optimizer: of the model's parameters, with the peak of the learning rate.
        settings: further arguments of `TrainingArguments`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        batches: Batches,
        folder: Path,
        loop: Loop,
        optimizer: Optimizer,
        **settings: Any,
    ) -> None:
        self.loop, self.count, self.seconds = loop, 0, 0.0
        judged = loop.judge is not None
        arguments = {
            "output_dir": str(folder),
            "per_device_train_batch_size": 1,
            "logging_strategy": "no",
            "logging_nan_inf_filter": False,  # it waits for the device at each step
            "save_strategy": "steps",
            "save_steps": _NEVER,
            "save_total_limit": 2,  # the last one, and the best
            "eval_strategy": "steps" if judged else "no",
            "eval_steps": _NEVER if judged else None,
            "load_best_model_at_end": judged,
            "metric_for_best_model": "score" if judged else None,
            "greater_is_better": True if judged else None,
            "remove_unused_columns": False,
            "label_names": [],
            "dataloader_pin_memory": False,
            "report_to": "none",
            "disable_tqdm": True,
        }
        super().__init__(
            _LossModule(model, loss),
            TrainingArguments(**{**arguments, **settings}),
            data_collator=_as_it_is,
            train_dataset=batches,
            eval_dataset=batches,  # not read: `judge` evaluates
            callbacks=[_LoopCallback(self)],
            optimizers=(optimizer, None),
        )
        self.args._n_gpu = 1  # a batch here is no list of rows to split over the GPUs
        self._train_batch_size = self.args.train_batch_size  # which was one for each GPU
        self.folder = folder
        self.remove_callback(PrinterCallback)

    @property
    def share(self) -> float:
        """The share of the budget that is spent."""
        by_steps = self.state.global_step / max(self.state.max_steps, 1)
        by_time = self.seconds / (60 * self.loop.minutes) if self.loop.minutes else 0.0
        return min(max(by_steps, by_time), 1.0)

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The evaluations so far: fields of :class:`LoopReport`, and the `eval_score` of each."""
        return [entry for entry in self.state.log_history if "eval_score" in entry]

    def run(self) -> None:
        """Train until the budget is spent, from the last checkpoint if there is one, and restore
        the best weights."""
        whole = [path.parent for path in self.folder.glob("checkpoint-*/trainer_state.json")]
        last = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
        self.train(resume_from_checkpoint=None if last is None else str(last))

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        self.count += inputs.pop("count")
        loss: Tensor = model(**inputs)
        return loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        assert self.optimizer is not None  # Trainer has made it
        self.lr_scheduler = LambdaLR(self.optimizer, lambda _: self.loop.rate(self.share))
        return self.lr_scheduler

    def set_rate(self) -> None:
        """Set the learning rate of the next step. Trainer's own scheduler runs before the step is
        counted."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.loop.rate(self.share)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        assert self.loop.judge is not None
        with torch.no_grad(), self.accelerator.autocast():
            score, found = self.loop.judge()
        self.log({"eval_score": score, "evaluation": found})
        return {"eval_score": score}

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        history = self.state.log_history
        loss = logs.get("loss", history[-1]["loss"] if history else 0.0)
        standing = LoopReport(self.share, loss, self.count, self.seconds, logs.get("evaluation"))
        super().log({**asdict(standing), **logs})
        self.loop.report(standing)

    def _save_checkpoint(self, *given: Any) -> None:
        state = self.folder / f"checkpoint-{self.state.global_step}" / "trainer_state.json"
        try:
            with needs_room(self.folder):
                super()._save_checkpoint(*given)
        except BaseException:
            state.unlink(missing_ok=True)  # it may be cut off: the checkpoint before is resumed
            raise

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert self.model is not None
        named = self.model.named_parameters()
        trained = {name: weight.detach() for name, weight in named if weight.requires_grad}
        super()._save(output_dir, trained)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Weights that are not trained are not in a checkpoint."""


def _as_it_is(batch: Any) -> Any:
    return batch


class _LossModule(nn.Module):
    """A model with its loss as output."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **batch: Any) -> Tensor:
        return self.loss(**batch)


class _LoopCallback(TrainerCallback):
    """Decides when a :class:`ModelTrainer` logs, saves, evaluates and ends."""

    def __init__(self, trainer: ModelTrainer) -> None:
        self.trainer, self.loop = trainer, trainer.loop

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.log_history:  # resumed
            last = state.log_history[-1]
            self.trainer.count, self.trainer.seconds = last["count"], last["seconds"]
        self.passed = -1 if self.loop.judges_start and not state.log_history else self._marks()
        self.now = self.logged = self.saved = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        self.trainer.seconds += now - self.now
        self.now = now
        self.trainer.set_rate()
        ends = self.trainer.share >= 1
        if self._marks() > self.passed and self.loop.judge is not None:
            self.passed = self._marks()
            control.should_evaluate = control.should_save = True
        if ends or now - self.saved > self.loop.save_seconds:
            control.should_save, self.saved = True, now
        if control.should_save or now - self.logged > _REPORT_SECONDS:
            control.should_log, self.logged = True, now
        control.should_training_stop = control.should_training_stop or ends

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # What was due after the last step is done.
        control.should_log = control.should_evaluate = control.should_save = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        scores = [entry["eval_score"] for entry in self.trainer.curve]
        scores = scores[1:] if self.loop.judges_start else scores
        if scores and len(scores) - 1 - scores.index(max(scores)) > self.loop.patience:
            control.should_training_stop = True
        self.now = time.monotonic()  # evaluations and checkpoints are no training

    def _marks(self) -> int:
        """The evaluations that were due by now."""
        return int(self.trainer.share * self.loop.evaluations + 1e-9)


def planned(lengths: Sequence[int], most: int) -> list[list[int]]:
    """The numbers of the sequences with these lengths, in batches of similar lengths: with its
    padding a batch has at most `most` tokens, or is one sequence."""
    batches: list[list[int]] = [[]]
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[number] > most:
            batches.append([])
        batches[-1].append(number)
    return batches
