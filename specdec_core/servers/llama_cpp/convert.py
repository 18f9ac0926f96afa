"""Runs llama.cpp's `convert_hf_to_gguf.py` for tokenizers that it does not know, too.

The script recognises how a byte-level BPE splits a text before its merges, and refuses a tokenizer
that is not in its list. Here such a tokenizer gets the split of GPT-2. Where requests
have token ids, the server splits nothing.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

UNKNOWN = "gpt-2"


def main() -> None:
    script = Path(sys.argv[1])
    del sys.argv[0]
    sys.path.insert(0, str(script.parent))
    base: Any = importlib.import_module("conversion.base")
    known = base.TextModel.get_vocab_base_pre

    def split(model: Any, tokenizer: Any) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            return UNKNOWN

    base.TextModel.get_vocab_base_pre = split
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
