"""transformers: generation settings, of the model or of its assistant."""

from __future__ import annotations

import json

from specdec_core.config import Configuration, DrafterSettings, RunnerSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.export.server import (
    PLUG_IN_FILE,
    Counterpart,
    ExportTarget,
    Models,
    WrittenFiles,
    plug_in_file,
)

FILE = "generation.json"
ASSISTANT = "assistant_model"  # an argument of `generate`, not a setting
_STEP = {"increase": 2, "decrease": 1}  # which transformers' heuristic has


class Transformers(ExportTarget):
    name = "transformers"
    title = "transformers"
    version = "5.23"
    known = ("5.23",)
    files = (FILE, PLUG_IN_FILE)
    verified = True
    occurrence = "earliest"
    measures = True

    def counterpart(self, drafter: DrafterSettings | None, models: Models) -> Counterpart | None:
        if drafter is None:
            return Counterpart({})
        if isinstance(drafter, PromptLookupSettings) and drafter.min_ngram == 1:
            return Counterpart(
                {
                    "prompt_lookup_num_tokens": drafter.max_tokens,
                    "max_matching_ngram_size": drafter.max_ngram,
                },
                self.other_matches(drafter),
            )
        if type(drafter) is not DraftModelSettings:
            return None
        place, kind, *_ = models.draft(drafter.draft)
        if kind != "model":
            return None
        policy, threshold, schedule = drafter.policy, 0.0, "constant"
        remarks: tuple[str, ...] = ()
        if isinstance(policy, FixedSettings):
            tokens = policy.max_tokens
        elif isinstance(policy, ConfidenceSettings):
            tokens, threshold = policy.max_tokens, policy.threshold
            remarks = ("moves the threshold as it goes where scikit-learn is installed",)
        elif isinstance(policy, HeuristicSettings):
            step = {"increase": policy.increase, "decrease": policy.decrease}
            if step != _STEP:
                return None
            tokens = policy.start
            schedule = "heuristic_transient" if policy.transient else "heuristic"
            remarks = ("has no longest draft",)
        else:
            return None
        return Counterpart(
            {
                ASSISTANT: place,
                "num_assistant_tokens": tokens,
                "num_assistant_tokens_schedule": schedule,
                "assistant_confidence_threshold": threshold,
            },
            remarks,
        )

    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        settings = dict(counterpart.settings)
        assistant = settings.pop(ASSISTANT, None)
        lines = [
            "import json",
            "from transformers import AutoModelForCausalLM",
            f"model = AutoModelForCausalLM.from_pretrained({models.target!r})",
        ]
        if not settings:
            return WrittenFiles({}, "\n".join([*lines[1:], "model.generate(**inputs)"]))
        lines.append(f'settings = json.load(open("{FILE}"))')
        if assistant is None:
            lines.append("model.generate(**inputs, **settings)")
        else:
            # It is the assistant's own settings that transformers reads.
            lines += [
                f"assistant = AutoModelForCausalLM.from_pretrained({assistant!r})",
                "assistant.generation_config.update(**settings)",
                "model.generate(**inputs, assistant_model=assistant)",
            ]
        return WrittenFiles({FILE: json.dumps(settings, indent=1) + "\n"}, "\n".join(lines))

    def plugged_in(
        self, configuration: Configuration, models: Models, runner: RunnerSettings
    ) -> WrittenFiles:
        from specdec_core.plugins.text_drafter import check_chains  # torch takes a second

        check_chains(configuration, self.title, measured=True)
        lines = [
            "from transformers import AutoModelForCausalLM",
            "from specdec_core.plugins.transformers import speculative",
            f"model = AutoModelForCausalLM.from_pretrained({models.target!r})",
            f'generate = speculative(model, "{PLUG_IN_FILE}")',
            "generate(**inputs)",
        ]
        return WrittenFiles(plug_in_file(configuration, models, runner), "\n".join(lines))
