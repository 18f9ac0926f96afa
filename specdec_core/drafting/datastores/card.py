"""The contents of a datastore and its folder.

datastore.json   the card
tokens.npy       (N,) the tokens of all documents, each document ended by `separator`;
                 big-endian, so that bytes compare as tokens do
suffixes.npy     (N,) where each suffix of the tokens begins, in lexicographic order
starts.npy       (separator + 2,) how many suffixes begin with a smaller token
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from specdec_core.config import Value

CARD, TOKENS, SUFFIXES, STARTS = "datastore.json", "tokens.npy", "suffixes.npy", "starts.npy"


class DatastoreCard(Value):
    """Everything about a datastore but its tokens."""

    version: Literal[1] = 1
    sources: tuple[str, ...] = Field(description="where the documents are from")
    tokenizer: str = Field(description="digest of the vocabulary")
    separator: int = Field(ge=1, description="ends each document; larger than every token")
    documents: int = Field(ge=1)
    tokens: int = Field(ge=1, description="of the documents, without separators")


def token_type(separator: int) -> np.dtype:
    """How tokens up to `separator` are stored."""
    return np.dtype(">u2" if separator < 2**16 else ">u4")


def separator_for(tokenizer: Any) -> int:
    """The smallest number larger than every token."""
    return int(max(tokenizer.get_vocab().values())) + 1
