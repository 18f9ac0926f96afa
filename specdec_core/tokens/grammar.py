"""Output that follows a grammar: JSON, JSON of a schema, or a regular expression (llguidance).

At every place a mask says which tokens may come. It is one of the warpers of a request's text
(:mod:`specdec_core.tokens.text_warper`): applied alike to target and draft at every node of a tree,
after the tokens on the way to the node. So candidates follow the grammar, and speculation keeps the
distribution of the masked target.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from os.path import commonprefix
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec_core.base.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 2**20  # bytes of grammars that need not be compiled again
_LEAST = 2**14  # bytes that the smallest counts as
MAX_SOURCE = 2**18  # bytes of a grammar; what it compiles to is some thirty times as large
_SHOWN = 200  # characters of a complaint

COMPILERS = ThreadPoolExecutor(2, "grammars")  # compile beside the steps of engines and drafts


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must be: any JSON object, JSON of the schema `source` (itself JSON), text
    that the regular expression `source` matches as a whole, or text of the grammar `source` in
    llguidance's own language. JSON is written without whitespace between its parts.

    `program` is the same as an LLMatcher, compiled for a model (:meth:`Grammars.prepared`); a copy
    in another process has none."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    source: str = ""
    program: Annotated[Any, Field(exclude=True)] = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Grammar, (self.kind, self.source)

    def compiled(self) -> str:
        """The same in llguidance's form. Raises :class:`UserError` for a schema that is not a
        JSON object, and for too much."""
        from llguidance import LLMatcher

        if len(self.source.encode()) > MAX_SOURCE:
            raise UserError(f"{self.kind}: more than {MAX_SOURCE} bytes")
        if self.kind == "lark":
            return self.source
        if self.kind == "regex":
            return str(LLMatcher.grammar_from_regex(self.source))
        schema: Any = {"type": "object"}
        compact: Any = {"whitespace_flexible": False}
        try:
            if self.kind == "json_schema":
                schema = json.loads(self.source)
            compiled = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=compact)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.kind}: not a JSON schema: {error}") from None
        return str(compiled)


class Grammars:
    """Compiles grammars for a tokenizer, a model with `vocab_size` logits, and the tokens `final`
    that end its texts. It is used by several threads: compiling a large grammar takes a second."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, final: frozenset[int]
    ) -> None:
        self._hugging, self._size, self._final = tokenizer, vocab_size, final
        self._kept: dict[Grammar, LLMatcher] = {}  # the one that was used last is the last
        self._lock = Lock()

    def prepared(self, grammar: Grammar) -> Grammar:
        """The same with its program. Raises :class:`UserError`, in one line, for what is no
        grammar, and for a tokenizer that cannot be used."""
        if grammar.program is not None:
            return grammar
        with self._lock:
            program = self._kept.pop(grammar, None)
        if program is None:
            program = self._compile(grammar)
        with self._lock:
            self._kept[grammar] = program
            while sum(max(len(kept.source.encode()), _LEAST) for kept in self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        return replace(grammar, program=program)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher for one request. Raises as :meth:`prepared`."""
        program = self.prepared(grammar).program
        assert program is not None
        return Matcher(program.deep_copy(), self._size, self._final)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        if not isinstance(self._hugging, PreTrainedTokenizerFast) or not self._final:
            raise UserError(
                "a grammar takes a fast tokenizer, and a model that knows the end of a text"
            )
        # Tokens may have been added that the model has no logits for.
        size = max(self._size, len(self._hugging))
        return from_tokenizer(self._hugging, n_vocab=size, eos_token=sorted(self._final))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar.compiled(), log_level=0)
        if matcher.is_error():
            complaint = " ".join(matcher.get_error().split())
            raise UserError(f"{grammar.kind}: {complaint[:_SHOWN]}")
        return matcher


@lru_cache(maxsize=2)  # of the served model, and of one that replaces it
def grammars_of(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, final: frozenset[int]
) -> Grammars:
    """The grammars of a model, the same for every caller in this process."""
    return Grammars(tokenizer, vocab_size, final)


class Matcher:
    """Follows the output of one request, and candidates after it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, final: frozenset[int]) -> None:
        self._matcher, self._size = matcher, vocab_size
        self._final = sorted(final)
        self._read = 0  # tokens of the output that the matcher has consumed
        self._masks: dict[tuple[int, ...], np.ndarray] = {}  # after the output, by path
        self._lost = False  # the output has left the grammar, or this was too much for the matcher

    def cut_short(self, output: Sequence[int]) -> bool:
        """Whether a final token ends `output` before all is there that the grammar asks for."""
        if output[-1] not in self._final:
            return False
        self._follow(output[:-1])
        return self._lost or not self._matcher.is_accepting()

    def allowed(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> np.ndarray:
        """Which tokens (n, vocabulary) may come after `output` and each of the n `paths`. After a
        path that the grammar does not allow, all: nothing there is ever accepted."""
        self._follow(output)
        masks = np.ones((len(paths), self._size), dtype=bool)
        ahead: list[int] = []  # consumed beyond the output
        for n, path in enumerate(paths):
            # Draft and target ask for the same nodes.
            if (known := self._masks.get(tuple(path))) is not None:
                masks[n] = known
            elif not self._lost:
                common = len(commonprefix([ahead, list(path)]))  # noqa: RUF071 (not paths)
                self._matcher.rollback(len(ahead) - common)
                consumed = common + self._consume(path[common:])
                ahead = list(path[:consumed])
                if consumed == len(path):
                    masks[n] = self._masks[tuple(path)] = self._mask()
        if ahead and not self._lost:
            self._matcher.rollback(len(ahead))
        if self._lost:
            masks[:] = False
            masks[:, self._final] = True
        return masks

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that write what the grammar alone says comes next, as the tokenizer
        would write it. The target may write the same text in other tokens, so they are only
        candidates; a token is certain where it is the only one allowed."""
        self._follow(output)
        if self._lost or (output[-1:] and output[-1] in self._final):
            return []
        tokens = [int(token) for token in self._matcher.compute_ff_tokens()[:most]]
        return list(takewhile(lambda token: token < self._size, tokens))

    def _follow(self, output: Sequence[int]) -> None:
        if not self._lost:
            new = output[self._read :]
            if new:
                self._masks.clear()
            self._lost = self._consume(new) < len(new)
            self._read = len(output)

    def _consume(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, the grammar allows; these are consumed. A final
        token is not: nothing comes after it."""
        known = list(takewhile(lambda token: token not in self._final, tokens))
        return int(self._matcher.try_consume_tokens(known)) if known else 0

    def _mask(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._lost = bool(self._matcher.is_error())
        return np.unpackbits(bits, count=self._size, bitorder="little").view(bool)
