"""The nested runs of a sweep's configurations."""

from __future__ import annotations

import pandas as pd

from dashboards.reports.sentences import note
from dashboards.sections import LoggedRun
from dashboards.store import run_tags
from specdec_core.search.results import SweepResult, Timing, Trial, by_estimate


def trial_run(result: SweepResult, trial: Trial) -> LoggedRun:
    """A configuration of a sweep: its settings, its counts, and its times if it was timed."""
    configuration = trial.configuration
    times = (each for each in (result.autoregressive, *result.timings) if each)
    timings = {timing.config_id: timing for timing in times}
    timed = timing_metrics(timings[trial.id]) if trial.id in timings else {}
    return LoggedRun(
        name=result.labels[trial.id],
        params=configuration.model_dump(mode="json"),
        metrics={**trial.metrics, **trial.counts, **timed},
        tags={
            "config_id": trial.id,
            "family": configuration.family,
            "lossless": str(configuration.lossless).lower(),
            "stopped_early": str(not trial.finished).lower(),
            "counted": "replay" if trial.replayed else "live",
            "prompts_digest": result.prompts.digest,
            "configuration": configuration.to_yaml(),
            "mlflow.note.content": note(configuration),
            **run_tags("sweep", result.environment),
        },
    )


def timing_metrics(timing: Timing) -> dict[str, float]:
    """The metrics of a configuration that was timed."""
    return {
        "speedup": timing.speedup,
        "speedup_low": timing.low,
        "speedup_high": timing.high,
        "tokens_per_second": timing.tokens_per_second,
        "tied_with_champion": timing.tied_with_champion,
        "differing_outputs": timing.differing_outputs,
    }


def trials_table(result: SweepResult) -> pd.DataFrame:
    """One row a configuration, with its counts and rates; the best estimate first."""
    return pd.DataFrame(
        {
            "config_id": trial.id,
            "configuration": result.labels[trial.id],
            "family": trial.configuration.family,
            "lossless": trial.configuration.lossless,
            "counted": "replay" if trial.replayed else "live",
            **trial.metrics,
            **trial.counts,
        }
        for trial in by_estimate(result.trials)
    )
