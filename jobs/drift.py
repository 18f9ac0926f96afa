"""Measure how far target-initialised trees drift from the target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.console import console, run
from jobs.profile import chosen_pair, sizes
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec, Sampling, Temperature, parse
from specdec_core.drafting.target_tree.settings import TargetTreeSettings

if TYPE_CHECKING:
    import pandas as pd
    from rich.progress import Progress

    from specdec_core.models.pair import Pair
    from specdec_core.studies.drift import Written

TOY_SAMPLING = Sampling(temperature=1.0)
TOY_BRANCHING = (2, 2)  # behind the target's tokens: the toy's texts have few tokens


def main(
    target: Annotated[
        str | None, Option(help="Target model: hub id, folder or bundled:<name>.")
    ] = None,
    draft: Annotated[
        list[str] | None,
        Option(help="Draft model as [name=]<hub id, folder or bundled:…>; repeatable."),
    ] = None,
    prompts: Annotated[str, Option(help="JSONL file, hub id, bundled:…")] = "bundled:held_out",
    limit: Annotated[int, Option(min=1, help="Use the first n prompts.")] = 24,
    texts: Annotated[int, Option(min=1, help="Texts written for each prompt.")] = 4,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens of a text.")] = 64,
    temperature: Annotated[float, Option(help="Of sampling and of scoring.")] = 0.7,
    widths: Annotated[str, Option(help="Tokens of the target's own to begin with.")] = "1,2,3,4",
    branching: Annotated[
        str, Option(help="Children of a node at each level behind these.")
    ] = "4,2,1,1",
    toy_samples: Annotated[
        int, Option(min=0, help="Texts sampled from the toy pair; 0 leaves it out.")
    ] = 20_000,
    toy_length: Annotated[int, Option(min=1, max=4, help="Tokens of the toy's texts.")] = 3,
    name: Annotated[str, Option(help="Name of the result's folder.")] = "target_tree",
) -> None:
    """Compare what target-initialised trees write with what the target writes, by width: as a
    divergence on a toy pair whose distribution is known exactly, and as the log-likelihood of
    texts under the target. Width 1 is lossless and shows what noise looks like."""
    if name == ".." or Path(name).name != name:
        raise UserError(f"--name {name}: expected a folder's name, not a path")
    temperature = parse(Temperature, temperature, "--temperature")
    if temperature == 0:
        raise UserError(
            f"--temperature {temperature:g}: expected more than 0, greedy output has no likelihood"
        )
    asked = sizes(widths, "--widths")
    shape = sizes(branching, "--branching")
    sampling = Sampling(temperature=temperature)
    spec = chosen_pair(PairSpec(), target, draft)
    if not spec.drafts:
        raise UserError("the pair has no draft model: give one with --draft")
    wanted = [_tree(d, (width, *shape), sampling) for d in spec.drafts for width in asked]

    # torch and MLflow take seconds to import.
    import pandas as pd
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from dashboards import drift as shown
    from specdec_core.base.files import write_atomically
    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import digest, load_prompts

    with console.status(f"loading {spec.name}"):
        pair = load_pair(spec)
    found = load_prompts(prompts, limit, pair.tokenizer)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        toy = measure_toy(asked, toy_samples, toy_length, progress)
        read = [p.text for p in found]
        scored = measure_texts(pair, wanted, sampling, read, texts, max_new_tokens, progress)

    title = f"{len(found)} prompts of {prompts}, {texts} texts each, temperature {temperature:g}"
    notes = [
        f"trees of {'W×' + '×'.join(map(str, shape))}, W tokens of the target's own first; "
        "W = 1 is lossless",
        title,
        *([f"toy pair: {toy_samples:,} texts of {toy_length} tokens each"] if len(toy) else []),
    ]
    if len(toy):
        console.print(shown.toy_table(toy))
    console.print(shown.texts_table(scored, f"log-likelihood under the target, {title}"))
    folder = workspace() / "drift" / name
    both = pd.concat([toy.assign(part="toy"), scored.assign(part="texts")])
    files = [
        write_atomically(folder / "drift.csv", both.to_csv(index=False)),
        write_atomically(folder / "drift.md", shown.markdown(toy, scored, notes)),
    ]
    params = {
        "prompts": prompts,
        "prompts_digest": digest(found),
        "texts": texts,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "branching": branching,
    }
    shown.log_drift(spec.name, params, toy, scored, files)
    console.print(f"tables    {folder}", soft_wrap=True)


def measure_toy(
    widths: tuple[int, ...], samples: int, length: int, progress: Progress
) -> pd.DataFrame:
    """One row a draft of the toy pair and width: the exact divergence of what is written from the
    target, as the engine's samples tell it, and how well these fit the target's distribution
    (`p_value`) and the enumerated one (`p_value_enumerated`)."""
    import pandas as pd

    from specdec_core.studies.drift import divergence, goodness_of_fit
    from specdec_core.studies.exact_drift import exact_divergence, written_distribution
    from specdec_core.studies.toy_pair import FAR, NEAR, exact_distribution, sample_counts, toy_pair

    if not samples:
        return pd.DataFrame()
    pair = toy_pair()
    exact = exact_distribution(pair, TOY_SAMPLING, length)
    rows = []
    task = progress.add_task("toy pair", total=2 * len(widths))
    for name in (NEAR, FAR):
        for width in widths:
            tree = _tree(name, (width, *TOY_BRANCHING), TOY_SAMPLING)
            written = written_distribution(pair, tree.drafter, TOY_SAMPLING, length)
            kl, variation = exact_divergence(written, exact)
            counts = sample_counts(pair, tree, samples, length)
            found = divergence(counts, exact)
            rows.append(
                {
                    "draft": name,
                    "width": width,
                    "lossless": tree.lossless,
                    "kl": kl,
                    "total_variation": variation,
                    "sampled_kl": found.kl.value,
                    "sampled_kl_low": found.kl.low,
                    "sampled_kl_high": found.kl.high,
                    "p_value": found.p_value,
                    "p_value_enumerated": goodness_of_fit(counts, written),
                }
            )
            progress.advance(task)
    return pd.DataFrame(rows)


def measure_texts(
    pair: Pair,
    trees: list[Configuration],
    sampling: Sampling,
    prompts: list[str],
    texts: int,
    max_new_tokens: int,
    progress: Progress,
) -> pd.DataFrame:
    """One row for autoregressive decoding and each of `trees`: the mean log-likelihood of a token
    under the target, its change against the first, and MAT, the tokens a target forward gave."""
    import pandas as pd

    from specdec_core.studies.drift import write

    tokens = [tuple(pair.tokenizer(text)["input_ids"]) for text in prompts]
    task = progress.add_task("", total=(len(trees) + 1) * len(tokens) * texts)

    def written(configuration: Configuration) -> Written:
        progress.update(task, description=configuration.label)
        return write(
            pair,
            configuration,
            tokens,
            texts,
            max_new_tokens,
            on_finish=lambda _: progress.advance(task),
        )

    alone = written(Configuration(sampling=sampling))
    rows = [{"draft": "autoregressive", "width": 0, "lossless": True, **_scores(alone, None)}]
    for tree in trees:
        drafter = tree.drafter
        place = {"draft": drafter.draft, "width": drafter.branching[0], "lossless": tree.lossless}
        rows.append({**place, **_scores(written(tree), alone)})
    return pd.DataFrame(rows)


def _scores(written: Written, alone: Written | None) -> dict[str, float | None]:
    mean = written.interval()
    change = None if alone is None else written.against(alone)
    return {
        "log_likelihood": mean.value,
        "log_likelihood_low": mean.low,
        "log_likelihood_high": mean.high,
        "change": change and change.value,
        "change_low": change and change.low,
        "change_high": change and change.high,
        "mat": written.counts.metrics()["mat"],
        "tokens": int(written.tokens.sum()),
    }


def _tree(draft: str, branching: tuple[int, ...], sampling: Sampling) -> Configuration:
    value = {"kind": "target_tree", "draft": draft, "branching": branching}
    drafter = parse(TargetTreeSettings, value, "--branching")
    return Configuration(drafter=drafter, sampling=sampling)


if __name__ == "__main__":
    run(main)
