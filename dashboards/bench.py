"""A benchmark written: its sections, Markdown, HTML and CSV, and its MLflow run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from plotly.offline import get_plotlyjs

from dashboards import look
from dashboards.drawings import Drawing, embed, log_figures, template
from dashboards.figures.bench import bench_figure, bench_svg
from dashboards.figures.flame import draw_stacks
from dashboards.papers import allowed
from dashboards.sections import Section
from dashboards.tracking import (
    as_metrics,
    as_params,
    connect,
    experiment_id_of,
    log_prompts,
    user_name,
)
from specdec_core.base.files import write_atomically
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.studies.bench import spec_bench
from specdec_core.studies.bench.limits import Split, of_oracle, split
from specdec_core.studies.bench.result import (
    OURS,
    BenchResult,
    Row,
    over,
    summary_frame,
    times_frame,
)
from specdec_core.tokens.statistics import Ratio

MOST_FUNCTIONS = 15
BESIDE = "of a round, no forward"
PARTS = {  # of a token's time, as shown
    "target_forward": "target forwards",
    "draft_forward": "draft forwards",
    "policy": "policy",
    "verify": "verification",
    "bookkeeping": "bookkeeping",
    "prefill": "prefill",
    "outside": "outside rounds",
}


# The sections


def sections(
    result: BenchResult, baseline: Sequence[spec_bench.Answer] | None = None
) -> list[Section]:
    """The benchmark's own parts. `baseline` are Spec-Bench answers to compare with instead of our
    autoregressive decoding's."""
    found = [speed_section(result, temperature) for temperature in result.temperatures]
    found += [own for t in result.temperatures if (own := limits_section(result, t)) is not None]
    if any(result.categories):
        found.append(tasks_section(result, baseline))
    found += [*forwards_section(result), *functions_section(result)]
    return [*found, contestants_section(result)]


def speed_section(result: BenchResult, temperature: float) -> Section:
    """Tokens a second and the ratios, the fastest first within each group."""
    frame = summary_frame(result)
    frame = frame[frame["temperature"] == temperature]
    order = {group: number for number, group in enumerate(result.groups)}
    frame = frame.assign(_group=frame["group"].map(order)).sort_values(
        ["_group", "tokens_per_second"], ascending=[True, False]
    )
    frame = frame.drop(columns="_group").reset_index(drop=True)
    against = {"autoregressive": "over our autoregressive"}
    against |= {group: f"over {_whose(group)} best" for group in order if group != OURS}
    greedy = temperature == 0
    rows = []
    for values in frame.to_dict("records"):
        cells = {"": values["contestant"], "tokens/s": f"{values['tokens_per_second']:.0f}"}
        for name, heading in against.items():
            cells[heading] = _interval(
                *(values[f"over_{name}{end}"] for end in ("", "_low", "_high"))
            )
        cells["MAT"] = _number(values["mean_accepted"], ".2f")
        if greedy:
            cells["equal to its own autoregressive"] = _equal(values, "own")
            if len(order) > 1:
                cells["equal to ours"] = _equal(values, "ours")
        rows.append(cells)
    note = (
        "Tokens a second: the median over repeats of each prompt's seconds a token, prefill"
        " included, then the mean over prompts; ratios with 95 % bootstrap intervals of the pairs."
        " A group's best is its fastest row on these prompts. MAT is tokens a target forward."
    )
    if greedy:
        note += (
            " Equal outputs are counted over all repeats, with the first token that differs: in"
            f" {result.pair.runner.target_dtype} "
            + (
                "ours must all be equal."
                if result.pair.runner.target_dtype == "float32"
                else "near-ties can flip, because forwards of other widths round differently."
            )
        )
    else:
        note += " Outputs are samples and of different lengths: times are compared by the token."
    best = [result.best(temperature, group) for group in result.groups]
    names = {(row.group, row.name) for row in best if row is not None}
    return Section(
        key=f"temperature_{temperature:g}",
        title=f"Temperature {temperature:g}",
        note=note,
        frame=frame,
        shown=pd.DataFrame(rows),
        figure=bench_figure(result, temperature),
        svg=bench_svg(result, temperature),
        marked=tuple(
            n
            for n, v in enumerate(frame.to_dict("records"))
            if (v["group"], v["contestant"]) in names
        ),
    )


def limits_frame(result: BenchResult, temperature: float) -> pd.DataFrame:
    """One row for each of ours that ran rounds: milliseconds of a token by where they went, and the
    speed as a share of what its forwards alone would allow and of the oracle's."""
    rows = []
    for row in result.at(temperature, OURS):
        parts, oracle = _limits(result, row)
        if parts is None:
            continue
        rows.append(
            {
                "contestant": row.name,
                "temperature": temperature,
                "ms_per_token": 1e3 * parts.whole,
                "of_forwards": parts.of_forwards,
                "of_oracle": oracle,
                "beside_forwards": parts.beside_share,
                **{f"{name}_ms": 1e3 * getattr(parts, name) for name in PARTS},
            }
        )
    return pd.DataFrame(rows)


def _limits(result: BenchResult, row: Row) -> tuple[Split | None, float | None]:
    if row.configuration is None:
        return None, None
    draft = row.configuration.draft_of(result.pair.drafts)
    return split(row, result.forwards, draft), of_oracle(result, row, draft)


def limits_section(result: BenchResult, temperature: float) -> Section | None:
    """How far from the physical limit each of ours is, and where the rest of the time goes."""
    frame = limits_frame(result, temperature)
    if not len(frame):
        return None
    frame = frame.sort_values("ms_per_token").reset_index(drop=True)
    rows = [
        {
            "": values["contestant"],
            "ms a token": f"{values['ms_per_token']:.2f}",
            "of its forwards' speed": f"{values['of_forwards']:.0%}",
            "of the oracle's": _number(values["of_oracle"], ".0%"),
            BESIDE: _number(values["beside_forwards"], ".0%"),
            **{
                heading: f"{values[f'{name}_ms'] / values['ms_per_token']:.0%}"
                for name, heading in PARTS.items()
            },
        }
        for values in frame.to_dict("records")
    ]
    note = (
        "Speed as a share of what its forwards alone would allow (those of the same widths, timed"
        f" by themselves in this run at {result.forwards['target'].context} tokens of context, and"
        " the prefill) and of the oracle's (SpecDec++, Thm 4.1: a chain that always stops before"
        " its next rejection, at the cost of its forwards alone; what also copies from the text can"
        " be faster); the part of a round that is no forward; and where a token's time went."
    )
    return Section(
        f"limits_{temperature:g}",
        f"Against the physical limit, temperature {temperature:g}",
        note,
        frame,
        pd.DataFrame(rows),
        brief=("", "ms a token", "of its forwards' speed", "of the oracle's", BESIDE),
    )


def tasks_frame(
    result: BenchResult, baseline: Sequence[spec_bench.Answer] | None = None
) -> pd.DataFrame:
    """One row a contestant, temperature and task, by Spec-Bench's definitions over all repeats."""
    tasks = spec_bench.tasks_of([category or "" for category in result.categories])
    rows = []
    for temperature in result.temperatures:
        own = result.autoregressive(temperature)
        against = baseline if baseline is not None else _answers(result, own) if own else None
        for row in result.at(temperature):
            found = _answers(result, row)
            for task in tasks:
                speed = spec_bench.speed(found, against, task)
                rows.append(
                    {
                        "contestant": row.name,
                        "group": row.group,
                        "temperature": temperature,
                        "task": task,
                        "tokens_per_second": speed.tokens_per_second,
                        "mean_accepted": speed.mean_accepted,
                        "speedup": speed.speedup,
                    }
                )
    return pd.DataFrame(rows)


def _answers(result: BenchResult, row: Row) -> list[spec_bench.Answer]:
    return [a for repeat in range(result.repeats) for a in spec_bench.answers(result, row, repeat)]


def tasks_section(
    result: BenchResult, baseline: Sequence[spec_bench.Answer] | None = None
) -> Section:
    """Spec-Bench's figures: speedup and mean accepted tokens of each task."""
    frame = tasks_frame(result, baseline)
    several = len(result.temperatures) > 1
    rows: dict[tuple[str, float], dict[str, str]] = {}
    for values in frame.to_dict("records"):
        key = (values["contestant"], values["temperature"])
        label = f"{key[0]}, T={key[1]:g}" if several else key[0]
        cells = rows.setdefault(key, {"": label})
        shown = f"{_number(values['speedup'], '.2f')}×"
        if not math.isnan(values["mean_accepted"]):
            shown += f" ({values['mean_accepted']:.2f})"
        cells[values["task"]] = shown
        if values["task"] == spec_bench.OVERALL:
            cells["tokens/s"] = f"{values['tokens_per_second']:.0f}"
    reference = "the given answers" if baseline is not None else "our autoregressive decoding"
    note = (
        f"By the definitions of Spec-Bench's script: speedup over {reference} (ratio of the means"
        " over questions of tokens a second) and, in brackets, mean accepted tokens (of all target"
        " forwards). A baseline's tokens are those it reports; the script counts its text again,"
        " less one a turn."
    )
    return Section("tasks", "Spec-Bench's tasks", note, frame, pd.DataFrame([*rows.values()]))


def forwards_section(result: BenchResult) -> Iterator[Section]:
    """What the forwards of the widths that occurred took."""
    frame = pd.DataFrame(
        {"model": model, "width": width, "context": own.context, "milliseconds": 1e3 * seconds}
        for model, own in result.forwards.items()
        for width, seconds in own.seconds.items()
    )
    if not len(frame):
        return
    shown = [
        {
            "": model,
            **{f"{w}": f"{1e3 * s:.2f}" for w, s in own.seconds.items()},
        }
        for model, own in result.forwards.items()
    ]
    text = pd.DataFrame(shown).fillna("–")
    text = text[["", *sorted((c for c in text.columns if c), key=int)]]
    note = (
        "Medians, milliseconds, by how many tokens are fed at once, measured between the repeats."
    )
    yield Section("forwards", "Forwards", note, frame, text, on_console=False)


def functions_section(result: BenchResult) -> Iterator[Section]:
    """Where the time of our best goes, function by function, as a flame graph."""
    profiled = result.profiled
    if profiled is None or not profiled.seconds:
        return
    frame = pd.DataFrame(sorted(profiled.seconds.items()), columns=["stack", "seconds"])
    own = frame.groupby(frame["stack"].str.rpartition(";")[2])["seconds"].sum()
    shares = (own / own.sum()).nlargest(MOST_FUNCTIONS)
    note = (
        f"{profiled.contestant} at temperature {profiled.temperature:g}, decoding some of the"
        " prompts once more: the share of the time that each function was seen in, what it calls"
        " left out. The CSV has the whole stacks."
    )
    yield Section(
        key="functions",
        title="Where the time goes, function by function",
        note=note,
        frame=frame,
        shown=pd.DataFrame({"": shares.index, "share": [f"{share:.1%}" for share in shares]}),
        figure=draw_stacks({tuple(k.split(";")): v for k, v in profiled.seconds.items()}),
        on_console=False,
    )


def contestants_section(result: BenchResult) -> Section:
    """Versions and settings of everybody."""
    rows = [
        {
            "contestant": row.name,
            "group": row.group,
            "version": row.version,
            "settings": json.dumps(row.settings, ensure_ascii=False),
        }
        for row in {(row.group, row.name): row for row in result.rows}.values()
    ]
    frame = pd.DataFrame(rows)
    shown = frame.rename(columns={"contestant": ""})
    return Section("contestants", "Who took part", "", frame, shown, on_console=False)


# What came out, in words


def findings(result: BenchResult) -> list[str]:
    """The lines that a reader looks for first."""
    lines = []
    for best in result.headlines():
        chosen = (
            f"both chosen on {len(result.ids) - best.prompts} prompts, compared on the"
            f" {best.prompts} others"
            if best.held_out
            else f"both chosen on the same {best.prompts} prompts, which flatters both"
        )
        lines.append(
            f"temperature {best.temperature:g}: our best, {best.ours}, is"
            f" {_interval(best.ratio, best.low, best.high)} {_whose(best.group)} best,"
            f" {best.theirs} ({chosen})"
        )
    for temperature in result.temperatures:
        row, baseline = result.best(temperature, OURS), result.autoregressive(temperature)
        if row is None or baseline is None:
            continue
        ratio = over(row, baseline)
        line = (
            f"temperature {temperature:g}: {row.name} writes {row.tokens_per_second:.0f} tokens/s,"
            f" {_ratio(ratio)} our autoregressive decoding"
        )
        parts, oracle = _limits(result, row)
        if parts is not None:
            line += f"; {parts.of_forwards:.0%} of what its forwards alone would allow"
            line += f" and {oracle:.0%} of the oracle's speed" if oracle is not None else ""
            shares = {heading: getattr(parts, n) / parts.whole for n, heading in PARTS.items()}
            shown = sorted(shares.items(), key=lambda item: -item[1])
            line += f"; its time: {', '.join(f'{h} {share:.0%}' for h, share in shown)}"
        lines.append(line)
    for row in result.unequal():
        baseline = result.autoregressive(row.temperature)
        own = row.agreement(baseline)
        lines.append(
            f"NOT LOSSLESS: {own.compared - own.equal} of {own.compared} outputs of {row.name}"
            f" differ from autoregressive decoding's in float32, first at token {own.first}"
        )
    return lines


def setting(result: BenchResult) -> list[str]:
    """How this was measured."""
    runner, pair = result.pair.runner, result.pair
    drafts = ", ".join(f"{name} = {model}" for name, model in pair.drafts.items()) or "none"
    prompts = result.prompts
    return [
        f"`{result.command}`",
        f"target {pair.target} ({runner.target_dtype}), drafts {drafts} ({runner.draft_dtype});"
        f" {runner.device}, threads {runner.threads}",
        f"{prompts.count} prompts of {prompts.source} (sha256 {prompts.digest[:16]}…),"
        f" {result.max_new_tokens} new tokens, repeats {result.repeats}: every prompt is decoded by"
        " everybody in turn, another one beginning each time",
        *result.notes,
        *(f"{name.replace('_', ' ')}: {value}" for name, value in result.environment.items()),
    ]


# Files


def write_bench(
    result: BenchResult,
    shown: Sequence[Section],
    folder: Path,
    decode: Callable[[list[int]], str],
) -> Path:
    """Write everything into `folder`: `report.md`, `report.html`, `bench.json`, `times.csv`,
    `summary.csv`, each section's CSV and SVG, and Spec-Bench's answer files where prompts have
    categories. `decode` makes text of tokens. Returns the Markdown report."""
    result.save(folder)
    write_atomically(folder / "times.csv", times_frame(result).to_csv(index=False))
    write_atomically(folder / "summary.csv", summary_frame(result).to_csv(index=False))
    for section in shown:
        write_atomically(folder / f"{section.key}.csv", section.frame.to_csv(index=False))
        if section.svg is not None:
            write_atomically(folder / f"{section.key}.svg", section.svg)
    if any(result.categories):
        for number, row in enumerate(result.rows):
            for repeat in range(result.repeats):
                name = f"{number:02}-{row.group}-{allowed(row.name)}-T{row.temperature:g}.jsonl"
                found = spec_bench.answers(result, row, repeat, decode)
                path = folder / "spec_bench" / f"run_{repeat + 1}" / name
                write_atomically(path, spec_bench.dump(found))
    write_atomically(folder / "report.html", page(result, shown))
    return write_atomically(folder / "report.md", document(result, shown))


def document(result: BenchResult, shown: Sequence[Section]) -> str:
    """The report as Markdown."""
    parts = [
        f"# Benchmark of {result.pair.name}, {result.started:%Y-%m-%d %H:%M} UTC",
        "\n".join(f"- {line}" for line in findings(result)),
        *(section.markdown() for section in shown),
        "## How it was measured",
        "\n".join(f"- {line}" for line in setting(result)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def page(result: BenchResult, shown: Sequence[Section]) -> str:
    """The report as an HTML page that needs no network."""
    return template("bench.jinja").render(
        result=result,
        title=f"Benchmark of {result.pair.name}",
        findings=findings(result),
        sections=[
            (own, embed(own.key, Drawing(own.figure)) if own.figure is not None else None)
            for own in shown
        ],
        setting=setting(result),
        neutral=[look.INK, look.MUTED, look.PAPER],
        plotly=get_plotlyjs(),
    )


# MLflow


def log_bench(
    result: BenchResult, shown: Sequence[Section], prompts: Sequence[Prompt], folder: Path
) -> str:
    """A run in the pair's experiment with a nested run a contestant and temperature: speeds, ratios
    and shares as metrics, settings as parameters, the prompts as a dataset, and the folder's files
    as artifacts. Returns the run's id."""
    client = connect()
    experiment = experiment_id_of(client, result.pair.name)
    tags = {
        "mlflow.user": user_name(),
        "mlflow.source.name": "specdec bench",
        "prompts": result.prompts.source,
        "prompts_digest": result.prompts.digest,
        **result.environment,
    }
    run_id = client.create_run(experiment, run_name=f"bench {result.name}", tags=tags).info.run_id
    params = {
        "pair": result.pair.model_dump(mode="json"),
        "prompts": {"source": result.prompts.source, "count": result.prompts.count},
        "max_new_tokens": result.max_new_tokens,
        "repeats": result.repeats,
    }
    metrics = {
        f"over_{allowed(best.group)}_T{best.temperature:g}{end}": value
        for best in result.headlines()
        for end, value in (("", best.ratio), ("_low", best.low), ("_high", best.high))
    }
    client.log_batch(run_id, params=as_params(params), metrics=as_metrics(metrics))
    log_prompts(client, run_id, result.prompts, prompts, "bench")
    for row, values in zip(result.rows, summary_frame(result).to_dict("records"), strict=True):
        _log_row(client, experiment, run_id, result, row, values)
    client.log_artifacts(run_id, str(folder))
    drawings = {own.key: Drawing(own.figure) for own in shown if own.figure is not None}
    log_figures(client, run_id, drawings)
    client.set_terminated(run_id)
    return run_id


def _log_row(
    client: Any,
    experiment: str,
    parent: str,
    result: BenchResult,
    row: Row,
    values: Mapping[str, Any],
) -> None:
    metrics = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and not pd.isna(value)
    }
    parts, oracle = _limits(result, row)
    if parts is not None:
        metrics |= {
            "of_forwards": parts.of_forwards,
            "beside_forwards": parts.beside_share,
        }
        metrics |= {f"{name}_ms": 1e3 * getattr(parts, name) for name in PARTS}
    if oracle is not None:
        metrics["of_oracle"] = oracle
    tags = {
        "mlflow.parentRunId": parent,
        "group": row.group,
        "version": row.version,
        "lossless": str(row.lossless).lower(),
        "temperature": f"{row.temperature:g}",
    }
    if row.configuration is not None:
        tags["config_id"] = row.configuration.id
    name = f"{row.group}: {row.name}, T={row.temperature:g}"
    run_id = client.create_run(experiment, run_name=name, tags=tags).info.run_id
    client.log_batch(run_id, metrics=as_metrics(metrics), params=as_params(row.settings))
    client.set_terminated(run_id)


# Small things


def _whose(group: str) -> str:
    return f"{group}'" if group.endswith("s") else f"{group}'s"


def _interval(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.2f}×" if low == high else f"{value:.2f}× ({low:.2f}–{high:.2f})"


def _ratio(ratio: Ratio) -> str:
    return _interval(ratio.value, ratio.low, ratio.high)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or math.isnan(value) else format(value, form)


def _equal(values: Mapping[str, Any], name: str) -> str:
    if values[f"compared_{name}"] is None or pd.isna(values[f"compared_{name}"]):
        return "–"
    text = f"{values[f'equal_{name}']:.0f} of {values[f'compared_{name}']:.0f}"
    first = values[f"first_difference_{name}"]
    return text if first is None or pd.isna(first) else f"{text}, from {first:.0f}"
