"""transformers: generation settings, of the model or of its assistant."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from specdec_core.config import Configuration, DrafterSettings, PolicySettings, RunnerSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.servers.server import (
    PLUG_IN_FILE,
    Counterpart,
    DraftFile,
    Mode,
    Models,
    Server,
    WrittenFiles,
    plug_in_file,
)
from specdec_core.servers.transformers import ASSISTANT

# torch takes a second to import, so the methods import what needs it.
if TYPE_CHECKING:
    from specdec_core.models.pair import Pair
    from specdec_core.servers.peer import Peer

FILE = "generation.json"
_STEP = {"increase": 2, "decrease": 1}  # of transformers' heuristic

# The policies and lengths that are compared.
_ASSISTED: dict[str, PolicySettings] = {
    **{f"K={k}": FixedSettings(max_tokens=k) for k in (3, 5, 7)},
    "heuristic": HeuristicSettings(start=5, transient=False),
    "confidence 0.4": ConfidenceSettings(threshold=0.4, max_tokens=20),
}
_LOOKUPS = (5, 10, 20)


class Transformers(Server):
    name = "transformers"
    title = "transformers"
    version = "5.23"
    stages = frozenset({"plug_in", "bench"})
    files = (FILE, PLUG_IN_FILE)
    verified = True
    occurrence = "earliest"
    measures = True

    def settings_for(self, drafter: DrafterSettings, models: Models) -> Counterpart | None:
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
        place, kind, padded, *_ = models.draft(drafter.draft)
        if kind != "model" or padded:  # it takes another number of logits for another tokenizer
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
            # transformers takes these settings from the assistant.
            lines += [
                f"assistant = AutoModelForCausalLM.from_pretrained({assistant!r})",
                "assistant.generation_config.update(**settings)",
                "model.generate(**inputs, assistant_model=assistant)",
            ]
        return WrittenFiles({FILE: json.dumps(settings, indent=1) + "\n"}, "\n".join(lines))

    def check_plug_in(self, configuration: Configuration, drafts: Iterable[DraftFile]) -> None:
        from specdec_core.servers.plug_in_drafter import check_chains

        check_chains(configuration, self.title)

    def plugged_in(
        self, configuration: Configuration, models: Models, runner: RunnerSettings
    ) -> WrittenFiles:
        self.check_plug_in(configuration, ())
        lines = [
            "from transformers import AutoModelForCausalLM",
            "from specdec_core.servers.transformers.plug_in import speculative",
            f"model = AutoModelForCausalLM.from_pretrained({models.target!r})",
            f'generate = speculative(model, "{PLUG_IN_FILE}")',
            "generate(**inputs)",
        ]
        return WrittenFiles(plug_in_file(configuration, models, runner), "\n".join(lines))

    def modes(self, pair: Pair, served: bool = False) -> list[Mode]:
        from specdec_core.servers.model_files import logits

        drafters: dict[str, DrafterSettings | None] = {"transformers": None}
        for draft in pair.draft_models:
            for name, policy in _ASSISTED.items():
                chain = DraftModelSettings(draft=draft, policy=policy)
                drafters[f"transformers assisted {name}, {draft}"] = chain
        for k in _LOOKUPS:
            lookup = PromptLookupSettings(max_ngram=2, max_tokens=k, occurrence=self.occurrence)
            drafters[f"transformers prompt lookup K={k}"] = lookup
        size = logits(pair.target.config)
        places = {
            name: DraftFile(pair.spec.drafts[name], "model", logits(model.config) != size)
            for name, model in pair.draft_models.items()
        }
        return self.compared(drafters, Models(pair.spec.target, places))

    def peers(self, pair: Pair, modes: Sequence[Mode]) -> list[Peer]:
        from specdec_core.servers.transformers.peer import peers_of

        return peers_of(pair, modes)
