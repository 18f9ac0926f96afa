"""Record what the draft models of a pair would do, to train heads on it and to replay it."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from jobs.console import console, program, run
from jobs.profile import chosen_pair
from jobs.sweep import given
from specdec_core.base.workspace import workspace
from specdec_core.config import Sampling, parse

if TYPE_CHECKING:
    from cluster.recording import RecordingPlan
    from specdec_core.recordings.schema import Recording


def main(
    target: Annotated[str | None, Option(help="target: hub id, folder, bundled:…")] = None,
    draft: Annotated[
        list[str] | None, Option(help="draft model, [name=]model; may be repeated")
    ] = None,
    config: Annotated[
        Path | None, Option(help="sweep file whose pair, prompts, sampling and length to take")
    ] = None,
    prompts: Annotated[
        str | None, Option(help="JSONL file, hub id, bundled:…; unset, bundled:train")
    ] = None,
    limit: Annotated[int | None, Option(help="use the first n prompts")] = None,
    max_new_tokens: Annotated[int | None, Option(help="tokens for each prompt; unset, 128")] = None,
    temperature: Annotated[float | None, Option(help="0 is greedy")] = None,
    top_k: Annotated[int | None, Option(help="sample from the k likeliest; 0, from all")] = None,
    top_p: Annotated[float | None, Option(help="sample from the likeliest of this mass")] = None,
    coupling: Annotated[
        Literal["rejection", "gumbel"] | None,
        Option(help="acceptance rule when sampling; a recording with gumbel can be replayed"),
    ] = None,
    max_draft: Annotated[int | None, Option(help="longest draft that can be replayed")] = None,
    mixing: Annotated[
        float | None,
        Option(help="share of target tokens in the heads' training examples; 0, no examples"),
    ] = None,
    continuations: Annotated[
        bool, Option(help="record what is drafted behind disagreements; replay needs it")
    ] = True,
    name: Annotated[str | None, Option(help="name of the recording's folder")] = None,
    out: Annotated[
        Path | None, Option(help="the folder itself; unset, traces/<name> in the workspace")
    ] = None,
) -> None:
    """Run a pair over prompts once and write down, at every position, what its drafts would do.

    Every draft length, policy and head can be replayed from that without a model, and heads are
    trained on it. Interrupted, the same command goes on where it stopped.
    """
    base: dict[str, Any] = {}
    if config is not None:
        from specdec_core.search.plan import load_plan

        plan = load_plan(config)
        base = {key: getattr(plan, key) for key in ("pair", "prompts", "max_new_tokens")}
        base["sampling"] = plan.sampling
    sampling = given(temperature=temperature, top_k=top_k, top_p=top_p, coupling=coupling)
    sampling = parse(Sampling, {**_dumped(base.get("sampling")), **sampling}, "sampling")

    # Ray and torch take seconds to import.
    from cluster.recording import RecordingPlan

    source = given(source=prompts, limit=limit)
    values = {
        **base,
        "pair": chosen_pair(base.get("pair", RecordingPlan().pair), target, draft),
        "prompts": {**_dumped(base.get("prompts", RecordingPlan().prompts)), **source},
        "sampling": sampling,
        "continuations": continuations,
        **given(max_new_tokens=max_new_tokens, max_draft=max_draft, mixing=mixing),
    }
    wanted = parse(RecordingPlan, {k: _dumped(v) for k, v in values.items()}, "recording")
    show(record(wanted, name, out))


def record(plan: RecordingPlan, name: str | None = None, out: Path | None = None) -> Recording:
    """Record `plan` and show how that goes; interrupted, say how to go on."""
    from cluster.recording import run_recording
    from dashboards.recording import RecordingProgress

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with RecordingProgress(console) as progress:
            return run_recording(plan, workspace(), name, out, progress)
    except KeyboardInterrupt:
        console.print("interrupted; the same command resumes")
        sys.exit(130)


def _dumped(value: Any) -> Any:
    if value is None:
        return {}
    return value.model_dump() if hasattr(value, "model_dump") else value


def show(recording: Recording) -> None:
    """What the recording holds, and what to do with it."""
    from dashboards.recording import contents, recording_table

    header = recording.header
    console.print(recording_table(recording))
    console.print(contents(recording))
    console.print(f"recording {recording.folder}", markup=False, soft_wrap=True)
    commands = {}
    if header.mixing:
        commands["train"] = ["train-head", "--recording", str(recording.folder)]
    if header.replayable:
        prompts = ["--prompts", header.prompts.source, "--limit", str(header.prompts.count)]
        commands["replay"] = ["sweep", *prompts, "--max-new-tokens", str(header.max_new_tokens)]
    for name, command in commands.items():
        line = shlex.join([program("specdec"), *command])
        console.print(f"{name:<9} {line}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run(main)
