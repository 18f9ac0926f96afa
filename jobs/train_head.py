"""Train acceptance heads and decision models on recordings of a pair."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from jobs.console import console, run
from jobs.times import forward_times
from specdec_core.errors import UserError
from specdec_core.workspace import workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.head_training import Finished
    from dashboards.tracking import Undelivered
    from specdec_core.config import Policy
    from specdec_core.cost import Profile
    from specdec_core.heads import LoadedHead
    from specdec_core.heads.evaluation import Modelled
    from specdec_core.traces.schema import Recording

T = TypeVar("T", int, float, str)


def main(
    recording: Annotated[
        list[str], typer.Option(help="recording's folder, or its name; may be repeated")
    ],
    draft: Annotated[
        str | None, typer.Option(help="a recorded draft, or several: small,medium; unset, all")
    ] = None,
    kinds: Annotated[
        str, typer.Option(help="specdecpp, t1 and t2 as in the papers; joint reads t1's and t2's")
    ] = "specdecpp,t1,t2,joint",
    depths: Annotated[str, typer.Option(help="residual blocks D of specdecpp")] = "0,1,2,3,4",
    w_rej: Annotated[str, typer.Option(help="weights of rejections of specdecpp")] = "1,3,6,12",
    width: Annotated[int, typer.Option(help="units of a hidden layer of the other kinds")] = 64,
    learning_rate: Annotated[
        str, typer.Option(help="Adam's; the best of several, by eval loss: 3e-4,1e-3,3e-3")
    ] = "1e-3,3e-3",
    batch_size: Annotated[int, typer.Option(help="examples of a step")] = 256,
    epochs: Annotated[int, typer.Option(help="passes over the examples")] = 6,
    weight_decay: Annotated[float, typer.Option(help="decoupled weight decay")] = 0.0,
    dropout: Annotated[float, typer.Option(help="of hidden states and layers")] = 0.2,
    source: Annotated[
        Literal["mixed", "trajectory"],
        typer.Option(help="specdecpp's examples: token mixing, or each candidate by itself"),
    ] = "mixed",
    seed: Annotated[int, typer.Option(help="of weights and order")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder; unset, heads in the workspace")] = None,
    evaluate: Annotated[
        str | None, typer.Option(help="recording to find every head's best threshold on")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="the pair's forward times; unset, the workspace's, measured if missing"),
    ] = None,
) -> None:
    """Train heads that predict whether a candidate token will be accepted, and save them.

    Finished heads are not trained again: interrupted, the same command goes on.
    """
    specs = grid(kinds, numbers(depths, "--depths", int), numbers(w_rej, "--w-rej", float), width)
    rates = numbers(learning_rate, "--learning-rate", float)
    folders = [find_recording(name) for name in recording]

    # Ray, torch and MLflow take seconds to import.
    from cluster.head_training import train_heads
    from cluster.ray_session import ray_session
    from dashboards.heads import HeadProgress, HeadsRun, heads_table, judged_table
    from specdec_core.config import parse
    from specdec_core.heads import TrainingSettings
    from specdec_core.heads.data import load_examples, same_models
    from specdec_core.traces.schema import Recording

    given = {
        "learning_rate": rates[0],
        "batch_size": batch_size,
        "epochs": epochs,
        "weight_decay": weight_decay,
        "dropout": dropout,
        "seed": seed,
    }
    settings = parse(TrainingSettings, given, "training settings")
    recordings = [Recording.open(folder) for folder in folders]
    judge = Recording.open(find_recording(evaluate)) if evaluate else None
    drafts = draft.split(",") if draft else list(recordings[0].header.pair.drafts)
    for name in drafts:
        for each in (*recordings, *([judge] if judge else [])):
            same_models(each, recordings[0], name)
    out = (out or workspace() / "heads").absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    undelivered: list[Undelivered] = []
    try:
        rules = {name: judge_rules(judge, name, profile) for name in drafts} if judge else {}
        with ray_session():
            for name in drafts:
                console.print(f"heads of [bold]{name}[/bold]")
                with console.status("reading recordings"):
                    kinds_wanted = list(dict.fromkeys(spec.kind for spec in specs))
                    examples = load_examples(recordings, name, kinds_wanted, source)
                params = {
                    "recordings": [str(folder) for folder in folders],
                    "heads": [spec.label for spec in specs],
                    "settings": settings.model_dump(mode="json"),
                    "learning_rates": list(rates),
                    "source": source,
                    "out": str(out),
                }
                with (
                    _noted(undelivered),
                    HeadsRun(recordings[0].header.pair, name, params) as tracking,
                ):
                    with HeadProgress(console) as progress:
                        observers = [tracking, progress]
                        heads = train_heads(specs, examples, settings, out, rates, observers)
                    console.print(heads_table(heads))
                    if judge is not None:
                        tracking.judged = rules[name] | judge_heads(judge, name, heads, profile)
                        console.print(judged_table(tracking.judged))
                    with console.status("writing to MLflow"):
                        tracking.finish(out)
    except KeyboardInterrupt:
        console.print("interrupted; the same command resumes")
        sys.exit(130)
    console.print(f"heads     {out}", soft_wrap=True)
    if undelivered:
        raise undelivered[0]


@contextmanager
def _noted(undelivered: list[Undelivered]) -> Iterator[None]:
    """Go on with the next draft's heads where the tracking server did not take this one's."""
    from dashboards.tracking import Undelivered

    try:
        yield
    except Undelivered as error:
        undelivered.append(error)


def grid(kinds: str, depths: tuple[int, ...], weights: tuple[float, ...], width: int) -> list[Any]:
    """specdecpp for every depth and weight, the other kinds once."""
    from specdec_core.config import parse
    from specdec_core.heads import HeadSpec

    specs: list[HeadSpec] = []
    for kind in dict.fromkeys(kinds.split(",")):
        if kind == "specdecpp":
            values = [{"kind": kind, "depth": d, "w_rej": w} for w in weights for d in depths]
        else:
            values = [{"kind": kind, "width": width}]
        specs += [parse(HeadSpec, value, "heads") for value in values]
    return specs


def numbers(text: str, option: str, kind: type[T]) -> tuple[T, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option} {text}: expected numbers as 1,2,4") from None


def find_recording(name: str) -> Path:
    """A recording's folder, or one of that name in the workspace."""
    folder = Path(name).expanduser()
    named = workspace() / "traces" / name
    return named if not folder.exists() and named.exists() else folder


def judge_rules(recording: Recording, draft: str, profile: Path | None) -> dict[str, Modelled]:
    """The best threshold of the rules that need no training, by replay. Raises
    :class:`UserError` where heads could not be judged so, either."""
    from specdec_core.heads.evaluation import evaluate, training_free
    from specdec_core.traces.replay import Replay

    replay = Replay(recording, hidden=False, drawn=True)
    rules = training_free()
    times = policy_times(recording, draft, [own[0] for own in rules.values()], profile)
    with console.status(f"replaying thresholds on {recording.folder.name}"):
        return evaluate(replay, times, draft, rules)


def judge_heads(
    recording: Recording, draft: str, heads: Sequence[Finished], profile: Path | None
) -> dict[str, Modelled]:
    """The best threshold of every head, by replay."""
    from specdec_core.cost import policy_key
    from specdec_core.heads import load_head
    from specdec_core.heads.evaluation import evaluate, with_thresholds
    from specdec_core.traces.replay import Replay

    own = recording.header.fingerprints
    folders = {head.label: head.folder for head in heads}

    def load(draft: str, head: str) -> LoadedHead:
        return load_head(folders[head], own[draft], own["target"])

    asking = {head.label: with_thresholds(head.card, str(head.folder))[0] for head in heads}
    times = policy_times(recording, draft, list(asking.values()), profile)
    known = {
        policy_key(draft, policy.model_copy(update={"head": label})): times.policies[key]
        for label, policy in asking.items()
        if (key := policy_key(draft, policy)) in times.policies
    }
    times = times.model_copy(update={"policies": {**times.policies, **known}})
    tried = {head.label: with_thresholds(head.card, head.label) for head in heads}
    with console.status(f"replaying thresholds on {recording.folder.name}"):
        return evaluate(Replay(recording, load, drawn=True), times, draft, tried)


def policy_times(
    recording: Recording, draft: str, policies: Sequence[Policy], profile: Path | None
) -> Profile:
    """Forward times of the recorded pair, with what the policies themselves take: measured once a
    kind and head, whatever its threshold."""
    from specdec_core.config import Configuration, DraftModelDrafter

    drafters = [DraftModelDrafter(draft=draft, policy=policy) for policy in policies]
    wanted = [Configuration(drafter=drafter) for drafter in drafters]
    return forward_times(recording.header.pair, wanted, None, profile)


if __name__ == "__main__":
    run(main)
