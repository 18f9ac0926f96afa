"""How few tokens a text can have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# What cuts a text, and leaves all of it.
_CUTTING = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
_COMPOSING = frozenset({"NFC", "NFKC"})
_COMPOSED = 4  # characters, at most, that become one


def longest_token(tokenizer: Any) -> int | None:
    """No token of `tokenizer` stands for more characters, so a text of n characters has at least n
    divided by this many tokens; None where one token may stand for any number of them."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return None
    known = json.loads(backend.to_str())
    model, cuts = known["model"], list(_parts(known["pre_tokenizer"], "pretokenizers"))
    normalises = list(_parts(known["normalizer"], "normalizers"))
    # Other models write one token for a whole word that they do not know.
    spelled = model.get("byte_fallback") or any(part["type"] == "ByteLevel" for part in cuts)
    complete = (
        model["type"] == "BPE"
        and spelled
        and all(part["type"] in _CUTTING and part.get("behavior") != "Removed" for part in cuts)
        and all(map(_keeps_length, normalises))
        # These take the blanks beside them.
        and not any(token["lstrip"] or token["rstrip"] for token in known["added_tokens"])
    )
    if not complete:
        return None
    composes = any(part["type"] in _COMPOSING for part in normalises)
    return max(map(len, tokenizer.get_vocab())) * (_COMPOSED if composes else 1)


def _parts(value: dict[str, Any] | None, of_sequence: str) -> Iterator[dict[str, Any]]:
    """A normaliser's or a pre-tokeniser's steps."""
    if value is None:
        return
    if value["type"] != "Sequence":
        yield value
        return
    for part in value[of_sequence]:
        yield from _parts(part, of_sequence)


def _keeps_length(normaliser: dict[str, Any]) -> bool:
    """Whether it leaves as many characters, or more; what composes them aside."""
    if normaliser["type"] == "Replace":
        found = normaliser["pattern"].get("String")
        return found is not None and len(found) <= len(normaliser["content"])
    return normaliser["type"] in {"Prepend", "NFD", "NFKD", *_COMPOSING}
