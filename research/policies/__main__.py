"""Compare length policies on recordings, by replay alone."""

from __future__ import annotations

import json
import time
from itertools import chain
from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.console import console, deliver, run
from jobs.options import Hardware, Name, ProfileFile, Traces, check_name, check_times
from specdec_core.base.workspace import workspace

POLICIES = Path(__file__).parents[2] / "jobs" / "sweeps" / "policies.yaml"


def main(
    traces: Traces,
    search: Annotated[
        Path, Option(help="Sweep file whose search to replay; a grid or random.")
    ] = POLICIES,
    hardware: Hardware = None,
    profile: ProfileFile = None,
    name: Name = None,
) -> None:
    """Replay more than a thousand length policies on recordings of a pair. Show the best of each
    family, the oracle, how well a choice made on one recording does on another, and whether a head
    beats the confidence product on prompts that neither was chosen on.

    Times are modelled: counts of forwards times a profile's seconds (SpecDec++, Eq. 3.1).
    """
    check_times(hardware, profile)
    check_name(name)

    # torch and MLflow take seconds to import.
    from dashboards.progress import ConsoleProgress
    from dashboards.sections import ReportOrigin
    from research.policies.report import report
    from research.policies.study import open_recordings, replay_search, searched
    from specdec_core.base.files import write_atomically
    from specdec_core.measure.forward_times import forward_times, origin
    from specdec_core.recordings.replay import Replay

    recordings = open_recordings(traces, workspace())
    searches = {label: searched(search, recording) for label, recording in recordings.items()}
    replays = {label: Replay(recording, drawn=True) for label, recording in recordings.items()}
    header = next(iter(recordings.values())).header  # of the same models as the others'
    pair = header.pair
    with ConsoleProgress(console) as progress:
        configurations = [*chain.from_iterable(searches.values())]
        times = forward_times(
            pair, configurations, hardware, profile, progress, header.fingerprints
        )
        searches = {
            label: [configuration.priced(times) for configuration in found]
            for label, found in searches.items()
        }
        started = time.perf_counter()
        sets = [
            replay_search(label, replays[label], searches[label], times, progress)
            for label in recordings
        ]
        seconds = time.perf_counter() - started

    count = sum(len(compared.trials) for compared in sets)
    saved = sum(t.counts["n_draft"] + t.counts["n_target"] for c in sets for t in c.trials)
    notes = [
        f"{count:,} replays in {seconds:.1f} s, {count / seconds:,.0f} a second; decoding would "
        f"have taken {saved:,} model forwards",
        origin(times, hardware),
        *(
            f"{label}: sampled with {recording.header.sampling.label}; its rounds are drawn, as"
            " rejection sampling could have taken them"
            for label, recording in recordings.items()
            if not recording.header.sampling.fixed_output
        ),
    ]
    folder = workspace() / "policies" / (name or "+".join(recordings))
    params = {"recordings": list(recordings), "search": str(search), "device": times.device}
    shown = report(sets, ReportOrigin(name=folder.name, pair=pair.name, notes=notes, params=params))
    result = {
        "recordings": {n: str(r.folder.resolve()) for n, r in recordings.items()},
        "seconds": seconds,
        "configurations_per_second": count / seconds,
        "profile": times.model_dump(mode="json"),
        **{
            key: json.loads(shown.frames[key].to_json(orient="records"))
            for key in ("families", "transfer")
        },
    }
    path = write_atomically(folder / "policies.json", json.dumps(result, indent=1))
    deliver(shown, folder, "policies", [path])


if __name__ == "__main__":
    run(main)
