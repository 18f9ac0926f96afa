"""The labels of drafters and policies until version 0.1.0. Saved states of bandits from then name
their arms by them; nothing else reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec_core.config.kinds import KindSettings
from specdec_core.drafting.bandit.settings import RULE_NAMES

_PRE_CUT = {
    "learning_rate": "α",
    "discount": "γ",
    "exploration": "ε",
    "exploration_decay": "ε-decay",
    "optimism": "optimism",
    "bins": "bins",
    "seed": "seed",
}


def old_label(settings: KindSettings) -> str:
    """The old label; the current one for a kind added by :func:`add_drafter` or `add_policy`."""
    write = _OLD.get(settings.kind)
    return settings.label if write is None else write(settings)


def _drafted(s: Any, rest: str) -> str:
    return f"{s.draft_name} · {rest}"


def _bound(s: Any) -> str:
    return "" if s.max_tokens == 20 else f" ≤{s.max_tokens}"


def _matched(s: Any) -> str:
    return f" ≥{s.min_match}" if s.min_match > 1 else ""


def _replaced(s: Any) -> str:
    return " replaced" if s.replacement else ""


def _by_batch(s: Any) -> str:
    (_, first), *others = s.tokens.items()
    return f"K={first}" + "".join(f", {k} from {least} on" for least, k in others)


def _heuristic(s: Any) -> str:
    name = "heuristic" if s.transient else "lasting heuristic"
    steps = "" if (s.increase, s.decrease) == (2, 1) else f" +{s.increase}/-{s.decrease}"
    return f"{name} K₀={s.start}{steps}{_bound(s)}"


def _pre_cut(s: Any) -> str:
    unusual = "".join(
        f" {symbol}={getattr(s, name):g}"
        for name, symbol in _PRE_CUT.items()
        if getattr(s, name) != type(s).model_fields[name].default
    )
    start = f" from {Path(s.table).stem}" if s.table else ""
    cost = s.target_cost if s.asks_cost else f"{s.target_cost:g}"
    return f"pre-cut c={cost}{unusual}{start}{_bound(s)}"


def _specdecpp(s: Any) -> str:
    least = "" if s.min_tokens == 2 else f" ≥{s.min_tokens}"
    return f"SpecDec++ {s.head_name} h={s.threshold:g}{least}{_bound(s)}"


def _decision(s: Any) -> str:
    return f"decision {s.head_name}{' Π' if s.cumulative else ''} {s.threshold:g}{_bound(s)}"


def _suffix(s: Any) -> str:
    bound = "" if s.per_match == 2 else f" ×{s.per_match:g}"
    kept = " of all" if s.memory == "all" else ""
    shape = " tree" if s.tree else ""
    return f"suffix{shape}{kept}{_matched(s)}{bound} K={s.max_tokens}"


def _retrieval(s: Any) -> str:
    return f"retrieval {Path(s.datastore).name}{_matched(s)} →{s.keep} K={s.max_tokens}"


def _cache(s: Any) -> str:
    kept = " of all" if s.memory == "all" else ""
    learned = " output" if s.learn_from == "output" else ""
    return f"token cache{kept}{learned}{' + prompt' if s.from_prompt else ''}"


def _lookahead(s: Any) -> str:
    alone = "" if s.from_prompt else " without the prompt's"
    return f"lookahead W={s.window} N={s.ngram} G={s.guesses}{alone}"


def _cascade(s: Any) -> str:
    return _drafted(s, f"{old_label(s.policy)} ← {old_label(s.proposer)}")


def _tree(s: Any) -> str:
    levels = "×".join(map(str, s.branching))
    if any(isinstance(counts, tuple) for counts in s.branching):
        levels = f"{s.nodes} in {'|'.join(str(sum(counts)) for counts in s.children)}"
    return _drafted(s, f"tree {levels}{_replaced(s)}")


def _target_tree(s: Any) -> str:
    lossy = "" if s.lossless else " (lossy)"
    return _drafted(s, f"target tree {'×'.join(map(str, s.branching))}{_replaced(s)}{lossy}")


def _dynamic_tree(s: Any) -> str:
    size = f"{s.expand}×{s.children}→{s.keep}" + (f" ≥{s.least:g}" if s.least else "")
    return _drafted(s, f"dynamic tree {size} {old_label(s.policy)}")


def _post_use(s: Any) -> str:
    length = s.cache.phrase_length
    where = f"draft {s.at_draft}×{length}, target {s.anchors}×{s.at_target}×{length}"
    return _drafted(s, f"{old_label(s.policy)} + {_cache(s.cache)} ({where})")


def _hybrid(s: Any) -> str:
    joint, extended = " + " if s.merge else " else ", " extended" if s.extend else ""
    return f"{old_label(s.lookup)} ≥{s.min_match}{joint}{old_label(s.otherwise)}{extended}"


def _bandit(s: Any) -> str:
    name = RULE_NAMES[s.rule]
    scaled = "" if s.exploration == 1 else f" ×{s.exploration:g}"
    timed = " by time" if s.reward == "time" else ""
    memory = " per request" if s.memory == "request" else ""
    return f"{name}{scaled}{timed}{memory} of {', '.join(map(old_label, s.arms))}"


def _pearl(s: Any) -> str:
    wait = "" if s.wait is None else f" wait {s.wait}"
    width = "" if s.width == 1 else f" width {s.width}"
    if s.width > 1 and s.least != 0.1:
        width += f" from {s.least:g}"
    return f"PEARL · {old_label(s.drafter)} ≤{s.window}{wait}{width}"


_OLD: dict[str, Any] = {
    "fixed": lambda s: f"fixed K={s.max_tokens}",
    "by_batch": _by_batch,
    "heuristic": _heuristic,
    "confidence": lambda s: f"confidence {s.threshold:g}{_bound(s)}",
    "svip": lambda s: f"svip {s.threshold:g}{_bound(s)}",
    "confidence_product": lambda s: f"confidence product {s.threshold:g}{_bound(s)}",
    "dynamic_confidence": lambda s: f"dynamic confidence from {s.start:g}{_bound(s)}",
    "pre_cut": _pre_cut,
    "specdecpp": _specdecpp,
    "decision": _decision,
    "oracle": lambda s: f"oracle{_bound(s)}",
    "draft_model": lambda s: _drafted(s, old_label(s.policy)),
    "tree": _tree,
    "fork": lambda s: _drafted(s, f"fork {s.width}{_replaced(s)} {old_label(s.policy)}"),
    "target_tree": _target_tree,
    "dynamic_tree": _dynamic_tree,
    "prompt_lookup": lambda s: f"prompt lookup n≤{s.max_ngram} K={s.max_tokens}",
    "suffix": _suffix,
    "retrieval": _retrieval,
    "token_cache": lambda s: f"{_cache(s)} {s.phrases}×{s.phrase_length}",
    "lookahead": _lookahead,
    "cascade": _cascade,
    "post_use": _post_use,
    "ouroboros": lambda s: _drafted(
        s, f"ouroboros K={s.max_tokens} + {s.phrases}×{s.phrase_length}"
    ),
    "hybrid": _hybrid,
    "bandit": _bandit,
    "pearl": _pearl,
}
