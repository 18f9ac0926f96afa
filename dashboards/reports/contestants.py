"""What the reports of all comparisons share: the contestants, their models, and the best of each
group."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from dashboards import cells
from dashboards.cells import Cell
from dashboards.reports.sentences import note
from dashboards.sections import ReportOrigin, Section
from specdec_core.base.names import plain_name
from specdec_core.config import PairSpec
from specdec_core.measure.comparison import FOLDS, Comparison, Contender, Lead

CONTESTANT = {"": cells.text("contestant")}
OVER_OURS = cells.ratio("over_autoregressive")


def origin(result: Comparison[Any], notes: Sequence[str], **params: Any) -> ReportOrigin:
    """Where a comparison comes from; `params` are the parameters of its kind."""
    return ReportOrigin(
        name=result.name,
        pair=result.pair.name,
        notes=notes,
        params={
            "pair": result.pair.model_dump(mode="json"),
            "prompts": {"source": result.prompts.source, "count": result.prompts.count},
            "max_new_tokens": result.max_new_tokens,
            "repeats": result.repeats,
            **params,
        },
        started=result.started,
        facts=result.environment,
    )


def report_tags(result: Comparison[Any]) -> dict[str, str]:
    """The tags of a comparison's run in MLflow."""
    prompts = result.prompts
    return {"prompts": prompts.source, "prompts_digest": prompts.digest, **result.environment}


def row_tags(row: Contender, temperature: float) -> dict[str, str]:
    """The tags of a contestant's nested run."""
    tags = {
        "group": row.group,
        "version": row.version,
        "lossless": str(row.lossless).lower(),
        "temperature": f"{temperature:g}",
    }
    if row.configuration is not None:
        tags["config_id"] = row.configuration.id
        tags["mlflow.note.content"] = note(row.configuration)
    return tags


def whose(group: str) -> str:
    return f"{group}'" if group.endswith("s") else f"{group}'s"


def ratio_cells(result: Comparison[Any]) -> dict[str, Cell]:
    """Columns of ratios: to our autoregressive decoding, and to the best of each other group."""
    others = {f"over {whose(group)} best": cells.ratio(f"over_{group}") for group in result.others}
    return {"over our autoregressive": OVER_OURS, **others}


def by_group(
    result: Comparison[Any], frame: pd.DataFrame, *first: str, slowness: str | None = None
) -> pd.DataFrame:
    """The rows in the order of the columns `first`, then our group before the other groups, and
    within each the fastest first: by tokens a second, or by the column `slowness`."""
    place = frame["group"].map({group: number for number, group in enumerate(result.groups)})
    slow = -frame["tokens_per_second"] if slowness is None else frame[slowness]
    ordered = frame.assign(place=place, slow=slow).sort_values([*first, "place", "slow"])
    return ordered.drop(columns=["place", "slow"]).reset_index(drop=True)


def ratio_of(lead: Lead) -> str:
    return cells.as_ratio(lead.ratio, lead.low, lead.high)


def lead_metrics(lead: Lead, where: str = "") -> dict[str, float]:
    """A lead's ratio and the ends of its interval as metrics; `where` is a part of their names."""
    name = f"over_{plain_name(lead.group)}{where}"
    return {name: lead.ratio, f"{name}_low": lead.low, f"{name}_high": lead.high}


def chosen_on(lead: Lead, what: str) -> str:
    """How both bests were chosen among the prompts; `what` names them."""
    return f"each chosen on other {what} than it is timed on, in {FOLDS} parts of {lead.requests}"


def contestants(rows: Iterable[Contender]) -> Section:
    """Versions and settings of each contestant, once."""
    once = {(row.group, row.name): row for row in rows}.values()
    first = {row.group: row.settings for row in reversed([*once])}
    frame = pd.DataFrame(
        {
            "contestant": row.name,
            "group": row.group,
            "version": row.version,
            "settings": _settings(row.settings, first[row.group]),
        }
        for row in once
    )
    rest = {name: cells.text(name) for name in ("group", "version", "settings")}
    return Section(
        key="contestants",
        title="Contestants and their settings",
        note="Of the first of a group all settings, of the others those that differ from its.",
        frame=frame,
        shown=cells.table(frame, CONTESTANT | rest),
        style="long",
        on_console=False,
    )


def _settings(own: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """All settings for the group's `first`, else what differs from the first's settings."""
    if own is first:
        return json.dumps(own, ensure_ascii=False)
    other = {name: value for name, value in own.items() if (name, value) not in first.items()}
    gone = [f"without {name}" for name in first if name not in own]
    return "; ".join([json.dumps(other, ensure_ascii=False), *gone])


def models(pair: PairSpec) -> str:
    """The pair's models, their data types, the device and the threads."""
    runner = pair.runner
    drafts = ", ".join(f"{name} = {model}" for name, model in pair.drafts.items()) or "none"
    return (
        f"target {pair.target} ({runner.target_dtype}), drafts {drafts} ({runner.draft_dtype});"
        f" {runner.device}, threads {runner.threads}"
    )
