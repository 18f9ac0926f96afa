"""Build a datastore: documents' tokens and their suffix array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_folder
from specdec_core.drafting.datastores.card import (
    CARD,
    STARTS,
    SUFFIXES,
    TOKENS,
    DatastoreCard,
    separator_for,
    token_type,
)
from specdec_core.models.fingerprints import tokenizer_digest


def write_datastore(
    documents: Iterable[Sequence[int]], sources: Sequence[str], tokenizer: Any, folder: Path
) -> DatastoreCard:
    """Write the datastore of `documents`, lists of `tokenizer`'s ids, whole or not at all. It
    replaces what is at `folder`.

    Sorting takes about 10 bytes of memory a token.

    Raises:
        UserError: there are no documents, or only empty ones.
    """
    separator = separator_for(tokenizer)
    parts = [np.asarray([*ids, separator], dtype=np.uint32) for ids in documents if len(ids)]
    if not parts:
        raise UserError(f"{', '.join(sources)}: no text in it; an empty datastore finds nothing")
    tokens = np.concatenate(parts).astype(token_type(separator))
    card = DatastoreCard(
        sources=tuple(sources),
        tokenizer=tokenizer_digest(tokenizer),
        separator=separator,
        documents=len(parts),
        tokens=len(tokens) - len(parts),
    )
    starts = np.zeros(separator + 2, dtype=np.int64)
    np.cumsum(np.bincount(tokens, minlength=separator + 1), out=starts[1:])
    with atomic_folder(folder) as new:
        np.save(new / TOKENS, tokens)
        np.save(new / SUFFIXES, suffix_array(tokens))
        np.save(new / STARTS, starts)
        (new / CARD).write_text(card.model_dump_json(indent=1))
    return card


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Where each suffix of `tokens` (N,) begins, in lexicographic order (N,)."""
    from pydivsufsort import divsufsort

    suffixes = divsufsort(tokens.astype(tokens.dtype.newbyteorder("=")))
    return np.asarray(suffixes, np.int32 if len(tokens) < 2**31 else np.int64)
