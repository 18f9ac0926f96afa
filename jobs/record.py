"""Record what the draft models of a pair would do, to train heads on it and to replay it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from jobs import options
from jobs.console import console, interruptible, point, program, run
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Placement, Sampling, parse

if TYPE_CHECKING:
    from specdec_core.recordings.plan import RecordingPlan
    from specdec_core.recordings.schema import Recording
    from specdec_core.search.plan import Plan
    from specdec_core.servers.answers import ServerAddress


def main(
    target: options.Target = None,
    draft: options.Drafts = None,
    config: options.SweepFile = None,
    prompts: options.MaybePrompts = None,
    chat_template: options.MaybeChatTemplate = None,
    limit: options.MaybeLimit = None,
    max_new_tokens: Annotated[
        int | None,
        Option(min=1, help="New tokens for each prompt; unset, as in the file, or 128."),
    ] = None,
    max_length: options.MaxLength = None,
    compile: options.Compile = None,
    temperature: Annotated[float | None, Option(help="0 is greedy.")] = None,
    top_k: Annotated[
        int | None, Option(help="Sample from the k likeliest tokens; 0, from all.")
    ] = None,
    top_p: Annotated[float | None, Option(help="Sample from the likeliest of this mass.")] = None,
    coupling: Annotated[
        Literal["rejection", "gumbel"] | None,
        Option(help="Acceptance rule when sampling; a recording with gumbel can be replayed."),
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
    name: options.Name = None,
    out: Annotated[
        Path | None,
        Option(
            help="The folder itself, or with --from-vllm the file; unset, traces/<name> or"
            " production.json in the workspace."
        ),
    ] = None,
    server: Annotated[
        str | None,
        Option(
            help="URL of a running server with OpenAI's protocol: record its greedy answers. The"
            " target's tokenizer and configuration are needed here, its weights are not."
        ),
    ] = None,
    server_model: options.ServerModel = None,
    clients: Annotated[
        int | None, Option(min=1, help="With --server: prompts sent at a time; unset, 16.")
    ] = None,
    cluster: options.Placed = None,
    from_vllm: Annotated[
        list[Path] | None,
        Option(
            help="Instead of recording: estimate the effect of other lengths from a vLLM in"
            " production, by a file with the text of its /metrics or with its responses, one a"
            " line; repeatable, for servers with several lengths. Needs no weights."
        ),
    ] = None,
    profile: options.ProfileFile = None,
) -> None:
    """Run a pair over prompts once and record, at every position, what its drafts would do.

    Every draft length, policy and head can be replayed from the recording without a model, and
    heads are trained on it. Without drafts the target's outputs alone are recorded. Unset options
    are as in the sweep file, or greedy decoding of bundled:train with 128 new tokens. Interrupted,
    the same command resumes.
    """
    if from_vllm:
        given = locals() | {"continuations": None, "no_continuations": not continuations or None}
        for option in options.given(**given):
            if option not in ("from_vllm", "draft", "profile", "out"):
                raise UserError(f"--{option.replace('_', '-')}: not with --from-vllm")
        from jobs.production import read_production

        read_production(from_vllm, draft, profile, out)
        return
    if profile is not None:
        raise UserError("--profile goes with --from-vllm: a recording has no times")
    address = options.given(model=server_model, clients=clients)
    if address and server is None:
        raise UserError("--server-model and --clients go with --server")
    if server is not None and cluster is not None:
        raise UserError("--cluster is for this library's engine, and --server has its own devices")
    # Ray and torch take seconds to import.
    from specdec_core.recordings.plan import RecordingPlan
    from specdec_core.search.plan import read_plan
    from specdec_core.servers.answers import ServerAddress

    # The search of a sweep file may need drafts, heads and devices that are not here.
    base: RecordingPlan | Plan = RecordingPlan() if config is None else read_plan(config)
    changes = options.given(temperature=temperature, top_k=top_k, top_p=top_p, coupling=coupling)
    sampling = parse(Sampling, base.sampling.model_dump() | changes, "sampling")
    source = options.given(source=prompts, limit=limit, chat_template=chat_template)
    values = {
        "pair": options.chosen_pair(base.pair, target, draft, max_length, compile).model_dump(),
        "prompts": base.prompts.model_dump() | source,
        "sampling": sampling.model_dump(),
        "continuations": continuations,
        "max_new_tokens": max_new_tokens or base.max_new_tokens,
        **options.given(max_draft=max_draft, mixing=mixing),
    }
    running = ServerAddress(url=server, **address) if server is not None else None
    placement = None if cluster is None else Placement.load(cluster)
    recording = record(parse(RecordingPlan, values, "recording"), name, out, running, placement)
    show(recording)


def record(
    plan: RecordingPlan,
    name: str | None = None,
    out: Path | None = None,
    server: ServerAddress | None = None,
    placement: Placement | None = None,
) -> Recording:
    """Record `plan`, or the answers of a `server`, with a progress bar. Interrupted, print that the
    same command resumes. The models are on the devices of `placement`, if any."""
    from cluster.recording import run_recording
    from dashboards.progress import RecordingProgress

    with interruptible(), RecordingProgress(console) as progress:
        return run_recording(plan, workspace(), name, out, progress, server, placement)


def show(recording: Recording) -> None:
    """Show the recording's content and what uses it."""
    from dashboards.outputs.console import table
    from dashboards.reports.recording import contents, drafts
    from specdec_core.drafting.trained import weights_here

    header = recording.header
    here = header.served is None or weights_here(header.pair, ()) is not None
    if header.pair.drafts:
        console.print(table(drafts(recording)))
    console.print(contents(recording))
    point("recording", recording.folder)
    if header.mixing and set(header.pair.drafts) - set(header.eagle_heads):
        train = [program("specdec"), "train", "head", "--recording", str(recording.folder)]
        point("train", shlex.join(train))
    if here and header.replayable:
        sweep = shlex.join([program("specdec"), "sweep", "--traces", str(recording.folder)])
        point("replay", f"{sweep}, with the same pair, prompts and lengths")


if __name__ == "__main__":
    run(main)
