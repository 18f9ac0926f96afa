"""Documents and prompts of the bundled pair, from the standard library's source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec_core.prompts.stdlib import PromptReference, Split, module_source, modules_of

END_OF_TEXT = "<|endoftext|>"


def texts(split: Split, limit: int | None = None) -> list[str]:
    """Sources of the modules of one split, empty ones left out."""
    sources = (module_source(module) for module in modules_of(split, limit))
    return [source for source in sources if source.strip()]


def encode_documents(tokenizer: Any, documents: Sequence[str]) -> list[list[int]]:
    """Token ids of each document, each ended by the end-of-text token."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    return [[*ids, end] for ids in tokenizer(list(documents), verbose=False)["input_ids"]]


def save_references(references: Sequence[PromptReference], path: Path) -> None:
    """Write references as JSON, one per line so that a change reads well in a diff."""
    rows = ",\n".join(json.dumps(asdict(reference)) for reference in references)
    path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
