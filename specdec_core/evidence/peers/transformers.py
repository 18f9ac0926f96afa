"""transformers' own generation: autoregressive, assisted by a draft model, by prompt lookup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from specdec_core.config import Configuration
from specdec_core.evidence.peers.peer import Peer
from specdec_core.models.pair import Pair
from specdec_core.plugins.transformers import forget, of_pair


@dataclass(frozen=True)
class TransformersMode:
    """A way to call `generate`. Without assistant and lookup tokens it decodes autoregressively.

    `schedule` and `confidence` are transformers' num_assistant_tokens_schedule and
    assistant_confidence_threshold (0 turns the threshold off).
    """

    label: str
    assistant_tokens: int | None = None
    schedule: str = "constant"
    confidence: float = 0.0
    lookup_tokens: int | None = None
    lookup_size: int | None = None  # tokens compared at most; unset, transformers' own


TRANSFORMERS = TransformersMode("transformers")
ASSISTED = (
    *(TransformersMode(f"transformers assisted K={k}", k) for k in (3, 5, 7)),
    TransformersMode("transformers assisted heuristic", 5, "heuristic"),
    TransformersMode("transformers assisted confidence 0.4", 20, confidence=0.4),
)
LOOKUP = tuple(
    TransformersMode(f"transformers prompt lookup K={k}", lookup_tokens=k) for k in (5, 10, 20)
)


@torch.inference_mode()
def new_tokens(
    generate: Callable[..., Any],
    pair: Pair,
    tokens: tuple[int, ...],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """New tokens for one prompt, of a function with the arguments of `generate`. Sets the global
    seed of torch when it draws."""
    options: dict[str, Any] = {}
    if temperature > 0:
        torch.manual_seed(seed)
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    eos = sorted(pair.eos_token_ids)
    ids = torch.tensor([tokens], device=pair.target.device)
    output = generate(
        inputs=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=temperature > 0,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        **options,
    )
    return list(output[0, len(tokens) :].tolist())


class TransformersPeer(Peer):
    """`generate` in one mode. `load` gives the pair with its models as transformers loads them,
    the same one for all modes."""

    def __init__(
        self, load: Callable[[], Pair], mode: TransformersMode, draft: str | None = None
    ) -> None:
        self.name = mode.label + (f", {draft}" if draft else "")
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.settings = {k: v for k, v in asdict(mode).items() if k != "label" and v is not None}
        self._load, self._draft = load, draft
        self._mode = self._fresh = mode
        self._pair: Pair | None = None

    def open(self) -> None:
        self._pair = pair = self._load()
        eos = sorted(pair.eos_token_ids) or None
        for model in (pair.target, *pair.drafts.values()):
            # `generate` takes its defaults from here. Like the engine, it is to follow only the end
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

    def decode(
        self,
        prompt_tokens: tuple[int, ...],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[int]:
        assert self._pair is not None  # it is open
        generate = self._generate_of(self._pair)
        return new_tokens(generate, self._pair, prompt_tokens, max_new_tokens, temperature, seed)

    def _generate_of(self, pair: Pair) -> Callable[..., Any]:
        """`generate` in the mode."""
        target: Any = pair.target  # causal models generate, which their base class does not say
        mode, options = self._mode, dict[str, Any]()
        if mode.lookup_tokens is not None:
            options["prompt_lookup_num_tokens"] = mode.lookup_tokens
        if mode.lookup_size is not None:
            options["max_matching_ngram_size"] = mode.lookup_size
        if self._draft is None:
            return partial(target.generate, **options)
        assistant = pair.draft_models[self._draft]
        # `generate` reads these from the assistant, and writes adjusted values to it.
        settings = assistant.generation_config
        settings.num_assistant_tokens = mode.assistant_tokens
        settings.num_assistant_tokens_schedule = mode.schedule
        settings.assistant_confidence_threshold = mode.confidence

        def assisted(**given: Any) -> Any:
            output = target.generate(**given, **options, assistant_model=assistant)
            if mode.schedule == "heuristic":
                # Its K lasts over requests, here as well, though modes share the assistant.
                self._mode = replace(mode, assistant_tokens=settings.num_assistant_tokens)
            return output

        return assisted

    def forget(self) -> None:
        self._mode = self._fresh

    def close(self) -> None:
        self._pair = None


class TransformersPlugIn(TransformersPeer):
    """`generate` with this library's plug-in. The drafts of `pair` run as in its engine."""

    with_ours = True

    def __init__(
        self, load: Callable[[], Pair], pair: Pair, configuration: Configuration, label: str
    ) -> None:
        super().__init__(load, TransformersMode(f"transformers with our plug-in, {label}"))
        self.settings = {"configuration": configuration.model_dump(mode="json")}
        self._engine_pair, self._configuration = pair, configuration
        self._generate: Callable[..., Any] | None = None

    def open(self) -> None:
        super().open()
        assert self._pair is not None
        pair = replace(self._engine_pair, target=self._pair.target)
        self._generate = of_pair(pair, self._configuration)
        self.settings |= {
            "draft_dtype": pair.spec.runner.draft_dtype,
            "compiled_drafts": pair.spec.runner.compile,
        }

    def forget(self) -> None:
        assert self._generate is not None  # it is open
        forget(self._generate)

    def _generate_of(self, pair: Pair) -> Callable[..., Any]:
        assert self._generate is not None  # it is open
        return self._generate

    def close(self) -> None:
        super().close()
        self._generate = None


def transformers_peers(drafts: list[str], load: Callable[[], Pair]) -> Iterator[TransformersPeer]:
    """Autoregressive decoding, every assisted mode with every draft, and prompt lookup."""
    yield TransformersPeer(load, TRANSFORMERS)
    for draft in drafts:
        for mode in ASSISTED:
            yield TransformersPeer(load, mode, draft)
    for mode in LOOKUP:
        yield TransformersPeer(load, mode)
