"""What share of a task's answers each configuration gets right, beside the target's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pandas as pd

from research.drift.drift import bootstrap
from research.drift.tasks import GradedTask
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, Sampling
from specdec_core.engine import Engine
from specdec_core.engine.turns import requests_of
from specdec_core.models.pair import Pair

LEAST = 0.1  # a target that gets fewer right says nothing about a method's loss


def on_answers(
    pair: Pair,
    configurations: Iterable[Configuration],
    sampling: Sampling,
    task: GradedTask,
    texts: int,
    max_new_tokens: int,
    observer: Observer | None = None,
) -> pd.DataFrame:
    """One row for autoregressive decoding and each of `configurations`, of `texts` answers a
    prompt: the share that is right (`right`), and how much more than the target's own that is
    (`change`), both with 95 % intervals over prompts. Only the first row where the target gets less
    than :data:`LEAST` right."""
    observer = observer or Observer()
    alone = _grades(pair, Configuration(sampling=sampling), task, texts, max_new_tokens, observer)
    rows = [_row(task, None, alone, alone)]
    for each in configurations if alone.mean() >= LEAST else ():
        grades = _grades(pair, each, task, texts, max_new_tokens, observer)
        rows.append(_row(task, each, grades, alone))
    return pd.DataFrame(rows)


def _grades(
    pair: Pair,
    configuration: Configuration,
    task: GradedTask,
    texts: int,
    max_new_tokens: int,
    observer: Observer,
) -> np.ndarray:
    """The share of right answers to each prompt (P,)."""
    observer.stage(f"{task.name}, {configuration.label}", len(task.prompts) * texts)
    requests = [
        replace(request, id=f"{text}/{request.id}")
        for text in range(texts)
        for request in requests_of(task.prompts, pair, max_new_tokens, text * len(task.prompts))
    ]
    engine = Engine(pair, configuration, slots=8)
    written = engine.generate(requests, lambda _: observer.step())
    judges = task.judges * texts
    right = [judge(g.text) for judge, g in zip(judges, written, strict=True)]
    grades: np.ndarray = np.asarray(right, dtype=float).reshape(texts, -1).mean(axis=0)
    return grades


def _row(
    task: GradedTask, configuration: Configuration | None, grades: np.ndarray, alone: np.ndarray
) -> dict[str, object]:
    right = bootstrap(lambda pick: grades[pick].mean(axis=-1), len(grades))
    change = bootstrap(lambda pick: (grades - alone)[pick].mean(axis=-1), len(grades))
    own = configuration is None
    return {
        "task": task.name,
        "measure": task.measure,
        "configuration": "autoregressive" if configuration is None else configuration.label,
        "lossless": configuration is None or configuration.lossless,
        "prompts": len(grades),
        "right": right.value,
        "right_low": right.low,
        "right_high": right.high,
        "change": None if own else change.value,
        "change_low": None if own else change.low,
        "change_high": None if own else change.high,
    }
