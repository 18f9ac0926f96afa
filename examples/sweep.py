"""A sweep from Python: what `specdec sweep` does, with the result as a value."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.sweep.run import run_sweep
from specdec_core.search.plan import Plan

PLAN = {
    "prompts": {"source": "bundled:held_out", "limit": 4},
    "max_new_tokens": 32,
    "search": [
        {"drafter": {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": [2, 4]}}},
        {"drafter": {"kind": "suffix"}},
    ],
    "finalists": 2,
    "repeats": 1,
}

if __name__ == "__main__":
    home = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    result, folder = run_sweep(Plan.model_validate(PLAN).resolve(), home)
    folder.finish()
    for timing in sorted(result.timings, key=lambda timing: timing.speedup, reverse=True):
        configuration = result.trial(timing.config_id).configuration
        interval = f"{timing.low:.2f}–{timing.high:.2f}"
        print(f"{timing.speedup:.2f}× ({interval})  {configuration.label}")
    print("champion:", result.champion_trial.configuration.sentence)
