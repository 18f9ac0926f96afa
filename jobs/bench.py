"""Time this engine against transformers' own generation on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.progress import Progress
from typer import Option

from jobs.choice import choose
from jobs.console import console, run
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.files import write_atomically
from specdec_core.workspace import workspace


def main(
    config: Annotated[
        Path | None,
        Option(help="YAML with `pair` and `configuration`; the champion when left out."),
    ] = None,
    prompts: Annotated[str, Option(help="JSONL file, hub id, bundled:…")] = "bundled:held_out",
    limit: Annotated[int, Option(min=1, help="Use the first n prompts.")] = 16,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens for each prompt.")] = 128,
    repeats: Annotated[int, Option(min=1, help="Times each prompt is decoded.")] = 3,
) -> None:
    """Decode prompts greedily with this engine and with transformers, in turn in one process, and
    print tokens a second and the paired ratios. Run it on an otherwise idle machine."""
    choice, source = choose(config)
    with console.status(f"loading {choice.pair.name}"):
        # torch and transformers take seconds to import
        from dashboards.tables import contest_table
        from specdec_core.contest import contest_frame, contestants, race
        from specdec_core.pair import load_pair
        from specdec_core.prompts import load_prompts

        pair = load_pair(choice.pair)
        # Others get the models as transformers loads them, in the draft type that is faster so.
        plain = choice.pair.runner.model_copy(update={"pack": False, "draft_dtype": "auto"})
        peer_pair = load_pair(choice.pair.model_copy(update={"runner": plain}))
    texts = load_prompts(prompts, limit, pair.tokenizer)
    tokens = [tuple(pair.tokenizer(prompt.text)["input_ids"]) for prompt in texts]
    ours = choice.configuration.model_copy(update={"sampling": AUTOREGRESSIVE.sampling})
    runners = contestants(pair, peer_pair, [ours], max_new_tokens)
    with Progress(console=console) as progress:
        task = progress.add_task("timing", total=repeats * len(tokens))
        race(runners, tokens, repeats, lambda: progress.advance(task))

    runner, peers = pair.spec.runner, peer_pair.spec.runner
    console.print(
        f"{pair.spec.name}, {ours.label} ({source}); {len(tokens)} prompts of "
        f"{prompts}, {max_new_tokens} new tokens, {repeats} repeats; {runner.device}, target "
        f"{runner.target_dtype}, draft {runner.draft_dtype} (transformers {peers.draft_dtype}), "
        f"threads {runner.threads}",
        soft_wrap=True,
    )
    console.print(contest_table(runners))
    csv = write_atomically(workspace() / "bench.csv", contest_frame(runners).to_csv(index=False))
    console.print(f"times     {csv}", soft_wrap=True)


if __name__ == "__main__":
    run(main)
