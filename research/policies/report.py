"""Length policies compared by replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from dashboards import cells
from dashboards.reports.sentences import sentences, tooltip
from dashboards.sections import Report, ReportOrigin, Section, metric_name
from research.policies.study import (
    ADAPTIVE,
    FIXED,
    ComparedPolicy,
    against_product,
    best_of_families,
    everything,
)
from research.policies.study import transfers as choices_elsewhere
from specdec_core.config import Configuration, distinct_labels
from specdec_core.search.results import ORACLE

COLUMNS = {
    "family": cells.text("family"),
    "best configuration": cells.text("configuration"),
    "of": cells.text("tried"),
    "ms a token": cells.number("latency_ms", ".3f"),
    "speedup": cells.number("speedup", ".3f×"),
    "over best fixed K": cells.number("over_fixed", "+.1%"),
    "of the oracle's": cells.number("of_oracle", ".1%"),
    "discard rate": cells.number("discard_rate", ".3f"),
    "verific. rate": cells.number("verification_rate", ".3f"),
    "MAT": cells.number("mat", ".2f"),
}
AGAINST = {
    "family": cells.text("family"),
    "head": cells.text("head"),
    "chosen": cells.text("configuration"),
    "of": cells.text("tried"),
    "over the confidence product": cells.number("over", ".3f×"),
    "95 %": lambda row: f"{row['over_low']:.3f}–{row['over_high']:.3f}",
}
WORTH = 1.02  # a head that is not so many times as fast as the product is not worth training
# A label says its family, and a console has 80 columns.
BRIEF = [heading for heading in COLUMNS if heading not in ("family", "of")]
METRICS = ("latency_ms", "speedup", "over_fixed", "of_oracle")
NOT_ADAPTIVE = (FIXED, ORACLE, "prompt_lookup", "autoregressive")


def report(sets: list[ComparedPolicy], origin: ReportOrigin) -> Report:
    """The best of each family on each recording, and how choices do on the other recordings."""
    best, transfers = best_of_families(sets), choices_elsewhere(sets)
    against = pd.concat([against_product(compared) for compared in sets])
    configurations = {t.id: t.configuration for compared in sets for t in compared.trials}
    return Report(
        command="policies",
        title="Length policies compared by replay",
        origin=origin,
        findings=[*headlines(best), *verdicts(against)],
        parts=[
            *(
                _families(rows, str(recording), str(draft), configurations)
                for (recording, draft), rows in best.groupby(["recording", "draft"], sort=False)
            ),
            *(
                _against(rows, str(recording), str(draft))
                for (recording, draft), rows in _groups(against)
            ),
            *(
                _transfers(rows, str(draft))
                for draft, rows in transfers.groupby("draft", sort=False)
                if len(sets) > 1
            ),
            sentences(_named(best, configurations), on_console=False),
        ],
        frames={
            "configurations": everything(sets),
            "families": best,
            "transfer": transfers,
            **({} if against.empty else {"against": against}),
        },
        run_name=f"policies on {origin.name}",
        metrics=_metrics(best, transfers),
        tags={"counted": "replay"},
    )


def headlines(best: pd.DataFrame) -> list[str]:
    """For each recording and draft, how the best adaptive policy compares with the best fixed K."""
    lines = []
    for (recording, draft), rows in best.groupby(["recording", "draft"], sort=False):
        adaptive = rows[~rows["family"].isin(NOT_ADAPTIVE)]
        if not draft or adaptive.empty:
            continue
        top = adaptive.iloc[0]
        line = f"{recording}, {draft}: {top['configuration']}, {top['speedup']:.3f}×"
        if not cells.unknown(top["over_fixed"]):
            line += f", {top['over_fixed']:+.1%} over the best fixed K"
        if not cells.unknown(top["of_oracle"]):
            line += f", {top['of_oracle']:.1%} of the oracle's speedup"
        lines.append(line)
    return lines


def verdicts(against: pd.DataFrame) -> list[str]:
    """Whether anything trained is more than 2 % faster than the confidence product."""
    lines = []
    for (recording, draft), rows in _groups(against):
        heads = rows[rows["head"] != ""]
        if heads.empty:
            continue
        top = heads.iloc[0]
        shown = f"{top['over']:.3f}× ({top['over_low']:.3f}–{top['over_high']:.3f})"
        verdict = (
            "a head beats the confidence product by more than 2 %"
            if top["over_low"] > WORTH
            else "no head is shown to beat the confidence product by more than 2 %"
        )
        lines.append(f"{recording}, {draft}: {verdict}; the best, {top['head']}: {shown}")
    return lines


def _groups(against: pd.DataFrame) -> Iterable[tuple[Any, pd.DataFrame]]:
    return against.groupby(["recording", "draft"], sort=False) if len(against) else ()


def _against(rows: pd.DataFrame, recording: str, draft: str) -> Section:
    """Every family and head against the confidence product."""
    rows = rows.reset_index(drop=True)
    return Section(
        key=f"against {recording} {draft}",
        title=f"Against the confidence product · {recording} · {draft}",
        note=f"Chosen on some of the prompts, reported on {rows['prompts'][0]} others; intervals "
        "by a bootstrap over prompts.",
        shown=cells.table(rows, AGAINST),
        marked=[n for n, low in enumerate(rows["over_low"]) if low > WORTH],
    )


def _named(
    best: pd.DataFrame, configurations: Mapping[str, Configuration]
) -> list[tuple[str, Configuration]]:
    shown = [configurations[key] for key in best["config_id"].unique()]
    return list(zip(distinct_labels(shown).values(), shown, strict=True))


def _families(
    best: pd.DataFrame, recording: str, draft: str, configurations: Mapping[str, Configuration]
) -> Section:
    """The best of each family; the fastest that is no oracle is marked."""
    speedups = best["speedup"].where(best["family"] != ORACLE)
    return Section(
        key=f"families {recording} {draft}",
        title=f"{recording} · {draft or 'no draft model'}",
        shown=cells.table(best, COLUMNS),
        tooltips=[tooltip(configurations[key]) for key in best["config_id"]],
        brief=BRIEF,
        marked=[n for n, value in enumerate(speedups) if value == speedups.max()],
    )


def _transfers(transfers: pd.DataFrame, draft: str) -> Section:
    """How much slower a choice is on another recording than the choice made there."""
    index = ["family", "chosen_on", "configuration"]
    wide = transfers.pivot(index=index, columns="used_on", values="loss")
    names = list(transfers["used_on"].unique())
    order = pd.MultiIndex.from_frame(transfers[index].drop_duplicates())
    wide = wide.loc[order, names].reset_index()
    losses = {
        f"loss on {name}": lambda row, name=name: (
            cells.NONE if row["chosen_on"] == name else cells.as_number(row[name], ".2%")
        )
        for name in names
    }
    return Section(
        key=f"transfer {draft}",
        title=f"Chosen on one set, used on another · {draft or 'no draft model'}",
        note="How much slower the choice made on one set is on another than the choice made there.",
        shown=cells.table(
            wide,
            {
                "family": cells.text("family"),
                "chosen on": cells.text("chosen_on"),
                "configuration": cells.text("configuration"),
                **losses,
            },
        ),
        marked=[int(n) for n in wide.index[wide["family"] == ADAPTIVE]],
    )


def _metrics(best: pd.DataFrame, transfers: pd.DataFrame) -> dict[str, float]:
    metrics = {
        f"{metric_name(row['recording'], row['draft'] or 'none', row['family'])}.{quantity}": row[
            quantity
        ]
        for row in best.to_dict("records")
        for quantity in METRICS
        if not cells.unknown(row[quantity])
    }
    for row in transfers.to_dict("records"):
        if row["chosen_on"] != row["used_on"]:
            parts = (row["chosen_on"], row["used_on"], row["draft"] or "none", row["family"])
            metrics[f"transfer.{metric_name(*parts)}.loss"] = row["loss"]
    return metrics
