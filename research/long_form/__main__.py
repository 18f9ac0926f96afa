"""Measure speculative decoding along long texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.console import console, deliver, run
from jobs.options import (
    Drafts,
    DType,
    MaxLength,
    MaybeChatTemplate,
    MaybeLimit,
    MaybePrompts,
    Name,
    Target,
    check_name,
    given,
    pair_changes,
    sizes,
)
from specdec_core.base.files import atomic_path
from specdec_core.base.workspace import workspace

ROWS = Path(__file__).with_name("bundled.yaml")


def main(
    rows: Annotated[
        Path, Option(help="YAML with the configurations, as `specdec bench offline`'s.")
    ] = ROWS,
    target: Target = None,
    draft: Drafts = None,
    prompts: MaybePrompts = None,
    chat_template: MaybeChatTemplate = None,
    limit: MaybeLimit = None,
    contexts: Annotated[
        str | None,
        Option(
            help="Ends of the ranges of context, as 128,512,2048: texts are written up to the last"
            " one; unset, 128 to 8192, as far as the pair holds."
        ),
    ] = None,
    max_length: MaxLength = None,
    temperature: Annotated[float | None, Option(help="0 is greedy.")] = None,
    repeats: Annotated[int | None, Option(min=1, help="Times each prompt is continued.")] = None,
    compile: Annotated[
        bool | None,
        Option("--compile/--no-compile", help="Compiled graphs; unset, as in the pair."),
    ] = None,
    dtype: DType = None,
    name: Name = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Decode again what an interrupted run has.")
    ] = False,
) -> None:
    """Continue prompts until the context is full, whatever ends the text before, autoregressively
    and with each configuration of a file, interleaved; report speedup, accepted tokens and entropy
    by the length of the context (SVIP, §3.1). Interrupted, the same command resumes. Run it on an
    otherwise idle machine."""
    check_name(name)
    # torch and MLflow take seconds to import.
    from dashboards.progress import ConsoleProgress
    from dashboards.sections import ReportOrigin
    from research.long_form.report import report
    from research.long_form.study import LongFormPlan, measure_long_form, ranges_for
    from specdec_core.engine.turns import requests_of
    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import digest, load_prompts

    runner = given(compile=compile, target_dtype=dtype, draft_dtype=dtype, max_length=max_length)
    changes = {**pair_changes(target, draft, None), **given(runner=runner or None)}
    options = given(
        pair=changes or None,
        prompts=given(source=prompts, limit=limit, chat_template=chat_template) or None,
        contexts=sizes(contexts, "--contexts") if contexts is not None else None,
        temperatures=None if temperature is None else [temperature],
        repeats=repeats,
    )
    plan = LongFormPlan.load(rows, **options)
    with console.status(f"loading {plan.pair.name}"):
        pair = load_pair(plan.pair)
    asked = plan.prompts
    loaded = load_prompts(asked.source, asked.limit, pair.tokenizer, asked.chat_template)
    tokens = [request.tokens for request in requests_of(loaded, pair, 1)]
    with ConsoleProgress(console) as progress:
        result = measure_long_form(
            pair,
            plan.configurations(str(rows)),
            tokens,
            plan.contexts or ranges_for(pair.max_length, tokens),
            plan.temperatures[0],
            plan.repeats,
            progress,
            workspace() / "long-form" / ".texts",
            fresh,
        )
    origin = ReportOrigin(
        name=name or plan.pair.name,
        pair=plan.pair.name,
        notes=[
            f"{len(loaded)} prompts of {asked.source}, continued to {result.edges[-1]:,} tokens"
            " whatever ended the text before",
            f"temperature {plan.temperatures[0]:g}, the same noise for all: in float32 they write"
            " the same text",
            "repetitions of greedy decoding flatter every draft; SVIP samples at temperature 1",
        ],
        params={
            "prompts": asked.source,
            "chat_template": asked.chat_template,
            "prompts_digest": digest(loaded),
            "contexts": ",".join(map(str, result.edges)),
            "temperature": plan.temperatures[0],
            "repeats": plan.repeats,
        },
    )
    folder = workspace() / "long-form" / origin.name
    deliver(report(result, origin), folder, "long-form")
    with atomic_path(folder / "rounds.parquet") as path:
        result.rounds.to_parquet(path, index=False, compression="zstd")


if __name__ == "__main__":
    run(main)
