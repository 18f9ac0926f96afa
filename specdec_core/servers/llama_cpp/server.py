"""llama.cpp: options of `llama-server`."""

from __future__ import annotations

import shlex

from specdec_core.config import DrafterSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.servers.chains import fixed_chain
from specdec_core.servers.server import Counterpart, Models, Server, WrittenFiles

GGUF = "reads models in GGUF: convert them first, and name the files instead"


class LlamaCpp(Server):
    name = "llamacpp"
    title = "llama.cpp"
    version = "b10872"

    def counterpart(self, drafter: DrafterSettings | None, models: Models) -> Counterpart | None:
        if drafter is None:
            return Counterpart({}, (GGUF,))
        chain = fixed_chain(drafter)
        if chain is not None and not chain.scheduled:
            return _model(models, chain.draft, chain.most, 0.0)
        if type(drafter) is DraftModelSettings and isinstance(drafter.policy, ConfidenceSettings):
            policy = drafter.policy
            return _model(models, drafter.draft, policy.max_tokens, policy.threshold)
        if isinstance(drafter, PromptLookupSettings) and drafter.min_ngram == drafter.max_ngram:
            settings = {
                "spec-type": "ngram-simple",
                "spec-ngram-simple-size-n": drafter.max_ngram,
                "spec-ngram-simple-size-m": drafter.max_tokens,
                "spec-draft-n-max": drafter.max_tokens,
            }
            return Counterpart(settings, (GGUF, *self.other_matches(drafter)))
        return None

    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        words = ["llama-server", "--model", models.target]
        for name, value in counterpart.settings.items():
            words += [f"--{name}", str(value)]
        return WrittenFiles({}, shlex.join(words))


def _model(models: Models, draft: str | None, tokens: int, threshold: float) -> Counterpart | None:
    place, kind, *_ = models.draft(draft)
    if kind != "model":
        return None
    settings = {
        "spec-type": "draft-simple",  # without it the draft is loaded, and nothing is drafted
        "spec-draft-model": place,
        "spec-draft-n-max": tokens,
        "spec-draft-n-min": 0,
        "spec-draft-p-min": threshold,
    }
    remarks: tuple[str, ...] = (GGUF,)
    if threshold:
        remarks += ("leaves out the token below the threshold, which ours still drafts",)
    return Counterpart(settings, remarks)
