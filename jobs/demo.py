"""The main job on the bundled pair and real prompts, and where to go from there."""

from __future__ import annotations

from jobs import sweep
from jobs.console import point, program, run
from jobs.options import Fresh


def main(fresh: Fresh = False) -> None:
    """Record what the bundled pair does on real prompts, replay every configuration from that, time
    the best ones alone, register the champion and write the report."""
    # Ray and torch take seconds to import.
    from cluster.recording import RecordingPlan
    from cluster.session import ray_session
    from jobs.record import record
    from specdec_core.search.plan import load_plan

    plan = load_plan(sweep.QUICK)
    with ray_session():
        recording = record(
            RecordingPlan(
                pair=plan.pair,
                prompts=plan.prompts,
                max_new_tokens=plan.max_new_tokens,
                mixing=0,  # heads for the pair come along
            )
        )
        sweep.main(config=sweep.QUICK, traces=str(recording.folder), fresh=fresh)
    point(
        "your pair",
        f"{program('specdec')} sweep --target <folder or hub id> --draft <folder or hub id>"
        " --prompts prompts.jsonl",
    )


if __name__ == "__main__":
    run(main)
