"""What reproduces the papers' tables and answers single questions.

The product imports nothing of it. A study a folder; `python -m research.<study>` runs it, and so
does `specdec lab <study>` in a checkout. `long_form` is a part of `papers`.
"""

STUDIES = {
    "papers": "Write the papers' comparison tables for a pair.",
    "bandits": "Compare bandits over drafters with each of their arms alone.",
    "forwards": "Time forwards of a model shape against the memory's bandwidth.",
    "split-forwards": "Time forwards of a target, whole and split over CPU cores.",
    "plan-tree": "Propose the best static token tree from a recording.",
    "drift": "Measure how far lossy drafting drifts from the target.",
    "bundled-pair": "Train the bundled pair from the standard library's source.",
}
