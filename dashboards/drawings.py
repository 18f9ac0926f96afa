"""All figures of a sweep, its heads and its traces, for the report and as pages of their own."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from plotly.offline import get_plotlyjs

from dashboards import figures, look
from specdec_core.base.errors import UserError
from specdec_core.search.results import SweepResult

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from dashboards.evidence import Evidence
    from specdec_core.drafting.heads.card import HeadCard
    from specdec_core.training.heads.evaluation import Modelled


class Drawing(NamedTuple):
    """A figure and the table that belongs to it, if any."""

    figure: go.Figure
    table: pd.DataFrame | None = None


def draw(
    result: SweepResult, rounds: pd.DataFrame, evidence: Evidence | None = None
) -> dict[str, dict[str, Drawing]]:
    """All figures of a sweep by name, in sections by heading."""
    sweep = {
        "frontier": Drawing(figures.frontier(result)),
        "speedups": Drawing(figures.speedups(result)),
        "time": Drawing(figures.time_per_token(result)),
        "accepted": Drawing(figures.accepted_lengths(result, rounds)),
        "lengths": Drawing(figures.lengths_over_position(result, rounds)),
    }
    if max(m.width for m in result.profile.target.measurements) > 1:  # else not measured
        sweep["forwards"] = Drawing(figures.forward_times(result))
    trees = figures.trees_frame(result)
    if len(trees) >= figures.LEAST_TREES:
        sweep["trees"] = Drawing(figures.tree_heatmap(trees))
    generations = figures.generation_times(result, rounds)
    regressed = figures.regression_table(generations)
    if regressed["t_draft (ms)"].notna().any():
        sweep["regression"] = Drawing(figures.time_regression(generations), regressed)
    return {
        "": sweep,
        "The trained heads": draw_heads(cards(result), result),
        "What the traces say": draw_traces(evidence) if evidence is not None else {},
    }


def draw_heads(
    cards: Mapping[str, HeadCard],
    result: SweepResult | None = None,
    judged: Mapping[str, Modelled] | None = None,
) -> dict[str, Drawing]:
    """Table 3 of SpecDec++ for trained heads; with the best thresholds where a sweep used them or
    they were judged on a recording (:func:`specdec_core.training.heads.evaluation.evaluate`)."""
    if not any(card.kind == "specdecpp" for card in cards.values()):
        return {}
    frame = figures.heads_frame(cards, result, judged)
    return {"heads": Drawing(figures.heads_heatmap(frame), figures.heads_table(frame))}


def draw_traces(evidence: Evidence) -> dict[str, Drawing]:
    """What a recording says about drafts and policies."""
    drawn = {}
    if evidence.distances is not None and len(evidence.distances):
        drawn["oracle"] = Drawing(figures.length_errors(evidence.distances))
    if evidence.runs:
        drawn["utilisation"] = Drawing(
            figures.utilisation_over_time(evidence.runs, evidence.families)
        )
    if evidence.prefixes:
        drawn["confidence"] = Drawing(figures.acceptance_by_confidence(evidence.prefixes))
    if evidence.tokens:
        drawn["entropy"] = Drawing(
            figures.entropy_by_outcome(evidence.tokens), figures.entropy_table(evidence.tokens)
        )
        own = evidence.tokens[evidence.draft]
        drawn["bounds"] = Drawing(figures.acceptance_bounds(own, evidence.draft))
        with suppress(ValueError):  # a draft that is the target has no ratio to fit
            drawn["ratio"] = Drawing(figures.ratio_of_entropies(own, evidence.draft))
    return drawn


def cards(result: SweepResult) -> dict[str, HeadCard]:
    """The cards of the heads in a sweep that are still there."""
    found: dict[str, HeadCard] = {}
    if names := figures.head_names(result):
        from specdec_core.drafting.heads.storage import load_card  # torch takes seconds to import

        for name in names:
            with suppress(UserError):
                found[name] = load_card(name)
    return found


def template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def embed(name: str, drawing: Drawing) -> dict[str, Any]:
    """A figure's title and subtitle as text of the page, which wraps, and the rest as JSON."""
    fig = drawing.figure
    title, subtitle = fig.layout.title.text, fig.layout.title.subtitle.text
    fig = go.Figure(fig).update_layout(title=None, margin_t=24)
    document = json.loads(fig.to_json())
    # "<" in a script element could end it
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    return {
        "name": name, "title": title, "subtitle": subtitle, "json": text,
        "height": fig.layout.height,
        "columns": [] if drawing.table is None else list(drawing.table.columns),
        "rows": [] if drawing.table is None else [
            [_cell(value) for value in row] for row in drawing.table.itertuples(index=False)
        ],
    }  # fmt: skip


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.3f}" if value % 1 else f"{value:g}"
    return str(value)


def page(name: str, drawing: Drawing) -> str:
    """A figure as an HTML page of its own that needs no network."""
    return template("page.jinja").render(
        figure=embed(name, drawing),
        neutral=[look.INK, look.MUTED, look.PAPER],
        plotly=_compressed_plotly(),
    )


@cache
def _compressed_plotly() -> str:
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def log_figures(
    client: MlflowClient, run_id: str, drawings: Mapping[str, Drawing], folder: str = "figures"
) -> None:
    """Log each figure to an MLflow run as `<folder>/<name>.html`, a page that draws itself without
    a network, and its table, if any, as `<folder>/<name>.csv`."""
    for name, drawing in drawings.items():
        client.log_text(run_id, page(name, drawing), f"{folder}/{name}.html")
        if drawing.table is not None:
            client.log_text(run_id, drawing.table.to_csv(index=False), f"{folder}/{name}.csv")
