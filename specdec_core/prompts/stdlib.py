"""The corpus of the bundled pair: the running interpreter's own standard library.

No source is copied into the repository. Modules are read where the interpreter keeps them, split
by a hash of their name, and the bundled prompts are references into them (`prompts.json`).
"""

import ast
import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from specdec_core.base.errors import UserError

Split = Literal["held_out", "seen"]
SPLITS: tuple[Split, ...] = get_args(Split)

PROMPTS_FILE = Path(__file__).parents[1] / "bundled" / "prompts.json"
TRAINING_PROMPTS = 1024
PER_MODULE = 4  # prompts that are drawn from a module

# Tests read differently and are twice the size; the tables teach nothing but digits.
_SKIPPED_FOLDERS = frozenset(
    [
        "__pycache__",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
    ]
)
_SKIPPED_MODULES = frozenset({"html.entities"})


class MissingReference(UserError):
    """A prompt reference names a module or an anchor that this interpreter does not have."""


@dataclass(frozen=True)
class PromptReference:
    """The last `tokens` tokens of `module`'s source up to and including `anchor`'s signature.

    `anchor` is the qualified name of a function or class; its docstring, where it has one, belongs
    to the prompt, as in HumanEval.
    """

    module: str
    anchor: str
    tokens: int
    split: Split

    @property
    def id(self) -> str:
        return f"stdlib/{self.module}:{self.anchor}"


@cache
def standard_library_modules() -> dict[str, Path]:
    """Every module of the corpus, dotted name -> source file, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS.intersection(parts) or any("-" in part for part in parts):
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        if name not in _SKIPPED_MODULES and not name.startswith("_sysconfigdata"):
            modules[name] = path
    return dict(sorted(modules.items()))


def split_of(module: str) -> Split:
    """One module in ten is held out, by a hash of its name: the same ones on every machine."""
    return "held_out" if hashlib.sha256(module.encode()).digest()[0] % 10 == 0 else "seen"


@cache
def module_source(module: str) -> str:
    """Source text of a standard-library module, with `\\n` line ends.

    Raises `MissingReference` when the running interpreter does not ship it.
    """
    path = standard_library_modules().get(module)
    if path is None:
        raise MissingReference(f"the running interpreter has no standard-library module {module!r}")
    return path.read_text(encoding="utf-8", errors="replace")


def modules_of(split: Split, limit: int | None = None) -> list[str]:
    """Names of the modules of one split; the first `limit` of them for quick runs."""
    return [name for name in standard_library_modules() if split_of(name) == split][:limit]


def _definitions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{name}.")


def _last_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """The line where the signature ends, or the docstring where there is one."""
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        return first.end_lineno or first.lineno
    decorated: list[ast.expr] = getattr(first, "decorator_list", [])
    return max(min([first.lineno, *(item.lineno for item in decorated)]) - 1, node.lineno)


@cache
def anchors(module: str) -> dict[str, int]:
    """Qualified name of every function and class -> how many source lines a prompt there spans.

    Raises `MissingReference` when the running interpreter does not ship the module.
    """
    lines: dict[str, int] = {}
    for name, node in _definitions(ast.parse(module_source(module))):
        if node.body[0].lineno > node.lineno:
            lines.setdefault(name, _last_line(node))
    return lines


@cache
def _lines(module: str) -> list[str]:
    return module_source(module).splitlines()


def text_up_to_anchor(module: str, anchor: str) -> str:
    """The module's text up to and including that definition's signature.

    The last line break is left off: byte-level BPE joins it to the indentation that follows, so the
    corpus never has it as a separate token.

    Raises `MissingReference` when the running interpreter lacks the module or the anchor.
    """
    count = anchors(module).get(anchor)
    if count is None:
        raise MissingReference(f"standard-library module {module!r} has no {anchor!r} here")
    return "\n".join(_lines(module)[:count])


def resolve(reference: PromptReference, tokenizer: Any) -> str:
    """The prompt's text, read from the running interpreter's source.

    Raises `MissingReference` in one line when this interpreter lacks the module or the anchor.
    """
    text, count = text_up_to_anchor(reference.module, reference.anchor), reference.tokens
    ids = tokenizer(text[-count * 24 :], verbose=False)["input_ids"]
    return str(tokenizer.decode(ids[-count:], skip_special_tokens=False))


def load_references(split: Split, path: Path = PROMPTS_FILE) -> list[PromptReference]:
    """The committed references of one split, in their fixed order."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [PromptReference(**row) for row in rows if row["split"] == split]


def resolve_prompts(
    split: Split, tokenizer: Any, path: Path = PROMPTS_FILE
) -> tuple[list[tuple[str, str]], list[str]]:
    """(id, text) of every bundled prompt of `split`, 32 to 256 tokens each; and a line on each that
    is left out, because this interpreter's version lacks the definition."""
    prompts, left_out = [], []
    for reference in load_references(split, path):
        try:
            prompts.append((reference.id, resolve(reference, tokenizer)))
        except MissingReference as reason:
            left_out.append(str(reason))
    return prompts, left_out


def draw_references(
    split: Split,
    tokenizer: Any,
    *,
    modules: int | None = None,
    without: Collection[str] = (),
) -> Iterator[tuple[PromptReference, str]]:
    """References and their texts in a deterministic order: by hash, at most :data:`PER_MODULE` from
    a module, none from the modules `without`.

    `modules` limits the draw to the first `modules` modules of the split.
    Only ASCII prompts that encode back to the same number of tokens are taken, so that a prompt's
    length is what its reference says.
    """
    candidates = []
    for module in modules_of(split, modules):
        if module not in without:
            for anchor in anchors(module):
                key = hashlib.sha256(f"{module}:{anchor}".encode()).digest()
                tokens = 32 + int.from_bytes(key[:4], "big") % 225
                candidates.append((key, PromptReference(module, anchor, tokens, split)))
    candidates.sort(key=lambda item: item[0])
    taken: Counter[str] = Counter()
    for _, reference in candidates:
        if taken[reference.module] < PER_MODULE:
            prompt = resolve(reference, tokenizer)
            if prompt.isascii() and len(tokenizer(prompt)["input_ids"]) == reference.tokens:
                taken[reference.module] += 1
                yield reference, prompt


def training_prompts(tokenizer: Any, count: int = TRAINING_PROMPTS) -> Iterator[tuple[str, str]]:
    """(id, text) of up to `count` prompts to train policies on, drawn from the seen modules that
    the bundled prompts do not come from. Two definitions may end in the same text, so texts may
    repeat."""
    used = {reference.module for reference in load_references("seen")}
    for reference, prompt in islice(draw_references("seen", tokenizer, without=used), count):
        yield reference.id, prompt
