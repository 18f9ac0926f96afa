"""Simulate load: how many replicas a rate of requests needs, or what rate replicas carry."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from jobs.choice import choose
from jobs.console import console, deliver, run
from jobs.options import Config, Name, ProfileFile, Traces, result_folder, sizes
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import PairConfiguration
from specdec_core.search.load.workload import Slo

if TYPE_CHECKING:
    from specdec_core.recordings.schema import Recording

SHARE = 0.95


def main(
    slo: Annotated[
        str, Option(help="Limits in seconds that requests must keep, as ttft=0.3,tpot=0.02.")
    ],
    traces: Traces = None,
    rate: Annotated[
        float | None, Option(help="Requests a second; finds how many replicas they need.")
    ] = None,
    trace: Annotated[
        Path | None,
        Option(help="Requests with arrival times (JSONL), in place of a rate."),
    ] = None,
    replicas: Annotated[
        str | None, Option(help="Replicas, as 1,64; finds the rate that each number carries.")
    ] = None,
    share: Annotated[
        float, Option(help="Share of the requests that must keep the limits.")
    ] = SHARE,
    config: Config = None,
    profile: ProfileFile = None,
    slots: Annotated[int, Option(min=1, help="Requests that a replica decodes together.")] = 16,
    step_tokens: Annotated[int, Option(min=1, help="Tokens that a replica's step feeds.")] = 256,
    cache_tokens: Annotated[
        int | None, Option(min=128, help="Tokens in a replica's cache; unset, all that slots hold.")
    ] = None,
    arrivals: Annotated[
        Literal["poisson", "constant"], Option(help="Gaps between requests.")
    ] = "poisson",
    seconds: Annotated[
        float, Option(min=1, help="Seconds of arrivals to simulate, at least.")
    ] = 20.0,
    name: Name = None,
) -> None:
    """Simulate requests that come at a rate, and find the fewest replicas that answer them within
    the limits; or find the rate that a number of replicas can answer.

    The simulation uses replayed rounds, the pair's forward times and the live engine's scheduler.
    The rounds of a configuration that cannot be replayed are decoded live, once.
    """
    objective = Slo.read(slo, "--slo")
    if sum(given is not None for given in (rate, trace, replicas)) != 1:
        raise UserError(
            "give --rate or --trace, to find how many replicas it needs, or --replicas, to find"
            " what they carry"
        )
    if rate is not None and not 0 < rate < float("inf"):
        raise UserError(f"--rate {rate:g}: expected requests a second")
    if not 0 < share <= 1:
        raise UserError(f"--share {share:g}: expected a share of the requests, as 0.95")
    numbers = sizes(replicas, "--replicas") if replicas is not None else ()
    chosen, source, _ = choose(config)

    # torch and MLflow take seconds to import.
    from dashboards.progress import ConsoleProgress
    from dashboards.reports.capacity import report
    from dashboards.sections import ReportOrigin
    from specdec_core.cost.profile import check_rows
    from specdec_core.cost.steps import StepTimes
    from specdec_core.engine.scheduler import Limits
    from specdec_core.measure.forward_times import forward_times, origin
    from specdec_core.recordings.replay import Replay
    from specdec_core.search.load.answers import replayed_answers
    from specdec_core.search.load.capacity import (
        ServedTraffic,
        greatest_rate,
        least_replicas,
        mean_rate,
    )
    from specdec_core.search.load.decoded import decoded_live, with_live
    from specdec_core.search.load.simulator import shapes_of
    from specdec_core.search.load.traffic import read_requests

    recording = _recording(traces, chosen)
    folder = result_folder("capacity", name, recording.folder.name)
    requests = read_requests(trace, recording.header.pair) if trace is not None else ()
    if requests:
        rate = mean_rate(requests, f"--trace {trace}")
    pair = recording.header.pair
    if chosen.pair.drafts:  # the recording's pair may have another one first
        own = chosen.configuration.with_draft(next(iter(chosen.pair.drafts)))
        chosen = chosen.model_copy(update={"configuration": own})
    replay = Replay(recording, hidden=chosen.configuration.reads_hidden, drawn=True)
    with ConsoleProgress(console) as progress:
        weights = recording.header.fingerprints
        known = forward_times(pair, [chosen.configuration], profile, progress, weights)
        if known.proposals:
            raise UserError(f"--profile {profile}: of another server, whose load is not simulated")
        if slots > 1:
            check_rows(known.rows, str(profile or "the pair's profile (specdec profile)"))
        chosen = chosen.model_copy(update={"configuration": chosen.configuration.priced(known)})
        times = StepTimes.of(known.under(chosen.configuration))
        replay = with_live(replay, [chosen.configuration], progress)
    answers = replayed_answers(replay, chosen.configuration)
    limits = Limits(slots, step_tokens, cache_tokens).verifying(chosen.configuration.candidates)
    asked = shapes_of(answers, len(answers), requests, recording.header.max_new_tokens)
    longest = max(shape.prompt_tokens + shape.most for shape in asked)
    if not limits.holds(longest):
        raise UserError(
            f"--cache-tokens {cache_tokens}: too few for the longest prompt and answer, which take"
            f" {longest} and room for candidates"
        )
    with ConsoleProgress(console) as progress:
        new_tokens = recording.header.max_new_tokens
        service = ServedTraffic(answers, times, limits, arrivals, seconds, requests, new_tokens)
        progress.stage("simulating")
        if rate is not None:
            results = [least_replicas(service, rate, objective, share)]
        else:
            results = [greatest_rate(service, n, objective, share) for n in numbers]

    coming = f"{arrivals} arrivals, {results[0].seconds:.3g} s of them"
    load = f"{rate:g} requests a second, {coming}" if rate else f"{replicas} replicas, {coming}"
    if trace is not None:
        load = f"{len(requests)} requests of {trace}, {rate:.3g} a second on average"
    live = decoded_live(replay, chosen.configuration)
    by = "decoded live, not replayed; " if live else ""
    notes = [
        f"{chosen.configuration.label} ({source}); {by}{load}",
        f"prompts of {trace or recording.folder.name}: {mean(a.prompt_tokens for a in asked):.0f}"
        f" tokens and answers of {mean(a.most for a in asked):.0f}, on average",
        f"replicas of {slots} slots",
        origin(known, profile),
    ]
    params: dict[str, Any] = {
        "recording": recording.folder.name,
        "config_id": chosen.configuration.id,
        "slo": slo,
        "share": share,
        "rate": rate,
        "trace": str(trace) if trace else None,
        "replicas": replicas,
        "slots": slots,
    }
    place = ReportOrigin(name=folder.name, pair=pair.name, notes=notes, params=params)
    deliver(report(results, chosen.configuration, place, live), folder, "capacity")


def _recording(traces: str | None, chosen: PairConfiguration) -> Recording:
    """The recording of that name, or the latest of the pair under the configuration's sampling.
    Raises :class:`UserError` without one."""
    from specdec_core.recordings.find import latest_recording
    from specdec_core.search.replaying import find_named

    if traces is not None:
        return find_named(traces, workspace(), drawn=True)
    sampling = chosen.configuration.sampling
    recording = latest_recording(chosen.pair, workspace(), sampling, drawn=True)
    if recording is None or recording.header.sampling != sampling:
        raise UserError(
            f"no recording of {chosen.pair.name} under its sampling in {workspace() / 'traces'},"
            " whose rounds are simulated: `specdec record` makes one"
        )
    return recording


if __name__ == "__main__":
    run(main)
