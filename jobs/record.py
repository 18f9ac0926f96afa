"""Record what the draft models of a pair would do, to train heads on it and to replay it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from jobs.console import console, interruptible, point, program, run
from jobs.options import (
    Drafts,
    MaxLength,
    MaybeChatTemplate,
    MaybeLimit,
    MaybeTokens,
    ProfileFile,
    Target,
    chosen_pair,
    given,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Sampling, parse
from specdec_core.prompts.chat import AUTO

if TYPE_CHECKING:
    from cluster.recording import RecordingPlan
    from specdec_core.recordings.schema import Recording


def main(
    target: Target = None,
    draft: Drafts = None,
    config: Annotated[
        Path | None, Option(help="Sweep file whose pair, prompts, sampling and length to take.")
    ] = None,
    prompts: Annotated[
        str | None,
        Option(help="Prompts: JSONL file, hub id or bundled:<name>; unset, bundled:train."),
    ] = None,
    chat_template: MaybeChatTemplate = None,
    limit: MaybeLimit = None,
    max_new_tokens: MaybeTokens = None,
    max_length: MaxLength = None,
    temperature: Annotated[float | None, Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, Option(help="Sample from the k likeliest; 0, from all.")] = None,
    top_p: Annotated[float | None, Option(help="Sample from the likeliest of this mass.")] = None,
    coupling: Annotated[
        Literal["rejection", "gumbel"] | None,
        Option(help="Acceptance rule when sampling; a recording with gumbel can be replayed."),
    ] = None,
    max_draft: Annotated[int | None, Option(help="Longest draft that can be replayed.")] = None,
    mixing: Annotated[
        float | None,
        Option(help="Share of target tokens in the heads' training examples; 0, no examples."),
    ] = None,
    continuations: Annotated[
        bool, Option(help="Record what is drafted after a disagreement; replay needs it.")
    ] = True,
    name: Annotated[str | None, Option(help="Name of the recording's folder.")] = None,
    out: Annotated[
        Path | None, Option(help="The folder itself; unset, traces/<name> in the workspace.")
    ] = None,
    from_vllm: Annotated[
        list[Path] | None,
        Option(
            help="Instead: what a vLLM in production wrote, the text of its /metrics or responses"
            " with metrics, one a line; repeatable, for servers with several lengths. Says what"
            " other lengths are expected to give; needs no weights."
        ),
    ] = None,
    profile: ProfileFile = None,
) -> None:
    """Run a pair over prompts once and write down, at every position, what its drafts would do.

    Every draft length, policy and head can be replayed from that without a model, and heads are
    trained on it. Interrupted, the same command goes on where it stopped.
    """
    if from_vllm:
        from jobs.production import read_production

        read_production(from_vllm, draft, profile, out)
        return
    if profile is not None:
        raise UserError("--profile goes with --from-vllm: a recording has no times")
    base: dict[str, Any] = {}
    if config is not None:
        from specdec_core.search.plan import load_plan

        plan = load_plan(config)
        base = {key: getattr(plan, key) for key in ("pair", "prompts", "max_new_tokens")}
        base["sampling"] = plan.sampling
    changes = given(temperature=temperature, top_k=top_k, top_p=top_p, coupling=coupling)
    sampling = parse(Sampling, {**_dumped(base.get("sampling")), **changes}, "sampling")

    # Ray and torch take seconds to import.
    from cluster.recording import RecordingPlan

    source = given(source=prompts, limit=limit, chat_template=chat_template)
    values = {
        **base,
        "pair": chosen_pair(base.get("pair", RecordingPlan().pair), target, draft, max_length),
        "prompts": {**_dumped(base.get("prompts", RecordingPlan().prompts)), **source},
        "sampling": sampling,
        "continuations": continuations,
        **given(max_new_tokens=max_new_tokens, max_draft=max_draft, mixing=mixing),
    }
    wanted = parse(RecordingPlan, {k: _dumped(v) for k, v in values.items()}, "recording")
    show(record(wanted, name, out), config)


def record(plan: RecordingPlan, name: str | None = None, out: Path | None = None) -> Recording:
    """Record `plan` and show how that goes; interrupted, say how to go on."""
    from cluster.recording import run_recording
    from dashboards.progress import RecordingProgress

    with interruptible(), RecordingProgress(console) as progress:
        return run_recording(plan, workspace(), name, out, progress)


def _dumped(value: Any) -> Any:
    if value is None:
        return {}
    return value.model_dump() if hasattr(value, "model_dump") else value


def show(recording: Recording, config: Path | None = None) -> None:
    """What the recording holds, and what to do with it; a sweep by the file that it was made by."""
    from dashboards.outputs.console import table
    from dashboards.reports.recording import contents, drafts

    header = recording.header
    console.print(table(drafts(recording)))
    console.print(contents(recording))
    point("recording", recording.folder)
    commands = {}
    if header.mixing and set(header.pair.drafts) - set(header.eagle_heads):
        commands["train"] = ["train-head", "--recording", str(recording.folder)]
    if header.replayable:
        prompts = ["--prompts", header.prompts.source, "--limit", str(header.prompts.count)]
        if header.prompts.chat_template not in (None, AUTO):
            prompts += ["--chat-template", header.prompts.chat_template]
        sweep = ["sweep"] if config is None else ["sweep", "--config", str(config)]
        commands["replay"] = [*sweep, *prompts, "--max-new-tokens", str(header.max_new_tokens)]
    for name, command in commands.items():
        point(name, shlex.join([program("specdec"), *command]))


if __name__ == "__main__":
    run(main)
