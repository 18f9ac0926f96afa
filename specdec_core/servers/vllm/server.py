"""vLLM."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, DrafterSettings, RunnerSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.servers.chains import fixed_chain
from specdec_core.servers.server import (
    PLUG_IN_FILE,
    Counterpart,
    DraftFile,
    Mode,
    Models,
    ServedMode,
    Server,
    WrittenFiles,
    plug_in_file,
)
from specdec_core.servers.vllm.settings import (
    FILE,
    FURTHER,
    HIDDEN_STATES,
    PLUG_IN,
    TOKENS,
    VARIABLE,
    chain_settings,
    commands,
    suffix_settings,
)

# torch takes a second to import, so the methods import what needs it.
if TYPE_CHECKING:
    from specdec_core.cost import Profile
    from specdec_core.models.pair import Pair
    from specdec_core.servers.peer import Peer

log = logging.getLogger(__name__)

SUFFIX = Mode("vLLM suffix", {"method": "suffix"})  # it chooses its lengths
# The lengths that are compared, by the kind of a draft and for lookups; fewer under load.
_COMPARED = {"model": (3, 5, 7), "eagle3": (3, 5), "lookup": (4, 8)}
_SERVED = {"model": (3, 5), "eagle3": (3, 5), "lookup": (4,)}


class Vllm(Server):
    name = "vllm"
    title = "vLLM"
    version = "0.32"
    stages = frozenset({"plug_in", "bench", "serve", "profile"})
    files = (FILE, PLUG_IN_FILE)
    verified = True
    heads = "speculators"
    occurrence = "earliest"

    def settings_for(self, drafter: DrafterSettings, models: Models) -> Counterpart | None:
        if (chain := fixed_chain(drafter)) is not None:
            return chain_settings(chain, models)
        if isinstance(drafter, PromptLookupSettings):
            settings = {
                "method": "ngram",
                TOKENS: drafter.max_tokens,
                "prompt_lookup_min": drafter.min_ngram,
                "prompt_lookup_max": drafter.max_ngram,
            }
            return Counterpart(settings, self.other_matches(drafter))
        if isinstance(drafter, SuffixSettings) and not drafter.tree and drafter.min_match == 1:
            return suffix_settings(drafter)
        return None

    def with_more(self, counterpart: Counterpart, more: Mapping[str, Any]) -> Counterpart:
        method, remarks = counterpart.settings.get("method"), list(counterpart.remarks)
        for name, value in more.items():
            if name not in FURTHER:
                raise UserError(f"--set {name}: expected one of {', '.join(FURTHER)}")
            methods, kind, remark = FURTHER[name]
            if method not in methods:
                had = " and ".join(methods)
                raise UserError(f"--set {name}: vLLM has it with {had}, not {method}")
            if type(value) is not kind or (kind is int and isinstance(value, int) and value < 1):
                expected = "a whole number from 1" if kind is int else "true or false"
                raise UserError(f"--set {name}={value}: expected {expected}")
            remarks.append(remark)
        return Counterpart({**counterpart.settings, **more}, tuple(remarks))

    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        if not counterpart.settings:
            return WrittenFiles({}, commands(models.target))
        text = json.dumps(dict(counterpart.settings), indent=1) + "\n"
        return WrittenFiles({FILE: text}, commands(models.target, with_file=True))

    def check_plug_in(self, configuration: Configuration, drafts: Iterable[DraftFile]) -> None:
        from specdec_core.servers.vllm import plug_in

        plug_in.check(configuration, drafts)

    def plug_in_settings(self, configuration: Configuration) -> dict[str, Any]:
        assert configuration.drafter is not None  # it is checked
        tokens = configuration.drafter.depth
        return {"method": "custom_class", "model": PLUG_IN, TOKENS: tokens}

    def plugged_in(
        self, configuration: Configuration, models: Models, runner: RunnerSettings
    ) -> WrittenFiles:
        self.check_plug_in(configuration, configuration.drafts_of(models.drafts).values())
        text = json.dumps(self.plug_in_settings(configuration), indent=1) + "\n"
        files = {FILE: text, **plug_in_file(configuration, models, runner)}
        variables = f"{VARIABLE}={PLUG_IN_FILE} "
        return WrittenFiles(files, commands(models.target, True, variables))

    def modes(self, pair: Pair, served: bool = False) -> list[Mode]:
        from specdec_core.servers.model_files import models_in

        models = models_in(self, pair)
        drafters = self.compared_drafters(models, _SERVED if served else _COMPARED, ngram=4)
        modes = self.compared(drafters, models)
        if (reason := self.missing(SUFFIX.settings)) is None:
            modes.append(SUFFIX)
        elif self.missing({}) is None:
            log.warning("without vLLM's suffix decoding: %s", reason)
        return modes

    def answering(self, layers: Sequence[int]) -> Mode:
        if not layers:
            return super().answering(layers)
        read = {"eagle_aux_hidden_state_layer_ids": list(layers)}
        settings = {"method": HIDDEN_STATES, TOKENS: 1, "draft_model_config": {"hf_config": read}}
        return Mode(f"{self.title}, hidden states", settings)

    def missing(self, settings: Mapping[str, Any]) -> str | None:
        from specdec_core.servers.vllm.process import missing

        return missing(settings)

    def peers(self, pair: Pair, modes: Sequence[Mode]) -> list[Peer]:
        from specdec_core.servers.vllm.process import VllmPeer

        return [VllmPeer(pair, mode) for mode in modes]

    def served(self, pair: Pair, mode: Mode, cores: Sequence[int], folder: Path) -> ServedMode:
        from specdec_core.servers.vllm.process import served

        return served(pair, mode, cores, folder)

    def in_production(self, command: Sequence[str], model: str, devices: int) -> list[str]:
        shared = ["--tensor-parallel-size", str(devices), "--enable-prefix-caching"]
        return [*command, "--served-model-name", model, *shared]

    def profile(self, pair: Pair, **sizes: Any) -> Profile:
        from specdec_core.servers.vllm.profile import profile_vllm

        return profile_vllm(self, pair, **sizes)
