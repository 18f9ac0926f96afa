"""When drafting stops: the settings of every length policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from specdec_core.config.base import Value

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


class ByBatchPolicy(Value):
    """K candidate tokens by how many requests are decoded together: `tokens[n]` from n requests on,
    up to the next larger one that is named; 0 drafts nothing. With more requests a forward of
    several tokens each stops being nearly free, and a rejected candidate begins to cost."""

    kind: Literal["by_batch"] = "by_batch"
    tokens: dict[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0, le=128)]]

    @field_validator("tokens")
    @classmethod
    def _in_order(cls, tokens: dict[int, int]) -> dict[int, int]:
        if 1 not in tokens:
            raise ValueError("no K for 1 request, with which it has to begin")
        if not any(tokens.values()):
            raise ValueError("drafts nothing at any number of requests")
        return dict(sorted(tokens.items()))

    def __hash__(self) -> int:
        return hash(tuple(self.tokens.items()))

    @property
    def max_tokens(self) -> int:
        return max(self.tokens.values())

    def at(self, requests: int) -> int:
        """K when `requests` are decoded together."""
        return next(k for least, k in reversed(self.tokens.items()) if least <= requests)

    @property
    def label(self) -> str:
        (_, first), *others = self.tokens.items()
        return f"K={first}" + "".join(f", {k} from {least} on" for least, k in others)


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
    | ByBatchPolicy
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
