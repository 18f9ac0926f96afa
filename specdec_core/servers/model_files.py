"""Where another program finds a pair's models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import present_path
from specdec_core.config import Configuration, PairSpec
from specdec_core.config.base import with_read
from specdec_core.drafting.heads.storage import resolve_head
from specdec_core.drafting.states import find_state
from specdec_core.models.eagle.exported import exported_head
from specdec_core.models.eagle.loading import head_folder, head_settings, names_head
from specdec_core.models.fingerprints import fingerprint
from specdec_core.models.loading import load_config
from specdec_core.models.location import gguf_file, located
from specdec_core.models.pair import Pair, check_pair
from specdec_core.models.reading import read_config
from specdec_core.models.reduced_draft.exported import exported_draft
from specdec_core.models.reduced_draft.model import ReducedDraftConfig
from specdec_core.servers.server import DraftFile, Models, Server

# Finds what a configuration reads beside its models, by the keys of :data:`config.base.READ`.
READ_AT: dict[str, Callable[[str], Path]] = {
    "head": resolve_head,
    "state": find_state,
    "table": lambda name: Path(present_path(name)),
}


def models_of(
    pair: PairSpec, server: Server, plug_in: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Models:
    """The models' folders or hub ids as a server, or our `plug_in` in it, finds them, and their
    GGUF files where it reads such. EAGLE heads that it cannot read in the stored format are written
    in its own, in the data type `dtype`, and kept. Drafts with a reduced vocabulary are written as
    plain ones, but not for our `plug_in`.

    Raises:
        UserError: a model does not exist.
    """
    check_pair(pair, served=True)
    target, heads = load_config(pair.target), server.heads

    def draft(model: str) -> DraftFile:
        if not names_head(model):
            config = load_config(model)
            place = _place(model, server.gguf)
            if isinstance(config, ReducedDraftConfig) and not plug_in:
                try:
                    place = str(exported_draft(model, pair.target, dtype))
                except UserError as error:
                    return DraftFile(place, "other", refused=str(error))
            return DraftFile(place, "model", logits(config) != logits(target))
        if heads is None:
            return DraftFile(_place(model), "other")
        stored = _stored_kind(model) if heads == "specforge" else None
        if stored is not None and (stored == "eagle" or not server.told_layers):
            return DraftFile(_place(model), stored)  # whether or not this library can read it
        try:
            layers, place = head_settings(model, target).feature_layers, _place(model)
            if stored is None:
                place = str(exported_head(model, fingerprint(model), target, dtype, heads))
        except UserError as error:
            return DraftFile(_place(model), "other", refused=str(error))
        return DraftFile(place, "eagle3", layers=layers)

    drafts = {name: draft(model) for name, model in pair.drafts.items()}
    return Models(_place(pair.target, server.gguf), drafts)


def models_in(server: Server, pair: Pair, plug_in: bool = False) -> Models:
    """The models of a loaded pair: as above."""
    return models_of(pair.spec, server, plug_in, pair.target.dtype)


def placed(configuration: Configuration) -> Configuration:
    """A configuration with absolute paths of its heads, states and tables. Raises
    :class:`UserError` for a missing one."""
    content = with_read(configuration.model_dump(mode="json"), _place_of)
    return Configuration.model_validate(content)


def _place_of(key: str, name: str) -> str:
    place = READ_AT[key](name).resolve()
    if not place.exists():
        raise UserError(f"{key} {name}: there is none at {place}")
    return str(place)


def _stored_kind(model: str) -> Literal["eagle", "eagle3"] | None:
    """The kind of a head that SGLang reads in its stored form, by its architecture."""
    architectures = read_config(head_folder(model), model).get("architectures") or ()
    if "LlamaForCausalLMEagle3" in architectures:
        return "eagle3"
    return "eagle" if "LlamaForCausalLMEagle" in architectures else None


def logits(config: PretrainedConfig) -> int:
    """The number of logits of a model, including padding after its last token."""
    return int(config.get_text_config(decoder=True).vocab_size)


def _place(model: str, gguf: bool = False) -> str:
    file = gguf_file(model) if gguf else None
    place = located(model) if file is None else str(file)
    return str(Path(place).resolve()) if Path(place).exists() else place
