"""llama.cpp: options of `llama-server`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_core.config import DrafterSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.models.location import located
from specdec_core.servers.chains import fixed_chain
from specdec_core.servers.llama_cpp import DRAFT
from specdec_core.servers.server import Counterpart, Mode, Models, ServedMode, Server, WrittenFiles

# torch takes a second to import, so the methods import what needs it.
if TYPE_CHECKING:
    from specdec_core.cost import Profile
    from specdec_core.models.pair import Pair

CONVERT = "specdec_core.servers.llama_cpp.convert"
TYPE = "spec-type"
TYPES = {"model": "draft-simple", "eagle3": "draft-eagle3"}  # by the kind of a draft
# What --spec-default stands for.
DEFAULT = Mode(
    "llama.cpp --spec-default",
    {
        TYPE: "ngram-mod",
        "spec-ngram-mod-n-match": 24,
        "spec-ngram-mod-n-min": 48,
        "spec-ngram-mod-n-max": 64,
    },
)
# The lengths that are compared under load; 3 is llama.cpp's own.
_LENGTHS = {"model": (3, 5), "eagle3": (3, 5), "lookup": (4,)}


class LlamaCpp(Server):
    name = "llama_cpp"
    title = "llama.cpp"
    version = "b11434"
    stages = frozenset({"serve", "profile"})
    verified = True
    heads = "speculators"
    gguf = True
    both_occurrences = True

    def settings_for(self, drafter: DrafterSettings, models: Models) -> Counterpart | None:
        if isinstance(drafter, HybridSettings):
            return self._both(drafter, models)
        return self._lookup(drafter) or _draft(drafter, models)

    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        lines: list[str] = []
        target = _written_gguf(lines, "target", models.target)
        words = ["llama-server", "--model", target]
        for name, value in counterpart.settings.items():
            if name == DRAFT:
                # The script reads the target's folder: that of a GGUF file, once it is unpacked.
                eagle = TYPES["eagle3"] in counterpart.settings[TYPE]
                folder = located(models.target) if eagle else None
                value = _written_gguf(lines, "draft", str(value), folder)
            words += [f"--{name}", str(value)]
        return WrittenFiles({}, "\n".join([*lines, shlex.join(words)]))

    def modes(self, pair: Pair, served: bool = False) -> list[Mode]:
        from specdec_core.servers.model_files import models_in

        models = models_in(self, pair)
        drafters = self.compared_drafters(models, _LENGTHS, ngram=2)
        return [*self.compared(drafters, models), DEFAULT]

    def missing(self, settings: Mapping[str, Any]) -> str | None:
        from specdec_core.servers.llama_cpp.process import missing

        return missing()

    def served(self, pair: Pair, mode: Mode, cores: Sequence[int], folder: Path) -> ServedMode:
        from specdec_core.servers.llama_cpp.process import served

        return served(pair, mode, cores)

    def in_production(self, command: Sequence[str], model: str, devices: int) -> list[str]:
        own = super().in_production(command, model, devices)
        caching = [word for word in own if word != "--no-cache-prompt"]
        return [*caching, "--alias", model]

    def profile(self, pair: Pair, **sizes: Any) -> Profile:
        from specdec_core.servers.llama_cpp.profile import profile_llama_cpp

        return profile_llama_cpp(self, pair, **sizes)

    def _lookup(self, drafter: DrafterSettings) -> Counterpart | None:
        """n-grams of one size, in the sequence or, for suffixes, in all sequences."""
        if isinstance(drafter, PromptLookupSettings) and drafter.min_ngram == drafter.max_ngram:
            latest = drafter.occurrence == "latest"
            kind = "ngram-simple" if latest else "ngram-map-k"
            settings = {
                TYPE: kind,
                f"spec-{kind}-size-n": drafter.max_ngram,
                f"spec-{kind}-size-m": drafter.max_tokens,
            }
            if latest:
                remark = "drafts nothing where fewer tokens follow a match than an n-gram has"
            else:
                remark = (
                    "keeps the first match that it finds, which is the latest of the prompt or the"
                    " earliest of the output, and drafts no more after it than was accepted before"
                )
            return Counterpart(settings, (remark,))
        if (
            isinstance(drafter, SuffixSettings)
            and drafter.memory == "all"
            and not drafter.tree
            and not drafter.per_match
        ):
            settings = {
                TYPE: "ngram-mod",
                "spec-ngram-mod-n-match": drafter.min_match,
                "spec-ngram-mod-n-min": 0,
                "spec-ngram-mod-n-max": drafter.max_tokens,
            }
            remark = (
                f"looks up the last {drafter.min_match} tokens for each candidate, in prompts, too,"
                " and forgets all after five rounds that accept less than a quarter"
            )
            return Counterpart(settings, (remark,))
        return None

    def _both(self, drafter: HybridSettings, models: Models) -> Counterpart | None:
        """A lookup that comes before a draft model, as in llama.cpp's lists of types."""
        if drafter.merge or drafter.extend:
            return None
        lookup, otherwise = self._lookup(drafter.lookup), _draft(drafter.otherwise, models)
        if lookup is None or otherwise is None:
            return None
        matched = next(lookup.settings[name] for name in _MATCHED if name in lookup.settings)
        if matched < drafter.min_match:
            return None
        settings = {
            **otherwise.settings,
            **lookup.settings,
            TYPE: f"{lookup.settings[TYPE]},{otherwise.settings[TYPE]}",
        }
        return Counterpart(settings, lookup.remarks + otherwise.remarks)


# Options for the number of tokens that a lookup finds again.
_MATCHED = ("spec-ngram-simple-size-n", "spec-ngram-map-k-size-n", "spec-ngram-mod-n-match")


def _draft(drafter: DrafterSettings, models: Models) -> Counterpart | None:
    """Chains of a draft model or an EAGLE-3 head, of one length or up to a confidence."""
    threshold = 0.0
    remarks: tuple[str, ...] = ()
    chain = fixed_chain(drafter)
    if chain is not None and not chain.scheduled:
        draft, tokens = chain.draft, chain.most
    elif type(drafter) is DraftModelSettings and isinstance(drafter.policy, ConfidenceSettings):
        draft, tokens = drafter.draft, drafter.policy.max_tokens
        threshold = drafter.policy.threshold
        remarks = (
            "leaves out the token below the threshold, which ours still drafts",
            "takes a token's probability among the ten likeliest, not among all tokens",
        )
    else:
        return None
    place, kind, *_ = models.draft(draft)
    if kind not in TYPES:
        return None
    settings = {
        TYPE: TYPES[kind],  # without it the draft is loaded, and nothing is drafted
        DRAFT: place,
        "spec-draft-n-max": tokens,
        "spec-draft-n-min": 0,
        "spec-draft-p-min": threshold,
    }
    if kind == "model":
        # When sampling, more is accepted of tokens that the draft draws than of its likeliest. A
        # head proposes its likeliest all the same.
        settings["spec-draft-sampling"] = "probabilistic"
    return Counterpart(settings, remarks)


def _written_gguf(lines: list[str], role: str, place: str, target: str | None = None) -> str:
    """The GGUF file of a model with this `role`, with the line that converts it added to `lines`.
    Our module runs llama.cpp's script for tokenizers that this does not know, too."""
    from specdec_core.servers.llama_cpp.process import conversion_script

    if place.endswith(".gguf"):
        return place
    file = f"{role}-{Path(place).name}.gguf"
    found = conversion_script()
    script = str(found) if found.exists() else found.name
    words = f"{shlex.join(['python', '-m', CONVERT, script])} {_folder(place)}"
    head = f" --target-model-dir {_folder(target)}" if target is not None else ""
    lines.append(f"{words} --outfile {shlex.quote(file)}{head}")
    return file


def _folder(place: str) -> str:
    """A model's folder in a shell's line: the script reads no hub id."""
    return shlex.quote(place) if Path(place).exists() else f'"$(hf download {shlex.quote(place)})"'
