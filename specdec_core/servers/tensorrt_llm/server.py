"""TensorRT-LLM: `speculative_config` of its YAML file."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from specdec_core.config import DrafterSettings
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.servers.chains import LengthSettings, fixed_chain
from specdec_core.servers.server import Counterpart, DraftFile, Models, Server, WrittenFiles

FILE = "trtllm.yaml"
MOST_REQUESTS = 4096  # of a schedule's last range; beyond it nothing is drafted
CONCURRENCY = "max_concurrency"  # requests beyond which nothing is drafted; not with a schedule
_TYPES = {"model": "Draft_Target", "eagle3": "Eagle3"}
_SUFFIX = "copies after the earliest occurrence of the longest suffix, not what most often followed"


class TensorRtLlm(Server):
    name = "trtllm"
    title = "TensorRT-LLM"
    version = "1.3.0rc29"
    files = (FILE,)
    heads = "specforge"
    told_layers = True

    def settings_for(self, drafter: DrafterSettings, models: Models) -> Counterpart | None:
        if (chain := fixed_chain(drafter)) is not None:
            return _chain(chain, models)
        if isinstance(drafter, DynamicTreeSettings) and isinstance(drafter.policy, FixedSettings):
            head = models.draft(drafter.draft)
            if head.kind != "eagle3" or drafter.expand != drafter.children or drafter.least:
                return None
            depth = drafter.policy.max_tokens
            if not depth <= drafter.keep <= drafter.children * depth:
                return None
            return Counterpart(
                {
                    "decoding_type": "Eagle3",
                    "speculative_model": head.place,
                    **_captured(head),
                    "max_draft_len": depth,
                    "use_dynamic_tree": True,
                    "dynamic_tree_max_topK": drafter.children,
                    "max_total_draft_tokens": drafter.keep,
                }
            )
        if isinstance(drafter, PromptLookupSettings):
            if drafter.min_ngram > 1:
                return None
            oldest = drafter.occurrence == "earliest"
            remark = "of an n-gram's continuations takes the one that was first seen last"
            return Counterpart(
                {
                    "decoding_type": "NGram",
                    "max_draft_len": drafter.max_tokens,
                    "max_matching_ngram_size": drafter.max_ngram,
                    "is_use_oldest": oldest,
                    "is_public_pool": False,
                },
                () if oldest else (remark,),
            )
        if isinstance(drafter, SuffixSettings) and _plain(drafter):
            if drafter.min_match > 1:
                return None
            settings = {"decoding_type": "SA", "max_draft_len": drafter.max_tokens}
            bound = ("drafts as many tokens however short the match",) if drafter.per_match else ()
            return Counterpart(settings, (_SUFFIX, *bound))
        if isinstance(drafter, HybridSettings):
            return _hybrid(drafter, models)
        if isinstance(drafter, ScheduleSettings):
            return self._resting(drafter, models)
        return None

    def _resting(self, schedule: ScheduleSettings, models: Models) -> Counterpart | None:
        """Of one drafter up to a load, and nothing beyond."""
        drafting = [least for least, drafter in schedule.ranges.items() if drafter is not None]
        idle = [least for least in schedule.ranges if least not in drafting]
        drafters = {schedule.ranges[least] for least in drafting}
        if not idle or max(drafting) > min(idle) or len(drafters) > 1:
            return None
        inner = self.counterpart(drafters.pop(), models)
        if inner is None or {CONCURRENCY, "draft_len_schedule"} & inner.settings.keys():
            return None  # it rests, or drafts less, at other loads already
        return Counterpart({**inner.settings, CONCURRENCY: min(idle) - 1}, inner.remarks)

    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        command = f"trtllm-serve {shlex.quote(models.target)}"
        if not counterpart.settings:
            return WrittenFiles({}, command)
        content = {"speculative_config": dict(counterpart.settings)}
        text = yaml.safe_dump(content, sort_keys=False)
        return WrittenFiles({FILE: text}, f"{command} --config {FILE}")


def _chain(chain: LengthSettings, models: Models) -> Counterpart | None:
    draft = models.draft(chain.draft)
    if draft.kind not in _TYPES:
        return None
    settings: dict[str, Any] = {
        "decoding_type": _TYPES[draft.kind],
        "speculative_model": draft.place,
        **_captured(draft),
        "max_draft_len": chain.most,
    }
    if chain.scheduled and len(chain.spans) == 2 and not chain.spans[1].tokens:
        settings[CONCURRENCY] = chain.spans[0].high
    elif chain.scheduled:
        # By the most requests of each range; with more than the last nothing is drafted.
        drafting = [span for span in chain.spans if span.tokens]
        idle = [span for span in chain.spans[:-1] if not span.tokens]
        # It refuses a schedule unless the first length is the longest.
        if idle or chain.spans[0].tokens < chain.most:
            return None
        settings["draft_len_schedule"] = {
            span.last(MOST_REQUESTS): span.tokens for span in drafting
        }
    return Counterpart(settings)


def _captured(draft: DraftFile) -> dict[str, Any]:
    """The layers whose outputs a head gets. TensorRT-LLM does not read them from the head's
    configuration, and takes its own three where they are not given."""
    if not draft.layers:
        return {}
    return {"eagle3_layers_to_capture": [layer - 1 for layer in draft.layers]}


def _plain(lookup: SuffixSettings) -> bool:
    """Whether it copies a chain from the request's own sequence."""
    return not lookup.tree and lookup.memory != "all"


def _hybrid(drafter: HybridSettings, models: Models) -> Counterpart | None:
    """A suffix automaton beside an EAGLE head."""
    chain, lookup = fixed_chain(drafter.otherwise), drafter.lookup
    if not isinstance(lookup, SuffixSettings) or not _plain(lookup):
        return None
    if chain is None or chain.scheduled or drafter.merge or drafter.extend:
        return None
    inner = _chain(chain, models)
    if inner is None or inner.settings["decoding_type"] != "Eagle3":
        return None
    length, least = chain.most, max(drafter.min_match, lookup.min_match)
    settings = {**inner.settings, "sa_config": {"threshold": least}}
    bound = f"what is looked up has {length} tokens at most, too"
    return Counterpart(settings, (_SUFFIX, bound))
