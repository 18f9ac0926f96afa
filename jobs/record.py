"""Record what the draft models of a pair would do, to train heads on it and to replay it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from jobs.console import console, interruptible, point, program, run
from jobs.options import (
    Compile,
    Drafts,
    MaxLength,
    MaybeChatTemplate,
    ProfileFile,
    Target,
    chosen_pair,
    given,
    pair_options,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import PairSpec, Sampling, parse
from specdec_core.prompts.chat import AUTO

if TYPE_CHECKING:
    from cluster.recording import RecordingPlan
    from specdec_core.recordings.schema import Recording
    from specdec_core.search.plan import ResolvedPlan


def main(
    target: Target = None,
    draft: Drafts = None,
    config: Annotated[
        Path | None, Option(help="Sweep file whose pair, prompts, sampling and length to take.")
    ] = None,
    prompts: Annotated[
        str | None,
        Option(
            help="Prompts: JSONL file, hub id or bundled:<name>; unset, as in the file, or"
            " bundled:train."
        ),
    ] = None,
    chat_template: MaybeChatTemplate = None,
    limit: Annotated[
        int | None, Option(min=1, help="Use the first n prompts; unset, as many as in the file.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        Option(min=1, help="New tokens for each prompt; unset, as in the file, or 128."),
    ] = None,
    max_length: MaxLength = None,
    compile: Compile = None,
    temperature: Annotated[
        float | None, Option(help="0 is greedy; unset, as in the file, or 0.")
    ] = None,
    top_k: Annotated[
        int | None,
        Option(help="Sample from the k likeliest; 0, from all; unset, as in the file, or 0."),
    ] = None,
    top_p: Annotated[
        float | None,
        Option(help="Sample from the likeliest of this mass; unset, as in the file, or 1."),
    ] = None,
    coupling: Annotated[
        Literal["rejection", "gumbel"] | None,
        Option(
            help="Acceptance rule when sampling; a recording with gumbel can be replayed;"
            " unset, as in the file, or rejection."
        ),
    ] = None,
    max_draft: Annotated[
        int | None, Option(help="Longest draft that can be replayed; unset, 20.")
    ] = None,
    mixing: Annotated[
        float | None,
        Option(
            help="Share of target tokens in the heads' training examples; 0, no examples; unset,"
            " 0.15."
        ),
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
    plan = None
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
        "pair": chosen_pair(
            base.get("pair", RecordingPlan().pair), target, draft, max_length, compile
        ),
        "prompts": {**_dumped(base.get("prompts", RecordingPlan().prompts)), **source},
        "sampling": sampling,
        "continuations": continuations,
        **given(max_new_tokens=max_new_tokens, max_draft=max_draft, mixing=mixing),
    }
    wanted = parse(RecordingPlan, {k: _dumped(v) for k, v in values.items()}, "recording")
    show(record(wanted, name, out), config, plan)


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


def show(
    recording: Recording, config: Path | None = None, plan: ResolvedPlan | None = None
) -> None:
    """What the recording holds, and what to do with it; a sweep by the file `config`, and its
    `plan`, that it was made by."""
    from dashboards.outputs.console import table
    from dashboards.reports.recording import contents, drafts

    console.print(table(drafts(recording)))
    console.print(contents(recording))
    point("recording", recording.folder)
    for name, command in following(recording, config, plan).items():
        point(name, shlex.join([program("specdec"), *command]))


def following(
    recording: Recording, config: Path | None = None, plan: ResolvedPlan | None = None
) -> dict[str, list[str]]:
    """The commands that use the recording; a sweep only where it would replay it."""
    header = recording.header
    commands = {}
    if header.mixing and set(header.pair.drafts) - set(header.eagle_heads):
        commands["train"] = ["train", "head", "--recording", str(recording.folder)]
    if header.replayable and header.sampling == (plan.sampling if plan else Sampling()):
        commands["replay"] = _sweep(recording, config, plan)
    return commands


def _sweep(recording: Recording, config: Path | None, plan: ResolvedPlan | None) -> list[str]:
    """The sweep that replays the recording."""
    header = recording.header
    command = ["sweep"] if config is None else ["sweep", "--config", str(config)]
    command += pair_options(header.pair, plan.pair if plan else PairSpec())
    command += ["--prompts", header.prompts.source, "--limit", str(header.prompts.count)]
    if header.prompts.chat_template not in (None, AUTO):
        command += ["--chat-template", header.prompts.chat_template]
    return [*command, "--max-new-tokens", str(header.max_new_tokens)]


if __name__ == "__main__":
    run(main)
