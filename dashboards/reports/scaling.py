"""How counting scales over nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dashboards import cells
from dashboards.sections import Section
from specdec_core.studies.scaling import Scaled


def section(found: Sequence[Scaled]) -> Section:
    """A column for each number of nodes."""
    columns = {f"{own.nodes} × {own.slots}": _column(own) for own in found}
    shown = pd.DataFrame(columns, dtype=object).reset_index(names="nodes × slots")
    return Section(key="scaling", shown=shown)


def _column(own: Scaled) -> dict[str, str]:
    whole = own.counting + own.delivering
    logged = f"{own.trials / (whole if own.behind else own.counting):.1f}"
    return {
        "trials": f"{own.trials:,}",
        "seconds to start the nodes": f"{own.starting:.0f}",
        "memory of everything, GiB": f"{(own.free - own.memory.least) / 1024:.1f}",
        "seconds to count them": f"{own.counting:.1f}",
        "trials a second": f"{own.rate:.2f}",
        "of what the workers could": cells.as_number(own.share, ".0%"),
        "driver busy": f"{own.busy:.0%}",
        "of that Tune and the folder": f"{own.busy_counting:.0%}",
        "driver's memory, MiB": f"{own.memory.before:.0f} → {own.memory.most:.0f}",
        "MLflow runs a second": logged if own.behind else f"at least {logged}",
        "MLflow's seconds behind": f"{own.delivering:.1f}",
        "held up by": own.bottleneck,
    }
