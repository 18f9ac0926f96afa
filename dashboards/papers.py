"""The papers' tables written: Markdown, CSV, a page with figures, and their MLflow run."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from dashboards import look
from dashboards.drawings import Drawing, embed, log_figures, template
from dashboards.figures.papers import QUANTITIES, paper_figure
from dashboards.paper_tables import LEGEND, Sheet, frame, markdown, over, sheets
from dashboards.tracking import (
    as_metrics,
    as_params,
    connect,
    experiment_id_of,
    runs_where,
    user_name,
)
from specdec_core.base.files import write_atomically
from specdec_core.config import DrafterSettings
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.search.results import Timing
from specdec_core.studies.papers.result import Measured, PapersResult
from specdec_core.tokens.statistics import Ratio

TITLE = "The papers' tables in our terms"


def findings(result: PapersResult) -> list[str]:
    """For each prompt set the fastest lossless configuration, and how it compares with the best
    plain chain; each bandit against its best arm; and where each method of a table that varies a
    number is best."""
    lines: list[str] = []
    for prompts in result.sets:
        timed = [
            m
            for m in result.measured
            if m.prompts == prompts
            and m.timing is not None
            and m.configuration.sampling.greedy
            and m.configuration.lossless
        ]
        drafting = [m for m in timed if m.configuration.drafter is not None]
        if not drafting:
            continue
        best = _fastest(drafting)
        assert best.timing is not None
        line = f"{prompts}: fastest is {name_of(result, best)}, {_interval(best.timing)}"
        plain = [m for m in drafting if m.configuration.family == "fixed"]
        if plain and (chain := _fastest(plain)) is not best:
            ratio = over(best.timing, chain.timing)
            line += (
                f" autoregressive decoding and {_ratio(ratio)} the best plain chain "
                f"({chain.configuration.label})"
            )
        else:
            line += " autoregressive decoding"
        lines.append(line + ".")
        lines += _bandits(result, prompts, drafting)
    return lines + [line for key in result.tables() for line in _peaks(result, key)]


def _bandits(result: PapersResult, prompts: str, drafting: Sequence[Measured]) -> Iterator[str]:
    """A line for all bandits over the same arms; none where an arm was not timed."""
    timings = {m.configuration.drafter: m for m in drafting}
    races: dict[tuple[DrafterSettings, ...], list[Measured]] = {}
    for m in drafting:
        drafter = m.configuration.drafter
        if isinstance(drafter, BanditSettings) and all(arm in timings for arm in drafter.arms):
            races.setdefault(drafter.arms, []).append(m)
    for arms, bandits in races.items():
        best = _fastest([timings[arm] for arm in arms])
        assert best.timing is not None
        shown = []
        for m in bandits:
            assert m.timing is not None
            ratio = over(m.timing, best.timing)
            shown.append(f"{name_of(result, m)} {_ratio(ratio)}{', a tie' if ratio.tied else ''}")
        yield f"{prompts}: against the best arm, {name_of(result, best)}: {'; '.join(shown)}."


def _peaks(result: PapersResult, key: str) -> Iterator[str]:
    """At which value of what a table varies the first quantity of each method is highest."""
    table = result.plan.tables[key]
    heading, form, _ = QUANTITIES[table.columns[0]]
    for prompts in result.sets_of(table) if table.varied else []:
        shown = []
        for method in result.plan.methods(key):
            values = [result.value(prompts, c, table.columns[0]) for c in method.configurations]
            known = {v: at for v, at in zip(values, table.values, strict=True) if not math.isnan(v)}
            if len(known) > 1:
                best = max(known)
                shown.append(f"{method.label} at {known[best]} ({form.format(best)})")
        if shown:
            yield f"{prompts}: {table.varied} of the highest {heading}: {'; '.join(shown)}."


def _fastest(measured: Sequence[Measured]) -> Measured:
    return max(measured, key=lambda m: m.timing.tokens_per_second if m.timing else 0.0)


def name_of(result: PapersResult, measured: Measured) -> str:
    """What the first table that has it calls a configuration, and its label; a bandit's lists all
    of its arms and is left out."""
    label = measured.configuration.label
    for key, table in result.tables().items():
        if measured.prompts not in table.prompts:
            continue
        for method in result.plan.methods(key):
            if measured.configuration in method.configurations:
                drafter = measured.configuration.drafter
                return (
                    method.name
                    if isinstance(drafter, BanditSettings)
                    else f"{method.name} ({label})"
                )
    return label


def _interval(timing: Timing) -> str:
    return f"{timing.speedup:.2f}× ({timing.low:.2f}–{timing.high:.2f})"


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"


def notes(result: PapersResult) -> list[str]:
    """What differs from the papers, and how this was measured."""
    runner, plan = result.pair.runner, result.plan
    times = "once" if plan.repeats == 1 else f"{plan.repeats} times"
    drafts = ", ".join(f"{name} = {model}" for name, model in result.pair.drafts.items())
    missing = [
        name
        for name in dict.fromkeys(n for t in plan.tables.values() for n in t.prompts)
        if name not in result.sets
    ]
    lines = [
        *plan.notes,
        f"Models: target {result.pair.target} ({runner.target_dtype}), drafts {drafts or 'none'} "
        f"({runner.draft_dtype}); {runner.device}, {runner.threads} thread"
        + ("s" if runner.threads != 1 else "")
        + ".",
        "Prompts: "
        + "; ".join(f"{name}: {own.count} of {own.source}" for name, own in result.sets.items())
        + f"; at most {plan.max_new_tokens} new tokens.",
        f"Every prompt is decoded by all configurations in turn, {times} where a time is "
        "shown; a ratio is autoregressive time over the method's, per prompt the median of the "
        "repeats, summed over prompts, with a 95 % bootstrap interval of the pairs. What learns "
        "begins every repeat of a prompt set anew.",
        LEGEND,
    ]
    if missing:
        lines.append(f"Left out, because their prompts are not here: {', '.join(missing)}.")
    drafted = [
        (m.timing.differing_outputs, result.sets[m.prompts].count)
        for m in result.measured
        if m.timing and m.configuration.drafter and m.configuration.drafter.lossless
        if m.configuration.sampling.greedy
    ]
    differing, outputs = (
        (sum(column) for column in zip(*drafted, strict=True)) if drafted else (0, 0)
    )
    if differing:
        lines.append(
            f"{differing} of {outputs:,} greedy outputs of lossless methods differ from "
            "autoregressive decoding's: verifying several tokens at once rounds differently, and "
            f"in {runner.target_dtype} near-ties flip."
        )
    return lines


def write_papers(result: PapersResult, folder: Path) -> list[Path]:
    """Write `<key>.md` and `<key>.csv` of every table, `papers.md` with all of them and
    `papers.html`, which needs no network; returns their paths, the page last."""
    shown = sheets(result)
    files = []
    for sheet in shown:
        files.append(write_atomically(folder / f"{sheet.key}.md", markdown(sheet)))
        table = frame(result, sheet.key).to_csv(index=False)
        files.append(write_atomically(folder / f"{sheet.key}.csv", table))
    files.append(write_atomically(folder / "papers.md", document(result, shown)))
    files.append(write_atomically(folder / "papers.html", page(result, shown)))
    return files


def document(result: PapersResult, shown: Sequence[Sheet]) -> str:
    """All tables as one Markdown page."""
    parts = [f"# {TITLE}", result.pair.name, "\n".join(f"- {line}" for line in findings(result))]
    parts += [markdown(sheet) for sheet in shown]
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes(result))]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def page(result: PapersResult, shown: Sequence[Sheet]) -> str:
    """All tables and figures as an HTML page."""
    return template("papers.jinja").render(
        result=result,
        title=TITLE,
        findings=findings(result),
        sheets=[(own, embed(own.key, Drawing(paper_figure(result, own.key)))) for own in shown],
        notes=notes(result),
        facts=list(result.environment.items()),
        neutral=[look.INK, look.MUTED, look.PAPER],
        plotly=get_plotlyjs(),
    )


def log_papers(result: PapersResult, folder: Path, files: Sequence[Path]) -> str:
    """An MLflow run of the tables in the pair's experiment: every number as a metric
    `<table>.<method>.<prompts>.<quantity>`, the files and figures as artifacts. A run that an
    interrupted process began for this folder is taken up again. Returns the run's id."""
    client = connect()
    experiment = experiment_id_of(client, result.pair.name)
    where = f"{platform.node()}:{folder.resolve()}".replace("'", "_")
    methods = [m for key in result.tables() for m in result.plan.methods(key)]
    lossy = dict.fromkeys(method.name for method in methods if not method.lossless)
    tags = {
        "specdec.folder": where,
        "lossy": ", ".join(lossy) or "none",
        "mlflow.user": user_name(),
        "mlflow.source.name": "specdec papers",
        **{f"prompts.{name}": own.digest for name, own in result.sets.items()},
        **result.environment,
    }
    earlier = runs_where(client, experiment, f"tags.`specdec.folder` = '{where}'")
    run = next((run for run in earlier if run.info.status != "FINISHED"), None)
    if run is None:
        run = client.create_run(experiment, run_name=f"papers {result.name}", tags=tags)
    run_id = run.info.run_id
    params = {
        "pair": result.pair.model_dump(mode="json"),
        "prompts": {
            name: {"source": own.source, "count": own.count} for name, own in result.sets.items()
        },
        "max_new_tokens": result.plan.max_new_tokens,
        "repeats": result.plan.repeats,
    }
    client.log_batch(run_id, params=as_params(params))
    metrics = as_metrics(_metrics(result))
    for start in range(0, len(metrics), 1000):  # as many as the store takes at once
        client.log_batch(run_id, metrics=metrics[start : start + 1000])
    for file in [*files, folder / "papers.json", folder / "plan.yaml"]:
        client.log_artifact(run_id, str(file))
    drawings = {key: Drawing(paper_figure(result, key)) for key in result.tables()}
    log_figures(client, run_id, drawings)
    client.set_terminated(run_id)
    return run_id


def _metrics(result: PapersResult) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for key, table in result.tables().items():
        for row in frame(result, key).to_dict("records"):
            parts = [key, row["method"], row["prompts"]]
            parts += [f"{table.varied}_{row[table.varied]}"] if table.varied else []
            for quantity in table.columns:
                if not math.isnan(row[quantity]):
                    found[".".join(map(allowed, (*parts, quantity)))] = row[quantity]
    return found


_SPELT = {"λ": "lambda", "γ": "gamma", "α": "alpha", "×": "x", "+": "plus", "=": "_"}


def allowed(name: str) -> str:
    """MLflow allows letters, digits and _ - in a part of a metric's name."""
    spelt = "".join(_SPELT.get(c, c) for c in name)
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in spelt)
