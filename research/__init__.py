"""What reproduces the papers' tables and answers single questions.

The product imports nothing of it. A study a folder; `python -m research.<study>` runs it, and so
does `specdec lab <study>` in a checkout.
"""

STUDIES = {
    "papers": "Write the papers' comparison tables for a pair.",
    "policies": "Compare length policies on recordings, by replay alone.",
    "bandits": "Compare bandits over drafters with each of their arms alone.",
    "plan-tree": "Propose the best static token tree from a recording.",
    "drift": "Measure how far lossy drafting drifts from the target.",
    "overlap": "Time a draft model that drafts while the target verifies (PEARL).",
    "long-form": "Measure speculative decoding along long sequences.",
    "scale": "Measure how counting scales over nodes, and what limits it.",
    "bundled-pair": "Train the bundled pair from the standard library's source.",
}
