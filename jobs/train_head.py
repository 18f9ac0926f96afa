"""Train acceptance heads and decision models on recordings of a pair."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.console import console, interruptible, point, run
from jobs.options import TrainingSettings, numbers, training_settings
from specdec_core.base.workspace import workspace

if TYPE_CHECKING:
    from specdec_core.drafting.heads.card import HeadSpec


def main(
    recording: Annotated[list[str], Option(help="Recording, a folder or a name; repeatable.")],
    draft: Annotated[
        str | None,
        Option(help="A recorded draft, or several: small,medium; unset, all but EAGLE heads."),
    ] = None,
    kinds: Annotated[
        str, Option(help="specdecpp, t1 and t2 as in the papers; joint reads t1's and t2's.")
    ] = "specdecpp,t1,t2,joint",
    depths: Annotated[str, Option(help="Residual blocks D of specdecpp.")] = "0,1,2,3,4",
    w_rej: Annotated[str, Option(help="Weights of rejections of specdecpp.")] = "1,3,6,12",
    width: Annotated[int, Option(help="Units of a hidden layer of the other kinds.")] = 64,
    learning_rate: Annotated[
        str, Option(help="Adam's; the best of several, by the loss on dev: 3e-4,1e-3,3e-3.")
    ] = "1e-3,3e-3",
    setting: TrainingSettings = None,
    out: Annotated[Path | None, Option(help="Folder; unset, heads in the workspace.")] = None,
) -> None:
    """Train heads that predict whether a candidate token will be accepted, and save them.

    Finished heads are not trained again: interrupted, the same command resumes.
    """
    specs = grid(kinds, numbers(depths, "--depths", int), numbers(w_rej, "--w-rej", float), width)

    # Ray, torch and MLflow take seconds to import.
    from cluster.head_training import train_heads
    from cluster.session import ray_session
    from dashboards.outputs.console import show
    from dashboards.outputs.mlflow_runs import Undelivered
    from dashboards.progress import ConsoleProgress
    from dashboards.reports.heads import fits
    from dashboards.tracking.training_run import log_heads
    from specdec_core.drafting.heads.card import HeadTrainingSettings
    from specdec_core.recordings.find import open_named
    from specdec_core.training.heads.examples import load_examples, same_models

    rates = numbers(learning_rate, "--learning-rate", float)
    settings = [
        training_settings(HeadTrainingSettings, setting, learning_rate=rate) for rate in rates
    ]
    recordings = [open_named(name, workspace()) for name in recording]
    header = recordings[0].header  # no examples are recorded of EAGLE heads
    models = [name for name in header.pair.drafts if name not in header.eagle_heads]
    drafts = draft.split(",") if draft else models
    drafts = drafts or [recordings[0].draft_name()]  # refuses a recording without drafts
    for name in drafts:
        for each in recordings:
            same_models(each, recordings[0], name)
    out = (out or workspace() / "heads").absolute()
    params = {
        "recordings": [str(each.folder) for each in recordings],
        "heads": [spec.label for spec in specs],
        "settings": settings[0].model_dump(mode="json", exclude={"learning_rate"}),
        "learning_rates": list(rates),
        "out": str(out),
    }
    undelivered: list[Undelivered] = []
    with interruptible(), ray_session():
        for name in drafts:
            console.print(f"heads of [bold]{name}[/bold]")
            with console.status("reading recordings"):
                examples = load_examples(recordings, name, [spec.kind for spec in specs])
            with ConsoleProgress(console) as progress:
                heads, tried = train_heads(specs, examples, settings, out, progress)
            show(console, [fits({head.label: head.card for head in heads})])
            try:
                with console.status("writing to MLflow"):
                    log_heads(header.pair, name, params, tried, out)
            except Undelivered as error:  # the heads are saved; reported at the end
                undelivered.append(error)
    point("heads", out)
    if undelivered:
        raise undelivered[0]


def grid(kinds: str, depths: tuple[int, ...], weights: tuple[float, ...], width: int) -> list[Any]:
    """specdecpp for every depth and weight, the other kinds once."""
    from specdec_core.config import parse
    from specdec_core.drafting.heads.card import HeadSpec

    specs: list[HeadSpec] = []
    for kind in dict.fromkeys(kinds.split(",")):
        if kind == "specdecpp":
            values = [{"kind": kind, "depth": d, "w_rej": w} for w in weights for d in depths]
        else:
            values = [{"kind": kind, "width": width}]
        specs += [parse(HeadSpec, value, "heads") for value in values]
    return specs


if __name__ == "__main__":
    run(main)
