"""The bundled pair's recipe: tokenizer, target, sharpening, distillation, export, evaluation.

Each phase writes its result into the work folder, and is skipped if the result exists. Long phases
also write checkpoints and resume from the latest.
"""

import platform
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from research.bundled_pair import corpus
from research.bundled_pair.corpus_rows import train_tokenizer
from research.bundled_pair.distillation import distil
from research.bundled_pair.evaluation import evaluate
from research.bundled_pair.optimisation import Report, build
from research.bundled_pair.settings import Settings
from research.bundled_pair.target import sharpen, train_target
from research.bundled_pair.teacher import TeacherText
from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import parse_json
from specdec_core.models.loading import load_skeleton
from specdec_core.prompts import stdlib

_SETTINGS = "settings.json"
# Settings that no phase's result depends on.
_FREE = {"threads", "checkpoint_seconds", "held_out_prompts", "seen_prompts", "new_tokens"}


def claim(settings: Settings, work: Path) -> None:
    """Make `work` the folder of this recipe. Raises :class:`UserError` where its phases are of
    another one."""
    path = work / _SETTINGS
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(path, settings.model_dump_json(indent=1))
        return
    before = parse_json(Settings, path.read_text(), str(path)).model_dump(exclude=_FREE)
    now = settings.model_dump(exclude=_FREE)
    if changed := [name for name in now if now[name] != before[name]]:
        raise UserError(
            f"{path}: begun with other settings ({', '.join(changed)}); name another --work"
        )


def train_pair(settings: Settings, work: Path, out: Path, report: Report) -> dict[str, Any]:
    """The whole recipe into `out` (weights, prompts); returns the `facts` of the training and the
    `results` of the evaluation.

    Finished phases found in `work`, which :func:`claim` has made this recipe's, are not run again.
    """
    torch.set_num_threads(settings.threads)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(settings, work)
    report("tokenizer", 1.0, {})
    train_target(settings, work, tokenizer, report)
    target = sharpen(settings, work, tokenizer)
    own_text, corpus_text = TeacherText(settings, work, tokenizer, target).load(report)
    for name in settings.drafts:
        distil(settings, work, name, tokenizer.eos_token_id, own_text, corpus_text, report)
    export(settings, work, tokenizer, out)
    results = evaluate(settings, tokenizer, out, report)
    return {"facts": facts(settings, work, out), "results": results}


def export(settings: Settings, work: Path, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write `out`/weights/<name>, Hugging Face folders in bfloat16, and `out`/prompts.json."""
    models = {"target": sharpen(settings, work, tokenizer)}
    for name, shape in settings.drafts.items():
        models[name] = build(shape, settings, tokenizer.eos_token_id)
        models[name].load_state_dict(torch.load(work / f"{name}.pt", weights_only=True)["model"])
    for name, model in models.items():
        folder = out / "weights" / name
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    references = []
    for split in stdlib.SPLITS:
        count = {"held_out": settings.held_out_prompts, "seen": settings.seen_prompts}[split]
        drawn = stdlib.draw_references(split, tokenizer, modules=settings.modules)
        references += [reference for reference, _ in islice(drawn, count)]
    corpus.save_references(references, out / "prompts.json")


def facts(settings: Settings, work: Path, out: Path) -> dict[str, Any]:
    """The tokens, times, shapes and sizes of the training."""
    models = {}
    for name, shape in {"target": settings.target, **settings.drafts}.items():
        folder = out / "weights" / name
        models[name] = {
            "parameters": load_skeleton(str(folder)).num_parameters(),
            "bytes": sum(file.stat().st_size for file in folder.iterdir()),
            **shape.model_dump(),
            **torch.load(work / f"{name}.pt", weights_only=True)["facts"],
        }
    return {"python": platform.python_version(), "models": models}
