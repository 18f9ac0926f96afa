"""transformers' own `generate`, and `generate` with our plug-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from specdec_core.models.pair import Pair, load_pair
from specdec_core.servers.peer import Peer
from specdec_core.servers.server import Mode
from specdec_core.servers.transformers import ASSISTANT
from specdec_core.servers.transformers.plug_in import Speculative

_LENGTH = "num_assistant_tokens"


def peers_of(pair: Pair, modes: Sequence[Mode]) -> list[Peer]:
    """A peer for each mode. They share the target and the drafts, which transformers loads at the
    first use; our plug-in runs the drafts of `pair`."""
    # Its drafts are in the faster data type.
    load = cache(lambda: load_pair(pair.spec.with_runner(pack=False, draft_dtype="auto")))
    return [TransformersPeer(pair, mode, load) for mode in modes]


class TransformersPeer(Peer):
    """`generate` in one mode of `pair`. `load` gives the pair as transformers loads it."""

    def __init__(self, pair: Pair, mode: Mode, load: Callable[[], Pair]) -> None:
        self.name, self.with_ours = mode.name, mode.with_ours
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._fresh = {k: v for k, v in mode.settings.items() if k != ASSISTANT}
        self.settings, self._options = dict(self._fresh), dict(self._fresh)
        self._engine_pair, self._mode, self._load = pair, mode, load
        self._pair: Pair | None = None
        self._plugged: Speculative | None = None

    def open(self) -> None:
        self._pair = pair = self._load()
        eos = sorted(pair.eos_token_ids) or None
        for model in (pair.target, *pair.drafts.values()):
            # `generate` takes its defaults from here. Like the engine, it follows only the end
            # tokens of a checkpoint's settings.
            model.generation_config = GenerationConfig(eos_token_id=eos)
        runner = pair.spec.runner
        self.settings |= {
            "target_dtype": runner.target_dtype,
            "draft_dtype": runner.draft_dtype,
            "device": runner.device,
            "threads": runner.threads,
            "attention": pair.target.config._attn_implementation,
        }
        if self._mode.plug_in is not None:
            ours = replace(self._engine_pair, target=pair.target)
            self._plugged = Speculative(ours, self._mode.plug_in)
            self.settings |= {
                "configuration": self._mode.plug_in.model_dump(mode="json"),
                "draft_dtype": ours.spec.runner.draft_dtype,
                "compiled_drafts": ours.spec.runner.compile,
            }

    @torch.inference_mode()
    def decode(
        self,
        prompt_tokens: tuple[int, ...],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[int]:
        """As :meth:`Peer.decode`. Sets the global seed of torch when it draws."""
        assert self._pair is not None  # it is open
        options: dict[str, Any] = {}
        if temperature > 0:
            torch.manual_seed(seed)
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        eos = sorted(self._pair.eos_token_ids)
        ids = torch.tensor([prompt_tokens], device=self._pair.target.device)
        output = self._generate_of(self._pair)(
            inputs=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=temperature > 0,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            **options,
        )
        return list(output[0, len(prompt_tokens) :].tolist())

    def _generate_of(self, pair: Pair) -> Callable[..., Any]:
        """`generate` in the mode."""
        if self._plugged is not None:
            return self._plugged
        target: Any = pair.target  # causal models generate, which their base class does not say
        if self._mode.draft is None:
            return partial(target.generate, **self._options)
        assistant = pair.draft_models[self._mode.draft]
        # `generate` reads these from the assistant, and writes adjusted values to it.
        settings = assistant.generation_config
        settings.update(**self._options)

        def assisted(**given: Any) -> Any:
            output = target.generate(**given, assistant_model=assistant)
            if settings.num_assistant_tokens_schedule == "heuristic":
                # K lasts over requests, here as well, though modes share the assistant.
                self._options[_LENGTH] = settings.num_assistant_tokens
            return output

        return assisted

    def forget(self) -> None:
        self._options = dict(self._fresh)
        if self._plugged is not None:
            self._plugged.forget()

    def close(self) -> None:
        self._pair = self._plugged = None
