"""The runners of a pair's draft models, which several drafters may share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec_core.models.eagle.runner import ReadRows
from specdec_core.models.pair import Pair
from specdec_core.models.runner import ModelRunner


class DraftRunners:
    """Runners with `slots` rows each, opened when first needed; heads draft from the rows of
    `target`. A row holds `max_length` tokens, or fewer where the draft model has fewer positions.
    For `cache_tokens` see :meth:`Pair.open_runner`."""

    def __init__(
        self,
        pair: Pair,
        slots: int,
        target: ModelRunner | ReadRows | None,
        max_length: int,
        cache_tokens: int | None = None,
    ) -> None:
        self._pair, self._slots, self._target = pair, slots, target
        self._max_length, self._cache_tokens = max_length, cache_tokens
        self._runners: dict[str, ModelRunner] = {}
        self._used: set[str] = set()  # drafts of the current drafter

    def open(self, name: str | None) -> ModelRunner:
        """The runner of the draft `name`, by default of the pair's first draft."""
        name = self._pair.draft_name(name)
        self._used.add(name)
        if name not in self._runners:
            length = min(self._max_length, self._pair.follows(name))
            self._runners[name] = self._pair.open_runner(
                name, self._slots, self._target, length, self._cache_tokens
            )
        return self._runners[name]

    def reset(self) -> None:
        """Undo the settings that drafters have made."""
        self._used.clear()
        for runner in self._runners.values():
            runner.watch_hidden(False)
            runner.lazy = False

    def begin(self, slot: int, source: int, count: int) -> None:
        """Make a slot's rows hold the first `count` tokens of the rows of slot `source`, or as many
        as these hold."""
        for runner in self._runners.values():
            held = min(count, runner.length(source))
            if source == slot:
                runner.truncate(slot, held)
            else:
                runner.fork(source, [slot], [held])

    def cut(self, slot: int, length: int) -> None:
        """Truncate a slot's rows to `length` tokens."""
        for runner in self._runners.values():
            runner.truncate(slot, min(length, runner.length(slot)))

    def read(self, texts: Mapping[int, Sequence[int]], until: Mapping[int, int]) -> None:
        """Prefill each slot's rows up to the first `until[slot]` tokens of its sequence, which the
        target has prefilled. Lazy runners, and runners that a sequence is too long for, are left
        out."""
        for runner in (self._runners[name] for name in self._used):
            fitting = {row: text for row, text in texts.items() if len(text) <= runner.max_length}
            held = {row: runner.length(row) for row in fitting}
            rows = [row for row in fitting if held[row] < until[row]]
            if rows and not runner.lazy:
                runner.prefill(rows, [texts[row][held[row] : until[row]] for row in rows])

    @property
    def seconds(self) -> float:
        """Seconds spent in all their forwards so far."""
        return sum(runner.seconds for runner in self._runners.values())
