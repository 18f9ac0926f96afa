"""Complete one prompt and show where the tokens came from."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from jobs.choice import choose
from jobs.console import console, print_configuration, run
from jobs.options import Config, Drafts, MaxLength, Placed, Target, Tokens, chosen_pair
from specdec_core.base.errors import UserError
from specdec_core.config import (
    Configuration,
    PairConfiguration,
    PairSpec,
    Placement,
    Temperature,
    parse,
)
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.prompts.chat import ALWAYS, rendered, template_of
from specdec_core.prompts.prompt import Prompt
from specdec_core.tokens.statistics import Generation
from specdec_core.tokens.token_tree import TokenOrigin

if TYPE_CHECKING:
    from specdec_core.engine import Engine, Request

DEFAULT = Configuration(drafter=DraftModelSettings())
ORIGINS = {
    TokenOrigin.DRAFT: ("green", "proposed by the draft model, accepted"),
    TokenOrigin.LOOKUP: ("cyan", "copied from earlier text, accepted"),
    TokenOrigin.CACHE: ("blue", "a phrase kept from earlier rounds, accepted"),
    TokenOrigin.GRAMMAR: ("bright_green", "the only token that the grammar allows, accepted"),
    TokenOrigin.TARGET: ("bright_yellow", "drawn by the target to begin a tree"),
    TokenOrigin.CORRECTION: ("red", "the target's, in place of a rejected token"),
    TokenOrigin.BONUS: ("yellow", "the target's own, after a draft accepted whole"),
}


def main(
    prompt: Annotated[str, Argument(help="Text to complete.")],
    config: Config = None,
    target: Target = None,
    draft: Drafts = None,
    chat: Annotated[
        bool,
        Option("--chat", help="The prompt is a message to answer, by the target's chat template."),
    ] = False,
    max_new_tokens: Tokens = 128,
    temperature: Annotated[
        float | None, Option(min=0, help="0 is greedy; unset, the configuration's.")
    ] = None,
    seed: Annotated[
        int | None, Option(help="Seed of the random numbers; unset, a new one.")
    ] = None,
    stop: Annotated[list[str] | None, Option(help="End before this text; repeatable.")] = None,
    max_length: MaxLength = None,
    cluster: Placed = None,
) -> None:
    """Complete a prompt and print the text, coloured by the tokens' origin, and the counts."""
    placement = None if cluster is None else Placement.load(cluster)
    if target is not None or draft:
        if config is not None:
            raise UserError("--config names a pair: leave out --target and --draft")
        choice, source = _simple(chosen_pair(PairSpec(), target, draft, max_length)), "default"
    else:
        choice, source = _choose(config)
        pair = chosen_pair(choice.pair, None, None, max_length)
        choice = choice.model_copy(update={"pair": pair})
    configuration = choice.configuration
    if temperature is not None:
        given = {"temperature": parse(Temperature, temperature, "--temperature")}
        sampling = configuration.sampling.model_copy(update=given)
        configuration = configuration.model_copy(update={"sampling": sampling})
    seed = secrets.randbits(63) if seed is None else seed
    with _engine(choice.pair, configuration, placement) as engine:
        from specdec_core.engine import Request

        tokens = _message(engine, prompt) if chat else engine.encode(prompt)
        options: dict[str, Any] = {"seed": seed, "stop": tuple(stop or ())}
        request = Request("generate", tokens, max_new_tokens, **options)
        _complete(engine, source, f"{prompt}\n\n" if chat else prompt, request)


@contextmanager
def _engine(
    pair: PairSpec, configuration: Configuration, placement: Placement | None
) -> Iterator[Engine]:
    """An engine with its models in this process, or on a cluster's devices where placed."""
    # torch, transformers and Ray take seconds to import
    with console.status(f"loading {pair.name}") as status:
        if placement is None:
            from specdec_core.engine import Engine
            from specdec_core.models.pair import load_pair

            engine = Engine(load_pair(pair), configuration)
            status.stop()
            yield engine
            return
        from cluster.placed_engine import placed_engine
        from specdec_core.engine.scheduler import Limits

        with placed_engine(pair, configuration, Limits(1), placement) as engine:
            status.stop()
            yield engine


def _message(engine: Engine, text: str) -> tuple[int, ...]:
    """The tokens of a conversation that begins with the user's message `text`."""
    from specdec_core.prompts.conversation import Conversation

    tokenizer = engine.pair.tokenizer
    if template_of(tokenizer) is None:
        raise UserError(f"--chat: the tokenizer of {engine.pair.spec.target} has no chat template")
    (prompt,) = rendered([Prompt("generate", text)], tokenizer, ALWAYS, "--chat")
    return Conversation(prompt, tokenizer).tokens()


def _complete(engine: Engine, source: str, shown: str, request: Request) -> None:
    from specdec_core.tokens.detokenising import StreamDecoder

    # A chunk of the engine holds tokens of several origins; this decoder splits its text.
    decoder = StreamDecoder(engine.pair.tokenizer, request.stop, request.tokens)
    chunks = engine.stream(request)
    first = next(chunks)  # a bad request is refused before anything is shown
    print_configuration(engine.configuration, source)
    console.print()
    _show(shown, "dim")
    for chunk in chain([first], chunks):
        for token, origin in zip(chunk.tokens, chunk.origins, strict=True):
            _show(decoder.push([token]), ORIGINS[origin][0])
        if chunk.finished:
            _show(decoder.finish(), ORIGINS[chunk.origins[-1]][0])
            console.print("\n")
            _show_counts(chunk.finished)


def _choose(config: Path | None) -> tuple[PairConfiguration, str]:
    if config is not None:
        return choose(config)[:2]
    from dashboards.tracking.registry import NoChampion  # MLflow takes seconds to import

    try:
        return choose(None)[:2]
    except NoChampion as error:
        console.print(f"[dim]{escape(str(error))}[/]", soft_wrap=True)
        return _simple(PairSpec()), "default"


def _simple(pair: PairSpec) -> PairConfiguration:
    """The default configuration of a pair: its first draft model, or suffix lookup."""
    configuration = DEFAULT if pair.drafts else Configuration(drafter=SuffixSettings())
    return PairConfiguration(pair=pair, configuration=configuration)


def _show(text: str, style: str) -> None:
    safe = text.replace("\x1b", "␛")  # a model must not steer the terminal
    console.print(Text(safe, style), end="", soft_wrap=True)


def _show_counts(generation: Generation) -> None:
    for origin, (style, meaning) in ORIGINS.items():
        if origin in generation.origins:
            console.print(f"[{style}]■ {origin}[/] [dim]{meaning}[/]")
    counts = generation.counts
    metrics = counts.metrics()
    table = Table.grid(padding=(0, 1))
    for name, value in {
        "tokens": counts.n,
        "rounds": counts.n_target,
        "drafted": counts.n_drafted,
        "accepted": counts.n_accepted,
        "verification rate": f"{metrics['verification_rate']:.3f}",
        "discard rate": f"{metrics['discard_rate']:.3f}",
        "MAT": f"{metrics['mat']:.2f}",
        "tokens/s": f"{counts.n / generation.seconds:.1f}",
        "ended by": generation.finish_reason,
    }.items():
        table.add_row(f"[dim]{name}[/]", str(value))
    console.print()
    console.print(table)


if __name__ == "__main__":
    run(main)
