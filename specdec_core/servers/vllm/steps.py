"""Access to vLLM's engine in its own process: step times, lengths, what its drafter learned.

Runs in vLLM's own virtual environment. Every step verifies the candidates of the step before it and
proposes the next ones, as for any request. The number of candidates is set before each step, so
vLLM starts once for all lengths.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

WARM = 2  # untimed steps of a length
WARM_SECONDS = 0.2


class StepClock:
    """Times the steps of an engine that runs in this process.

    With `forced`, fixed candidates replace those that the engine proposes, so that a lookup, which
    may find nothing, is verified at every width. Most fixed candidates are rejected.
    """

    def __init__(self, llm: LLM) -> None:
        self._engine: Any = llm.llm_engine
        core: Any = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._vocabulary = self._engine.vllm_config.model_config.get_vocab_size()
        self._length = 0
        self._forward = 0.0  # seconds of the target's forwards, summed up

    def set_length(self, length: int) -> None:
        """Propose chains of this length from now on, where the engine was started with lengths by
        load."""
        self._length = length
        if (by_load := self._scheduler.dynamic_sd_lookup) is not None:
            by_load[:] = [length] * len(by_load)

    def forget(self) -> None:
        """Have the drafter forget what it learned from earlier requests, while no request is
        decoded. Of vLLM's drafters, suffix decoding alone learns: it copies from all earlier
        answers."""
        drafter: Any = getattr(self._runner, "drafter", None)
        if (cache := getattr(drafter, "suffix_cache", None)) is not None:
            drafter.suffix_cache = type(cache)(cache.max_tree_depth, cache.max_cached_requests)
        elif (own := getattr(drafter, "forget", None)) is not None:  # our plug-in
            own()

    def measure(
        self, rows: int, context: int, lengths: Sequence[int], repeats: int, forced: bool
    ) -> list[dict[str, float]]:
        """For each length the median seconds of a step in which `rows` rows verify that number of
        candidates, and of its forward of the target, with about `context` tokens in the cache.

        Steps of one length follow each other, because steps of changing lengths are slower. All
        lengths are measured twice, the second time in reverse order, because sequences grow."""
        self._warm_up()
        restore = [self._timed(self._runner, "_model_forward")]
        restore.append(self._timed(self._runner.model, "compute_logits"))
        if forced:
            restore.append(self._force())
        turn = WARM + math.ceil(repeats / 2)  # steps; as many come before `context` as behind it
        self._begin(rows, max(context - len(lengths) * turn, 4))
        samples: list[list[tuple[float, float]]] = [[] for _ in lengths]
        order = [*zip(lengths, samples, strict=True)]
        for length, taken in (*order, *reversed(order)):
            self.set_length(length)
            for number in range(turn):
                self._forward = 0.0
                start = perf_counter()
                self._engine.step()
                # The first one verifies what was proposed before, by another length.
                if number >= WARM:
                    taken.append((perf_counter() - start, self._forward))
        self._abort()
        for undo in restore:
            undo()
        return [
            {
                "step": statistics.median(step for step, _ in taken),
                "forward": statistics.median(forward for _, forward in taken),
            }
            for taken in samples
        ]

    def prefill(self, tokens: int, repeats: int) -> float:
        """The median seconds from a request with a prompt of `tokens` tokens to the end of its
        prefill step, in which a draft model proposes one candidate."""
        taken = []
        self._warm_up()
        self.set_length(1)
        for number in range(repeats + WARM):
            start = perf_counter()
            self._add(number, tokens)
            self._engine.step()
            taken.append(perf_counter() - start)
            self._abort()
        return statistics.median(taken[WARM:])

    def _warm_up(self) -> None:
        """Decode a sequence that is thrown away: after a pause the first steps are slow."""
        self._begin(1, 16)
        end = perf_counter() + WARM_SECONDS
        while perf_counter() < end and self._engine.has_unfinished_requests():
            self._engine.step()
        self._abort()

    def _add(self, row: int, tokens: int) -> None:
        """A request with a prompt of `tokens` tokens."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(
            max_tokens=1 << 20, temperature=0.0, ignore_eos=True, detokenize=False
        )
        # No prompt repeats itself.
        ids = [(row * 101 + 7 * n * n + n) % self._vocabulary for n in range(tokens)]
        self._engine.add_request(f"row {row}", TokensPrompt(prompt_token_ids=ids), sampling)

    def _abort(self) -> None:
        """End all requests."""
        # By vLLM's internal ids.
        running = [request.request_id for request in self._scheduler.running]
        self._engine.abort_request(running, internal=True)
        if self._engine.has_unfinished_requests():
            raise RuntimeError("vLLM continues requests that were aborted")

    def _begin(self, rows: int, tokens: int) -> None:
        """Rows that decode, each after a prompt of `tokens` tokens."""
        for row in range(rows):
            self._add(row, tokens)
        while self._scheduler.waiting or any(
            request.num_computed_tokens < request.num_prompt_tokens
            for request in self._scheduler.running
        ):
            self._engine.step()

    def _force(self) -> Callable[[], None]:
        """Replace the drafter's candidates by fixed ones, after it has looked for its own."""
        drafter = self._runner.drafter
        propose = drafter.propose

        def forced(*args: Any, **kwargs: Any) -> list[list[int]]:
            found = propose(*args, **kwargs)
            return [[n % self._vocabulary for n in range(self._length)] for _ in found]

        drafter.propose = forced
        return lambda: delattr(drafter, "propose")

    def _timed(self, owner: Any, name: str) -> Callable[[], None]:
        """Add a method's seconds to the forward's, until it is undone."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = method(*args, **kwargs)
            self._forward += perf_counter() - start
            return result

        setattr(owner, name, timed)
        return lambda: delattr(owner, name)
