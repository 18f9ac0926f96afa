"""Names for files and metrics from labels."""

from __future__ import annotations

import hashlib
import re

_SPELT = {"λ": "lambda", "γ": "gamma", "α": "alpha", "×": "x", "+": "plus", "=": "_"}


def plain_name(text: str) -> str:
    """`text` in letters, digits, _ and - alone."""
    spelt = "".join(_SPELT.get(letter, letter) for letter in text)
    return re.sub(r"[^\w-]", "_", spelt, flags=re.ASCII)


def digest_name(text: str) -> str:
    """A name of 16 digits for a text of any length."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
