"""The configurations that tests of servers, sweeps and commands share."""

from specdec_core.config import Configuration


def drafting(kind: str, **settings: object) -> Configuration:
    """The configuration with this drafter."""
    return Configuration.model_validate({"drafter": {"kind": kind, **settings}})


CHAIN = drafting("draft_model")
FOUR = drafting("draft_model", policy={"kind": "fixed", "max_tokens": 4})
LOOKUP = drafting("prompt_lookup")
SUFFIX = drafting("suffix")
LOSSY = drafting("target_tree", branching=(2, 2, 1))
# Where the target begins the trees, the first round of an answer adds nothing to it.
BEGUN = drafting("target_tree", branching=(1, 2, 2))
BANDIT = drafting("bandit", arms=[1, 4])
# Unless the target waits, whether a candidate comes in time says how busy this machine is.
PEARL = drafting("pearl", window=4, wait=2)
