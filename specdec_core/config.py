"""One configuration, one value.

A :class:`Configuration` says how tokens are drafted and sampled. The same frozen value is a Tune
trial, an MLflow run, a registry entry, a Serve deployment and a line of a report. Unknown keys are
errors that name the key.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from specdec_core.errors import UserError

T = TypeVar("T")


class Value(BaseModel):
    """A frozen value that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(Value):
    """How a distribution is made from logits; applied alike to target and draft model."""

    temperature: float = Field(default=0.0, ge=0, description="0 is greedy decoding")
    top_k: int = Field(default=0, ge=0, description="keep the k most likely tokens; 0 keeps all")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass kept")
    coupling: Literal["rejection", "gumbel"] = Field(
        default="rejection",
        description="the acceptance rule when sampling, both lossless: rejection sampling, or draft"
        " and target choosing with the same noise (specdec_core.coupling)",
    )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def fixed_output(self) -> bool:
        """Whether the output depends on the target, the prompt and the seed alone, and not on what
        was drafted: a recorded trace then tells what any drafting would have done."""
        return self.greedy or self.coupling == "gumbel"


MaxTokens = Annotated[int, Field(ge=1, le=128, description="candidate tokens a round at most")]


MOST_TOKENS = 20  # SpecDec++'s bound


def _up_to(max_tokens: int) -> str:
    return "" if max_tokens == MOST_TOKENS else f" ≤{max_tokens}"


class FixedPolicy(Value):
    """K candidate tokens every round (Leviathan et al., 2023)."""

    kind: Literal["fixed"] = "fixed"
    max_tokens: MaxTokens = 5

    @property
    def label(self) -> str:
        return f"fixed K={self.max_tokens}"


class HeuristicPolicy(Value):
    """K grows by `increase` when everything was accepted and shrinks by `decrease` otherwise."""

    kind: Literal["heuristic"] = "heuristic"
    start: MaxTokens = 5
    increase: int = Field(default=2, ge=0)
    decrease: int = Field(default=1, ge=0)
    transient: bool = Field(
        default=True, description="every request begins with `start`; else K is carried over"
    )
    max_tokens: MaxTokens = MOST_TOKENS

    @property
    def label(self) -> str:
        name = "heuristic" if self.transient else "lasting heuristic"
        usual = (self.increase, self.decrease) == (2, 1)
        steps = "" if usual else f" +{self.increase}/-{self.decrease}"
        return f"{name} K₀={self.start}{steps}{_up_to(self.max_tokens)}"


class ConfidencePolicy(Value):
    """Stop after a token whose draft distribution peaks below `threshold`."""

    kind: Literal["confidence"] = "confidence"
    threshold: float = Field(default=0.4, ge=0, le=1)
    max_tokens: MaxTokens = MOST_TOKENS

    @property
    def label(self) -> str:
        return f"confidence {self.threshold:g}{_up_to(self.max_tokens)}"


class SvipPolicy(Value):
    """Stop after a token whose draft distribution has √H > `threshold` (SVIP, Eq. 7; H in nats)."""

    kind: Literal["svip"] = "svip"
    threshold: float = Field(default=0.8, ge=0)
    max_tokens: MaxTokens = MOST_TOKENS

    @property
    def label(self) -> str:
        return f"svip {self.threshold:g}{_up_to(self.max_tokens)}"


class ConfidenceProductPolicy(Value):
    """Stop when the product of the round's draft probabilities q(y) falls below `threshold`."""

    kind: Literal["confidence_product"] = "confidence_product"
    threshold: float = Field(default=0.4, ge=0, le=1)
    max_tokens: MaxTokens = MOST_TOKENS

    @property
    def label(self) -> str:
        return f"confidence product {self.threshold:g}{_up_to(self.max_tokens)}"


class DynamicConfidencePolicy(Value):
    """Stop behind a token with q(y) below a threshold that follows what was accepted and rejected
    (transformers' `assistant_confidence_threshold`)."""

    kind: Literal["dynamic_confidence"] = "dynamic_confidence"
    start: float = Field(default=0.4, gt=0, le=1)
    max_tokens: MaxTokens = MOST_TOKENS

    @property
    def label(self) -> str:
        return f"dynamic confidence from {self.start:g}{_up_to(self.max_tokens)}"


class PreCutPolicy(Value):
    """Tabular Q-learning of CONTINUE or STOP (Post-use & Pre-cut, §5.2 and Table 8)."""

    kind: Literal["pre_cut"] = "pre_cut"
    learning_rate: float = Field(default=0.1, gt=0, le=1)
    discount: float = Field(default=0.99, ge=0, le=1)
    exploration: float = Field(default=0.5, ge=0, le=1)
    exploration_decay: float = Field(default=0.98, ge=0, le=1, description="factor a round")
    optimism: float = Field(default=0.01, ge=0, description="head start of CONTINUE in Q_init")
    bins: int = Field(default=8, ge=1, le=64, description="of the confidence product, 2 a halving")
    target_cost: float = Field(default=5.0, gt=0, description="a target forward in draft calls")
    table: str | None = Field(default=None, description="a saved Q-table to start from")
    seed: int = Field(default=0, ge=0)
    max_tokens: MaxTokens = MOST_TOKENS

    @property
    def label(self) -> str:
        symbols = {
            "learning_rate": "α",
            "discount": "γ",
            "exploration": "ε",
            "exploration_decay": "ε-decay",
            "optimism": "optimism",
            "bins": "bins",
            "seed": "seed",
        }
        unusual = "".join(
            f" {symbol}={getattr(self, name):g}"
            for name, symbol in symbols.items()
            if getattr(self, name) != type(self).model_fields[name].default
        )
        start = f" from {Path(self.table).stem}" if self.table else ""
        return f"pre-cut c={self.target_cost:g}{unusual}{start}{_up_to(self.max_tokens)}"


class SpecDecPlusPlusPolicy(Value):
    """Stop when 1 − Π p̂ > `threshold`, the head's probability that a candidate of the round is
    rejected (SpecDec++, §4.3)."""

    kind: Literal["specdecpp"] = "specdecpp"
    head: str = Field(description="name or folder of a trained acceptance head")
    threshold: float = Field(default=0.7, ge=0, le=1)
    min_tokens: MaxTokens = 2
    max_tokens: MaxTokens = MOST_TOKENS

    def model_post_init(self, _: Any) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")

    @property
    def label(self) -> str:
        least = "" if self.min_tokens == 2 else f" ≥{self.min_tokens}"
        return f"SpecDec++ {_head(self.head)} h={self.threshold:g}{least}{_up_to(self.max_tokens)}"


class DecisionPolicy(Value):
    """Stop behind a candidate that a decision model gives less than `threshold` to be accepted
    (improved MCSD, §3.3); `cumulative`, behind candidates that it gives less than that together."""

    kind: Literal["decision"] = "decision"
    head: str = Field(description="name or folder of a trained decision model")
    threshold: float = Field(default=0.4, ge=0, le=1)
    cumulative: bool = False
    max_tokens: MaxTokens = MOST_TOKENS

    @property
    def label(self) -> str:
        product = " Π" if self.cumulative else ""
        return f"decision {_head(self.head)}{product} {self.threshold:g}{_up_to(self.max_tokens)}"


def _head(name: str) -> str:
    return Path(name).name.removeprefix("bundled:")


class OraclePolicy(Value):
    """Stop just before the next rejection (SpecDec++, Thm 4.1). Only a replay knows when."""

    kind: Literal["oracle"] = "oracle"
    max_tokens: MaxTokens = MOST_TOKENS

    @property
    def label(self) -> str:
        return f"oracle{_up_to(self.max_tokens)}"


Policy = Annotated[
    FixedPolicy
    | HeuristicPolicy
    | ConfidencePolicy
    | SvipPolicy
    | ConfidenceProductPolicy
    | DynamicConfidencePolicy
    | PreCutPolicy
    | SpecDecPlusPlusPolicy
    | DecisionPolicy
    | OraclePolicy,
    Field(discriminator="kind"),
]


class DraftModelDrafter(Value):
    """A small language model drafts a chain; the policy says when to stop."""

    kind: Literal["draft_model"] = "draft_model"
    draft: str | None = Field(default=None, description="a draft of the pair; unset, the first")
    policy: Policy = FixedPolicy()

    @property
    def label(self) -> str:
        return f"{self.draft or 'draft'} · {self.policy.label}"

    @property
    def family(self) -> str:
        return self.policy.kind


class PromptLookupDrafter(Value):
    """Copy what followed the last n-gram earlier in the text (Saxena's prompt lookup decoding)."""

    kind: Literal["prompt_lookup"] = "prompt_lookup"
    max_ngram: int = Field(default=3, ge=1, le=16)
    min_ngram: int = Field(default=1, ge=1, le=16)
    max_tokens: MaxTokens = 10

    def model_post_init(self, _: Any) -> None:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} exceeds max_ngram {self.max_ngram}")

    @property
    def label(self) -> str:
        return f"prompt lookup n≤{self.max_ngram} K={self.max_tokens}"

    @property
    def family(self) -> str:
        return self.kind


Drafter = Annotated[DraftModelDrafter | PromptLookupDrafter, Field(discriminator="kind")]


class Configuration(Value):
    """How one request is decoded. Without a drafter this is autoregressive decoding."""

    drafter: Drafter | None = None
    sampling: Sampling = Sampling()

    @property
    def id(self) -> str:
        """Stable short id: the hash of the canonical JSON."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]

    @property
    def label(self) -> str:
        """What a person reads in a table."""
        name = self.drafter.label if self.drafter else "autoregressive"
        if self.sampling.greedy:
            return name
        warpers = [f"T={self.sampling.temperature:g}"]
        warpers += [f"top-k={self.sampling.top_k}"] if self.sampling.top_k else []
        warpers += [f"top-p={self.sampling.top_p:g}"] if self.sampling.top_p < 1 else []
        warpers += ["coupled"] if self.sampling.coupling == "gumbel" else []
        return f"{name} ({', '.join(warpers)})"

    @property
    def family(self) -> str:
        """Configurations that differ only in their numbers share a family."""
        return self.drafter.family if self.drafter else "autoregressive"

    @property
    def lossless(self) -> bool:
        """Whether the output provably has the target's distribution."""
        return True

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


AUTOREGRESSIVE = Configuration()

DType = Literal["auto", "float32", "bfloat16", "float16"]


class RunnerSettings(Value):
    """How a model is executed.

    `auto` takes a GPU where there is one; the data type `auto` is the checkpoint's on a GPU and
    the faster one, measured, on a CPU.
    """

    device: str = "auto"
    target_dtype: DType = "auto"
    draft_dtype: DType = "auto"
    max_length: int = Field(default=1024, ge=8, description="tokens a slot can hold")
    threads: int = Field(default=1, ge=1, description="CPU threads for each process")
    pack: bool = Field(default=True, description="lay weights out for the CPU once, at loading")


class PairSpec(Value):
    """A target and its drafts by hub id, local folder, or `bundled:<name>`."""

    target: str = "bundled:target"
    drafts: dict[str, str] = Field(
        default={"medium": "bundled:draft-medium", "small": "bundled:draft-small"}
    )
    runner: RunnerSettings = RunnerSettings()

    def model_post_init(self, _: Any) -> None:
        if "target" in self.drafts:
            raise ValueError("drafts: a draft cannot be called target")

    @property
    def name(self) -> str:
        """A name for people and for the MLflow experiment."""
        models = (self.target, *self.drafts.values())
        names = [Path(model).name.removeprefix("bundled:") for model in models]
        return "-".join([*(["bundled"] if self.target.startswith("bundled:") else []), *names])


def parse(kind: type[T], value: Any, source: str) -> T:
    """Validate `value` as `kind`; a mismatch is a :class:`UserError` of one line that names
    `source`, the key and what would be right."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{source}: {describe(error)}") from None


def describe(error: ValidationError) -> str:
    """A pydantic error as one line."""
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"]) or "value"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key"
        elif item["type"] != "missing":
            message += f" (got {item['input']!r})"
        parts.append(f"{where}: {message}")
    return "; ".join(parts)


def load_yaml(path: str | Path) -> Any:
    """Read a YAML file; a missing or malformed one is a :class:`UserError`."""
    path = Path(path)
    try:
        return yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder, expected a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
