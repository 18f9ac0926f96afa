"""Where another program finds a pair's models, and what was recorded of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import present_path
from specdec_core.config import Configuration, PairSpec, Sampling, with_read
from specdec_core.drafting.datastores.datastore import resolve_datastore
from specdec_core.drafting.heads.storage import resolve_head
from specdec_core.drafting.states import find_state
from specdec_core.drafting.trained import weights_here
from specdec_core.export.server import DraftFile, Models
from specdec_core.models.eagle.exported import Form, exported_head
from specdec_core.models.eagle.loading import head_folder, names_head
from specdec_core.models.fingerprints import fingerprints
from specdec_core.models.loading import load_config
from specdec_core.models.location import located
from specdec_core.models.pair import check_pair
from specdec_core.models.reduced_draft.exported import exported_draft
from specdec_core.models.reduced_draft.model import ReducedDraftConfig
from specdec_core.models.weight_files import read_config
from specdec_core.recordings.find import finished
from specdec_core.recordings.schema import HEADER, Recording
from specdec_core.search.replaying import find_named

# Finds what a configuration reads beside its models, by the keys of :data:`config.READ`.
READ_AT: dict[str, Callable[[str], Path]] = {
    "head": resolve_head,
    "datastore": resolve_datastore,
    "state": find_state,
    "table": lambda name: Path(present_path(name)),
}


def models_of(pair: PairSpec, heads: Form | None, plug_in: bool = False) -> Models:
    """The models' folders or hub ids. EAGLE heads that a program does not read as they are stored
    are written in the format `heads`, in bfloat16, and kept; None for a program that reads none.
    Drafts with a reduced vocabulary are written as plain ones, but for our `plug_in`.

    Raises:
        UserError: a model does not exist.
    """
    check_pair(pair)
    target = load_config(pair.target)
    drafts = {
        name: _draft(pair, name, model, target, heads, plug_in)
        for name, model in pair.drafts.items()
    }
    return Models(_place(pair.target), drafts)


def placed(configuration: Configuration) -> Configuration:
    """A configuration with absolute paths of its heads, datastores, states and tables. Raises
    :class:`UserError` for a missing one."""
    content = with_read(configuration.model_dump(mode="json"), _place_of)
    return Configuration.model_validate(content)


def _place_of(key: str, name: str) -> str:
    place = READ_AT[key](name).resolve()
    if not place.exists():
        raise UserError(f"{key} {name}: there is none at {place}")
    return str(place)


def _draft(
    pair: PairSpec,
    name: str,
    model: str,
    target: PretrainedConfig,
    heads: Form | None,
    plug_in: bool,
) -> DraftFile:
    if not names_head(model):
        config = load_config(model)
        place = _place(model)
        if isinstance(config, ReducedDraftConfig) and not plug_in:
            try:
                place = str(exported_draft(model, pair.target, torch.bfloat16))
            except UserError as error:
                return DraftFile(place, "other", refused=str(error))
        return DraftFile(place, "model", _logits(config) != _logits(target))
    if heads is None:
        return DraftFile(_place(model), "other")
    if heads == "specforge" and (kind := _served(model)):
        return DraftFile(_place(model), kind)
    try:
        folder = exported_head(model, fingerprints(pair)[name], target, torch.bfloat16, heads)
    except UserError as error:
        return DraftFile(_place(model), "other", refused=str(error))
    return DraftFile(str(folder), "eagle3")


def _served(model: str) -> Literal["eagle", "eagle3"] | None:
    """The kind of a head that SGLang reads in its stored form, by its architecture."""
    architectures = read_config(head_folder(model), model).get("architectures") or ()
    if "LlamaForCausalLMEagle3" in architectures:
        return "eagle3"
    return "eagle" if "LlamaForCausalLMEagle" in architectures else None


def _logits(config: PretrainedConfig) -> int:
    """How many logits a model has, those behind its last token included."""
    return int(config.get_text_config(decoder=True).vocab_size)


def _place(model: str) -> str:
    place = located(model)
    return str(Path(place).resolve()) if Path(place).exists() else place


def recording_of(
    pair: PairSpec,
    home: Path,
    sampling: Sampling,
    traces: str | None = None,
    drawn: bool = False,
) -> Recording | None:
    """The recording `traces` of a pair. Without a name: the latest finished recording that can be
    replayed, with `drawn` also by drawing its rounds; recordings under `sampling` come first. None
    if there is none.

    Models are compared by their weights, or by their names where the weights are not on this
    machine. Raises :class:`UserError` for a named recording of other weights."""
    prints = weights_here(pair, ())
    if traces is not None:
        recording = find_named(traces, home)
        recording.check(prints or {})
        return recording
    own = [
        recording
        for recording in _finished(home)
        if (recording.header.replayable or (drawn and recording.header.continuations))
        and _recorded(pair, prints, recording)
        and pair.drafts.items() <= recording.header.pair.drafts.items()
    ]
    alike = [recording for recording in own if recording.header.sampling == sampling]
    return next(iter(alike or own), None)


def _recorded(pair: PairSpec, prints: Mapping[str, str] | None, recording: Recording) -> bool:
    if prints is None:
        return pair.target == recording.header.pair.target
    return prints.items() <= recording.header.fingerprints.items()


def _finished(home: Path) -> Iterator[Recording]:
    """The finished recordings of a workspace that this version reads, the latest first."""
    files = sorted((home / "traces").glob(f"*/{HEADER}"), key=lambda file: -file.stat().st_mtime)
    for file in files:
        try:
            recording = Recording.open(file.parent)
        except UserError:  # of another version
            continue
        if finished(file.parent):
            yield recording
