"""How well the bundled pair came out."""

from __future__ import annotations

from typing import Any

from dashboards import cells
from dashboards.sections import Section

COLUMNS = {
    "draft": cells.text("draft"),
    "prompts": cells.text("prompts"),
    "agreement": cells.number("agreement", ".3f"),
    "oracle N_target/N": cells.number("oracle_verification_rate", ".3f"),
    "AUC": cells.number("confidence_auc", ".3f"),
    "forward ratio": cells.number("forward_ratio", ".3f"),
}


def section(results: dict[str, Any]) -> Section:
    """A row a draft and prompt split."""
    times = results["forward_ms"]["float32"]
    rows = [
        {
            "draft": draft,
            "prompts": split,
            "forward_ratio": times[draft] / times["target"],
            **measured,
        }
        for split, drafts in results["alignment"].items()
        for draft, measured in drafts.items()
    ]
    return Section(key="pair", title="Bundled pair, greedy", shown=cells.table(rows, COLUMNS))
