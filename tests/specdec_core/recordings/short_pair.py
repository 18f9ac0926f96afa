"""The tiny pair with drafts that have fewer positions than their target."""

from dataclasses import replace
from pathlib import Path

from transformers import LlamaForCausalLM

from specdec_core.config import PairSpec
from specdec_core.models.pair import Pair, load_pair
from tests.specdec_core.models.eagle.pair_heads import head_of

POSITIONS = 24  # between the lengths of the proofs' prompts
HEAD = "head"


def short_spec(spec: PairSpec, folder: Path, positions: int = POSITIONS) -> PairSpec:
    """The pair with a draft, written to `folder`, that has `positions` positions."""
    draft = LlamaForCausalLM.from_pretrained(spec.drafts["draft"])
    draft.config.max_position_embeddings = positions
    draft.save_pretrained(folder)
    for file in Path(spec.drafts["draft"]).glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return spec.model_copy(update={"drafts": {"draft": str(folder)}})


def short_pair(pair: Pair, folder: Path) -> Pair:
    """The pair with such a draft, and with a head that has as many positions."""
    short = load_pair(short_spec(pair.spec, folder))
    head = head_of(pair, max_position_embeddings=POSITIONS)
    found = replace(short, drafts={**short.drafts, HEAD: head})
    found.__dict__["fingerprints"] = {**short.fingerprints, HEAD: "0"}
    return found
