"""Functions from a sweep, its rounds and its traces to plotly figures, for the report, MLflow and
notebooks. Each figure can be read alone."""

from dashboards.figures.frontier import View, frontier, iso_latency, pareto, thin
from dashboards.figures.sweep import (
    accepted_lengths,
    lengths_over_position,
    speedups,
    time_per_token,
)
from dashboards.figures.times import forward_times

__all__ = [
    "View",
    "accepted_lengths",
    "forward_times",
    "frontier",
    "iso_latency",
    "lengths_over_position",
    "pareto",
    "speedups",
    "thin",
    "time_per_token",
]
