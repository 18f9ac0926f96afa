"""SpecDec++'s Table 3, of heads trained for the page."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.sections import Section
from research.papers import specdecpp
from research.papers.sections import verdicts
from research.papers.sections.section import Exhibit
from research.papers.studies import TIMES

# By weight and depth: train and eval KL; tokens a second on Alpaca, HumanEval and GSM8K, and the
# best threshold on that set.
TABLE_3 = {
    (1, 0): ("0.422 / 0.412", "18.48 (0.3), 19.91 (0.5), 20.32 (0.3)"),
    (1, 1): ("0.409 / 0.390", "18.39 (0.3), 20.29 (0.3), 20.44 (0.3)"),
    (1, 2): ("0.391 / 0.387", "18.87 (0.3), 20.26 (0.3), 20.87 (0.3)"),
    (1, 3): ("0.387 / 0.384", "18.82 (0.3), 20.10 (0.3), 20.86 (0.3)"),
    (1, 4): ("0.384 / 0.383", "18.57 (0.3), 20.51 (0.3), 20.73 (0.3)"),
    (3, 0): ("0.515 / 0.491", "18.31 (0.5), 20.12 (0.7), 20.36 (0.5)"),
    (3, 1): ("0.479 / 0.461", "18.88 (0.5), 20.32 (0.5), 20.70 (0.5)"),
    (3, 2): ("0.475 / 0.458", "18.60 (0.5), 20.17 (0.5), 20.61 (0.3)"),
    (3, 3): ("0.462 / 0.454", "18.76 (0.5), 20.32 (0.5), 20.88 (0.5)"),
    (3, 4): ("0.465 / 0.451", "18.88 (0.5), 20.50 (0.7), 20.82 (0.5)"),
    (6, 0): ("0.657 / 0.637", "18.67 (0.7), 19.90 (0.9), 20.24 (0.7)"),
    (6, 1): ("0.620 / 0.596", "18.75 (0.7), 20.09 (0.9), 20.86 (0.7)"),
    (6, 2): ("0.607 / 0.589", "18.65 (0.7), 20.17 (0.9), 20.70 (0.7)"),
    (6, 3): ("0.617 / 0.582", "18.80 (0.7), 20.47 (0.7), 20.95 (0.7)"),
    (6, 4): ("0.603 / 0.575", "18.87 (0.7), 20.61 (0.7), 20.77 (0.7)"),
    (12, 0): ("0.922 / 0.871", "18.55 (0.9), 19.93 (0.9), 20.62 (0.9)"),
    (12, 1): ("0.830 / 0.805", "18.71 (0.9), 20.25 (0.9), 20.73 (0.9)"),
    (12, 2): ("0.834 / 0.794", "18.58 (0.9), 20.39 (0.9), 20.77 (0.7)"),
    (12, 3): ("0.801 / 0.781", "18.76 (0.9), 20.29 (0.9), 20.67 (0.9)"),
    (12, 4): ("0.799 / 0.773", "18.82 (0.9), 20.19 (0.9), 20.65 (0.9)"),
}
NEAR = 0.99  # of the fastest head: bold, as in the paper
HEADINGS = {specdecpp.TEST: "training set, test"}


def heads(table: pd.DataFrame) -> Section:
    """A row a head, and one each rule that it has to beat."""
    found = specdecpp.chosen_settings(table)
    wide = found.pivot(index="name", columns="prompts", values="speedup")
    sets, names = (list(dict.fromkeys(found[column])) for column in ("prompts", "name"))
    facts = table.drop_duplicates("name").set_index("name")
    rows = []
    for name in names:
        own = found[found["name"] == name].set_index("prompts").loc[sets]
        fact = facts.loc[name]
        kl, tokens = TABLE_3.get((fact["w_rej"], fact["depth"]), (cells.NONE, cells.NONE))
        rows.append(
            {
                "": name if kl == cells.NONE else "",
                "w_rej": cells.as_number(fact["w_rej"], "g"),
                "D": cells.as_number(fact["depth"], ".0f"),
                "train/KL": cells.as_number(fact["train_kl"], ".3f"),
                "eval/KL": cells.as_number(fact["eval_kl"], ".3f"),
                "test/KL": cells.as_number(fact["test_kl"], ".3f"),
                "h or K": cells.as_number(own["setting"].iloc[0], "g"),
                **{
                    HEADINGS.get(prompts, str(prompts)): cells.as_number(speedup, ".2f×")
                    for prompts, speedup in own["speedup"].items()
                },
                "each one's own best": ", ".join(
                    f"{best:.2f}× ({setting:g})"
                    for best, setting in zip(own["best"], own["best_setting"], strict=True)
                ),
                "paper: train / eval KL": kl,
                "paper: tokens/s (h)": tokens,
            }
        )
    columns = list(rows[0])
    trained = [name for name in names if not pd.isna(facts.loc[name, "w_rej"])]
    return Section(
        note="h or K (h = 0 is K = 1): the fastest on dev prompts of the training set; then the"
        " modelled speedup (Eq. 3.1) with it on the training set's test prompts and on the prompt"
        " sets; then the best h or K on each set, as the paper reports it. Heads learned from"
        f" {facts['examples'].max():,.0f} examples.",
        shown=cells.texts(rows),
        best=[
            (names.index(str(head)), columns.index(HEADINGS.get(name, name)))
            for name in sets
            for head, speedup in wide.loc[trained, name].items()
            if speedup >= NEAR * wide.loc[trained, name].max()
        ],
        legend="Bold: at least 99 % of the fastest head's on the set, as in the paper.",
        ruled=cells.group_ends("rule" if row[""] else row["w_rej"] for row in rows),
    )


ALONE = {
    "prompts": cells.text("prompts"),
    "model": cells.text("model"),
    "alone, ms": cells.milliseconds("t_target"),
    "R²": cells.number("r2", ".4f"),
    "decodings": cells.count("decodings"),
    "not determined": cells.text("refused"),
}


def stand_alone(table: pd.DataFrame) -> Section:
    return Section(
        note="Seconds of a text over its tokens and a constant for the prompt, of one model alone.",
        shown=cells.table(table, ALONE),
        ruled=cells.group_ends(table["model"]),
    )


SPECDECPP = (
    Exhibit("specdecpp-2", ("greedy",), specdecpp.stand_alone, stand_alone, verdicts.specdecpp_2),
    Exhibit("specdecpp-3", ("mixed", "top50", TIMES), specdecpp.heads, heads, verdicts.specdecpp_3),
)
