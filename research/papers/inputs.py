"""The inputs of the papers' tables: prompt sets, and trained heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from research.bandits.comparison import mixed
from research.papers.plan import PaperPlan, PromptsOf
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.drafting.heads.storage import load_head
from specdec_core.models.fingerprints import fingerprint
from specdec_core.models.pair import APART, eagle_heads_of
from specdec_core.prompts.prompt_sets import Prompt, load_prompts


def load_sets(
    plan: PaperPlan, tokenizer: Any, home: Path, observer: Observer | None = None
) -> dict[str, tuple[str, list[Prompt]]]:
    """The prompts of each set that the tables use, and their source. Missing optional sets are left
    out with a warning, and so are mixtures with them."""
    observer = observer or Observer()
    used = dict.fromkeys(name for table in plan.tables.values() for name in table.prompts)
    parts = dict.fromkeys(part for name in used for part in plan.prompts[name].mix or (name,))
    loaded: dict[str, tuple[str, list[Prompt]]] = {}
    for name in parts:
        prompts = plan.prompts[name]
        try:
            source, place = place_of(prompts, home)
            rendered = load_prompts(place, prompts.limit, tokenizer, prompts.chat_template)
            loaded[name] = source, rendered
        except UserError as error:
            if not prompts.optional:
                raise
            warning = f"{name} is left out ({error}); --prompts '{name}=FILE' says where it is"
            observer.warned(warning)
    sets = {}
    for name in used:
        mix = plan.prompts[name].mix
        if not mix and name in loaded:
            sets[name] = loaded[name]
        elif mix and all(part in loaded for part in mix):
            sets[name] = _mixed({part: loaded[part][1] for part in mix}, plan.prompts[name].limit)
    if not sets:
        raise UserError("no prompts: none of the tables' sets is there")
    return sets


def place_of(prompts: PromptsOf, home: Path) -> tuple[str, str]:
    """The source that a set is loaded from, and where that is: the first that is a file, here or in
    the workspace, or else the last, which may also be a bundled set or one of the hub's."""
    for source in prompts.sources:
        for place in (Path(source), home / source):
            if place.is_file():
                return source, str(place)
    return prompts.sources[-1], prompts.sources[-1]


def _mixed(sets: Mapping[str, list[Prompt]], limit: int | None) -> tuple[str, list[Prompt]]:
    """The sets' prompts in turn."""
    named = ([replace(p, id=f"{name}/{p.id}") for p in prompts] for name, prompts in sets.items())
    return " + ".join(sets), list(islice(mixed(named), limit))


def with_own_heads(plan: PaperPlan, observer: Observer | None = None) -> PaperPlan:
    """`plan` without the rows with trained heads of another pair or without a file, and without
    the tables of EAGLE heads for a pair that has none; each is left out with a warning. Raises
    :class:`UserError` where nothing is left."""
    observer = observer or Observer()
    tables, prints = {}, cache(fingerprint)
    plan = with_eagle_heads(plan, observer)
    for key, table in plan.tables.items():
        rows = []
        for number, row in enumerate(table.rows):
            try:
                for draft, head in plan.trained_heads(key, number):
                    load_head(head, prints(plan.pair.drafts[draft]), prints(plan.pair.target))
                rows.append(row)
            except UserError as error:
                observer.warned(f"{table.title}: {row.name} is left out ({error})")
        if rows:
            tables[key] = table.model_copy(update={"rows": tuple(rows)})
    if not tables:
        raise UserError("no table is left: none of their heads is there for this pair")
    return plan.model_copy(update={"tables": tables})


def with_eagle_heads(plan: PaperPlan, observer: Observer | None = None) -> PaperPlan:
    """`plan` with the pair's first EAGLE head as the draft of the tables for one; they are left out
    with a warning where there is none, and for a target on devices of a cluster."""
    observer = observer or Observer()
    tables, names = {}, list(plan.pair.drafts)
    used = plan.cluster is None and any(table.eagle for table in plan.tables.values())
    heads = eagle_heads_of(plan.pair) if used else ()
    for key, table in plan.tables.items():
        if not table.eagle:
            tables[key] = table
        elif heads:
            draft = names.index(heads[0]) + 1
            tables[key] = table.model_copy(update={"draft": draft})
        else:
            reason = "the pair has no EAGLE head" if plan.cluster is None else APART
            observer.warned(f"{table.title}: left out ({reason})")
    return plan.model_copy(update={"tables": tables})
