"""Throughput by batch size, the K that suits each, and the cost of context: sections of a report,
and their MLflow run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.entities import Metric
from plotly.offline import get_plotlyjs

from dashboards import look
from dashboards.bench import Section
from dashboards.drawings import Drawing, embed, log_figures, template
from dashboards.figures.throughput import context_figure, throughput_figure
from dashboards.papers import allowed
from dashboards.tracking import as_params, connect, experiment_id_of, user_name
from specdec_core.base.environment import environment
from specdec_core.config import Configuration
from specdec_core.studies.long_context import Line
from specdec_core.studies.throughput import Throughput, stops_paying

_PARTS = {
    "target_1": "target n=1",
    "target_8": "target n=8",
    "draft": "draft n=1",
    "autoregressive_round": "autoregressive round",
    "autoregressive_rest": "rest of it",
    "round": "round, K=7",
    "rest": "its rest",
}


def throughput_section(result: Throughput) -> Section:
    """Tokens a second and speedups by slots; each number of slots' fastest is marked."""
    table = result.table()
    shown = [
        {
            "slots": str(row.slots) if new else "",
            "configuration": row.configuration,
            "tokens/s": f"{row.tokens_per_second:.0f}",
            "over autoregressive": f"{row.speedup:.2f} ({row.low:.2f}–{row.high:.2f})"
            if row.low != row.high
            else "1",
            "MAT": f"{row.mat:.2f}",
            "other outputs": str(row.differing),
        }
        for row, new in zip(table.itertuples(), ~table["slots"].duplicated(), strict=True)
    ]
    fastest = table.groupby("slots")["tokens_per_second"].idxmax()
    return Section(
        key="throughput",
        title="Throughput by batch size",
        note="Tokens a second of all requests together while every slot is busy, prefill included:"
        " a queue is longer than the slots, and the clock stops where the first slot stays empty."
        " Ratios with 95 % bootstrap intervals over queues and repeats, all in turns. Other outputs"
        " are those unlike autoregressive decoding's of the same requests (near-ties).",
        frame=table,
        shown=pd.DataFrame(shown),
        figure=throughput_figure(table, "Throughput by batch size"),
        marked=tuple(fastest),
    )


def paying(result: Throughput) -> list[str]:
    """For each configuration, from how many slots on it is not faster for certain."""
    table, lines = result.table(), []
    for configuration in result.configurations[1:]:
        end = stops_paying(table, configuration.id)
        lines.append(
            f"{result.labels[configuration.id]}: "
            + (
                f"faster than autoregressive decoding at all of {_several(result.slots)} slots"
                if end is None
                else f"stops paying at {end} slot{'s' if end > 1 else ''}"
            )
        )
    return lines


def beside_fixed(result: Throughput, plan: Configuration) -> list[str]:
    """At each number of slots, how the plan compares with the fastest of the others."""
    table, lines = result.table(), []
    others = table[table["config_id"] != plan.id]
    for slots, own in others.groupby("slots"):
        best = own.loc[own["tokens_per_second"].idxmax()]
        ratio = result.over(slots, plan.id, best["config_id"])
        verdict = "tied with" if ratio.tied else "faster than" if ratio.low > 1 else "slower than"
        lines.append(
            f"{slots} slot{'s' if slots > 1 else ''}: {result.labels[plan.id]} is {verdict} the"
            f" fastest other, {best['configuration']}: {ratio.value:.2f}"
            f" ({ratio.low:.2f}–{ratio.high:.2f})"
        )
    return lines


def plan_section(predicted: pd.DataFrame, best: Mapping[int, int]) -> Section:
    """What the profile expects of each K at each number of requests."""
    wide = predicted.pivot(index="batch", columns="tokens", values="speedup")
    shown = [
        {
            "requests": str(batch),
            "best K": str(best[batch]),
            **{f"K={k}": f"{value:.2f}×" for k, value in row.items() if k},
        }
        for batch, row in wide.iterrows()
    ]
    return Section(
        key="plan",
        title="K for each batch size, by the profile",
        note="Modelled speedup over autoregressive decoding: counts from where the draft agrees"
        " with the target's greedy text, times from the profile. Best 0: draft nothing.",
        frame=predicted,
        shown=pd.DataFrame(shown),
        brief=("requests", "best K", *(f"K={k}" for k in (1, 2, 4, 8) if k in wide.columns)),
    )


def contexts_section(table: pd.DataFrame) -> Section:
    """Milliseconds of forwards and rounds by context, and what 1,000 tokens more add."""
    lines = {part: Line.fit(table["context"], table[part]) for part in _PARTS}
    shown = [
        {"context": f"{row['context']:.0f}", **{_PARTS[p]: f"{1e3 * row[p]:.2f}" for p in _PARTS}}
        for row in table.to_dict("records")
    ]
    slopes = {_PARTS[p]: f"{1e6 * lines[p].per_token:+.2f}" for p in _PARTS}
    shown.append({"context": "+1,000", **slopes})
    return Section(
        key="contexts",
        title="Cost by context",
        note="Milliseconds, medians of one row. Attention reads the cache once a forward; the rest"
        " of a round is what is left when its forwards, timed alone, are taken away, and does not"
        " depend on the context.",
        frame=table,
        shown=pd.DataFrame(shown),
        figure=context_figure(table, lines, "A round costs what its forwards' attention costs"),
        marked=(len(shown) - 1,),
        brief=("context", *(_PARTS[p] for p in ("target_1", "target_8", "draft", "round", "rest"))),
    )


def document(title: str, lines: Sequence[str], sections: Sequence[Section]) -> str:
    """The sections as Markdown."""
    parts = [f"# {title}", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join([*parts, *(section.markdown() for section in sections)]) + "\n"


def page(
    title: str,
    pair: str,
    lines: Sequence[str],
    sections: Sequence[Section],
    command: str = "throughput",
) -> str:
    """The sections as an HTML page that needs no network."""
    return template("throughput.jinja").render(
        command=command,
        title=title,
        pair=pair,
        lines=lines,
        sections=[
            (own, embed(own.key, Drawing(own.figure)) if own.figure is not None else None)
            for own in sections
        ],
        neutral=[look.INK, look.MUTED, look.PAPER],
        plotly=get_plotlyjs(),
    )


def log_throughput(
    experiment: str,
    params: Mapping[str, Any],
    result: Throughput,
    contexts: pd.DataFrame | None,
    sections: Sequence[Section],
    plan: Configuration | None,
    folder: Path,
) -> str:
    """An MLflow run in the pair's experiment; tokens a second, speedup and its interval of every
    configuration are metrics whose step is the number of slots, milliseconds those whose step is
    the context. Returns the run's id."""
    client = connect()
    tags = {
        "mlflow.user": user_name(),
        "mlflow.source.name": "specdec throughput",
        **environment(),
    }
    experiment_id = experiment_id_of(client, experiment)
    run = client.create_run(experiment_id, run_name=f"throughput {folder.name}", tags=tags)
    run_id = run.info.run_id
    names = ("tokens_per_second", "speedup", "low", "high", "mat", "differing")
    values = [
        (f"{allowed(row['configuration'])}.{name}", row[name], row["slots"])
        for row in result.table().to_dict("records")
        for name in names
    ]
    values += [
        (f"context.{part}_ms", 1e3 * row[part], row["context"])
        for row in ([] if contexts is None else contexts.to_dict("records"))
        for part in _PARTS
    ]
    now = int(1e3 * time.time())
    metrics = [Metric(key, float(value), now, int(step)) for key, value, step in values]
    chosen = {"plan": plan.to_yaml()} if plan is not None else {}
    client.log_batch(run_id, metrics=metrics, params=as_params({**params, **chosen}))
    client.log_artifacts(run_id, str(folder))
    drawings = {own.key: Drawing(own.figure) for own in sections if own.figure is not None}
    log_figures(client, run_id, drawings)
    client.set_terminated(run_id)
    return run_id


def _several(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
