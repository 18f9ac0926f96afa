"""How counting scales over nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dashboards import cells
from dashboards.sections import Section
from research.scale.study import Scaled


def section(results: Sequence[Scaled]) -> Section:
    """A column for each number of nodes."""
    columns = {f"{scaled.nodes} × {scaled.slots}": _column(scaled) for scaled in results}
    shown = pd.DataFrame(columns, dtype=object).reset_index(names="nodes × slots")
    return Section(key="scaling", shown=shown)


def _column(scaled: Scaled) -> dict[str, str]:
    return {
        "trials": f"{scaled.trials:,}",
        "seconds to start the nodes": f"{scaled.starting:.0f}",
        "memory of everything, GiB": f"{(scaled.free - scaled.memory.least) / 1024:.1f}",
        "seconds to count them": f"{scaled.counting:.1f}",
        "trials a second": f"{scaled.rate:.2f}",
        "of what the workers could": cells.as_number(scaled.share, ".0%"),
        "driver busy": f"{scaled.busy:.0%}",
        "of that Tune and the folder": f"{scaled.busy_counting:.0%}",
        "driver's memory, MiB": f"{scaled.memory.before:.0f} → {scaled.memory.most:.0f}",
        "MLflow runs a second": f"{scaled.trials / scaled.logging:.1f}",
        "held up by": scaled.bottleneck,
    }
