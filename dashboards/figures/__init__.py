"""Functions from a sweep, its rounds and its traces to plotly figures, for the report, MLflow and
notebooks. Each figure can be read alone."""

from dashboards.figures.bounds import acceptance_bounds, ratio_of_entropies
from dashboards.figures.frontier import FrontierView, frontier, iso_latency, pareto, thin
from dashboards.figures.heads import head_names, heads_frame, heads_heatmap, heads_table
from dashboards.figures.lengths import length_errors, utilisation_over_time
from dashboards.figures.sweep import (
    accepted_lengths,
    lengths_over_position,
    speedups,
    time_per_token,
)
from dashboards.figures.times import (
    forward_times,
    generation_times,
    regression_table,
    time_regression,
)
from dashboards.figures.tokens import acceptance_by_confidence, entropy_by_outcome, entropy_table
from dashboards.figures.trees import (
    LEAST_TREES,
    tree_heatmap,
    trees_frame,
)

__all__ = [
    "LEAST_TREES",
    "FrontierView",
    "acceptance_bounds",
    "acceptance_by_confidence",
    "accepted_lengths",
    "entropy_by_outcome",
    "entropy_table",
    "forward_times",
    "frontier",
    "generation_times",
    "head_names",
    "heads_frame",
    "heads_heatmap",
    "heads_table",
    "iso_latency",
    "length_errors",
    "lengths_over_position",
    "pareto",
    "ratio_of_entropies",
    "regression_table",
    "speedups",
    "thin",
    "time_per_token",
    "time_regression",
    "tree_heatmap",
    "trees_frame",
    "utilisation_over_time",
]
