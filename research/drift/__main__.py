"""Measure how far target-initialised trees drift from the target."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from jobs.console import console, deliver, run
from jobs.options import (
    ChatTemplate,
    Drafts,
    Limit,
    MaxLength,
    Prompts,
    Target,
    chosen_pair,
    sizes,
)
from specdec_core.base.errors import UserError
from specdec_core.base.names import check_name
from specdec_core.base.workspace import workspace
from specdec_core.config import PairSpec, Sampling, Temperature, parse
from specdec_core.prompts.chat import AUTO


def main(
    target: Target = None,
    draft: Drafts = None,
    prompts: Prompts = "bundled:held_out",
    chat_template: ChatTemplate = AUTO,
    limit: Limit = 24,
    texts: Annotated[int, Option(min=1, help="Texts written for each prompt.")] = 4,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens of a text.")] = 64,
    max_length: MaxLength = None,
    temperature: Annotated[float, Option(help="Of sampling and of scoring.")] = 0.7,
    widths: Annotated[
        str, Option(help="Tokens that the target draws to begin a tree.")
    ] = "1,2,3,4",
    branching: Annotated[str, Option(help="Children of a node at each further level.")] = "4,2,1,1",
    name: Annotated[str, Option(help="Name of the result's folder.")] = "target_tree",
) -> None:
    """Compare what target-initialised trees write with what the target writes, by width: the
    log-likelihood of texts under the target. Width 1 is lossless and shows what noise looks
    like."""
    check_name(name)
    temperature = parse(Temperature, temperature, "--temperature")
    if temperature == 0:
        raise UserError(
            f"--temperature {temperature:g}: expected more than 0, greedy output has no likelihood"
        )
    chosen_widths, shape = sizes(widths, "--widths"), sizes(branching, "--branching")
    spec = chosen_pair(PairSpec(), target, draft, max_length)
    if not spec.drafts:
        raise UserError("the pair has no draft model: give one with --draft")

    # torch and MLflow take seconds to import.
    from dashboards.progress import ConsoleProgress
    from dashboards.sections import ReportOrigin
    from research.drift.by_width import on_texts, target_tree
    from research.drift.report import report
    from specdec_core.engine.turns import requests_of
    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import digest, load_prompts

    sampling = Sampling(temperature=temperature)
    shapes = [(width, *shape) for width in chosen_widths]
    trees = [target_tree(d, each, sampling) for d in spec.drafts for each in shapes]
    with console.status(f"loading {spec.name}"):
        pair = load_pair(spec)
    loaded = load_prompts(prompts, limit, pair.tokenizer, chat_template)
    tokens = [request.tokens for request in requests_of(loaded, pair, max_new_tokens)]
    with ConsoleProgress(console) as progress:
        scored = on_texts(pair, trees, sampling, tokens, texts, max_new_tokens, progress)

    notes = [
        f"trees of W×{'×'.join(map(str, shape))}, begun with W tokens that the target draws; "
        "W = 1 is lossless",
        f"{len(loaded)} prompts of {prompts}, {texts} texts each, temperature {temperature:g}",
    ]
    params = {
        "prompts": prompts,
        "chat_template": chat_template,
        "prompts_digest": digest(loaded),
        "texts": texts,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "branching": branching,
    }
    origin = ReportOrigin(name=name, pair=spec.name, notes=notes, params=params)
    deliver(report(scored, origin), workspace() / "drift" / name, "drift")


if __name__ == "__main__":
    run(main)
