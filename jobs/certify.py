"""Show that a configuration changes nothing but the speed, and write that down."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated

from typer import Option

from jobs.choice import choose
from jobs.console import console, point, print_configuration, run
from jobs.options import (
    ChatTemplate,
    Config,
    MaxLength,
    MaybeLimit,
    MaybeTokens,
    Placed,
    Prompts,
    chosen_pair,
    given,
)
from specdec_core.base.errors import UserError
from specdec_core.config import Placement
from specdec_core.prompts.chat import AUTO

FULL = {"limit": 32, "max_new_tokens": 64, "texts": 4, "timed": 12, "repeats": 3}
QUICK = {"limit": 8, "max_new_tokens": 32, "texts": 2, "timed": 4, "repeats": 2}


def main(
    config: Config = None,
    prompts: Prompts = "bundled:held_out",
    chat_template: ChatTemplate = AUTO,
    limit: MaybeLimit = None,
    max_new_tokens: MaybeTokens = None,
    max_length: MaxLength = None,
    quick: Annotated[
        bool, Option("--quick", help="Fewer and shorter texts: only large faults are found.")
    ] = False,
    cluster: Placed = None,
) -> None:
    """Check a configuration on its own models and write a certificate: greedy texts in float32 are
    the target's, token by token; sampled tokens have its probabilities; and live it is not slower
    than autoregressive decoding. The certificate goes to the workspace and, where the configuration
    is registered, to the registry. Where a check fails, there is none, and the exit code is 1.

    A configuration that drafts while the target verifies (PEARL) needs devices for both, in
    --cluster."""
    choice, source = choose(config)
    pair_spec = chosen_pair(choice.pair, None, None, max_length)
    configuration = choice.configuration
    placement = None if cluster is None else Placement.load(cluster)
    if placement is not None and not configuration.asynchronous:
        raise UserError(f"--cluster: {configuration.label} needs no device of its own to draft on")
    print_configuration(configuration, source)
    options = {**(QUICK if quick else FULL), **given(limit=limit, max_new_tokens=max_new_tokens)}
    count = options.pop("limit")

    # torch and MLflow take seconds to import.
    from dashboards.outputs.console import show
    from dashboards.progress import ConsoleProgress
    from dashboards.reports.certificate import checked
    from dashboards.tracking.certificates import attach
    from specdec_core.base.environment import environment
    from specdec_core.evidence.certificate.certificate import Certificate
    from specdec_core.evidence.certificate.certify import Extent, check_all
    from specdec_core.models.fingerprints import fingerprints
    from specdec_core.models.pair import check_pair, load_pair
    from specdec_core.prompts.prompt_sets import PromptSet, load_prompts

    extent = Extent(**options)
    loaded = load_prompts(prompts, count, check_pair(pair_spec), chat_template)
    if configuration.asynchronous:
        from cluster.placed_bench import check_placed

        with ConsoleProgress(console) as progress:
            checks = check_placed(pair_spec, configuration, placement, loaded, extent, progress)
    else:
        with console.status(f"loading {pair_spec.name}"):
            pair = load_pair(pair_spec)
        with ConsoleProgress(console) as progress:
            checks = check_all(pair, configuration, loaded, extent, progress)
    show(console, [checked(checks)])
    if checks.failures:
        if checks.greedy.first:
            console.print(checks.greedy.first, soft_wrap=True, markup=False)
        console.print(f"[red]not certified:[/red] {', '.join(checks.failures)}")
        sys.exit(1)
    certificate = Certificate(
        pair=pair_spec,
        fingerprints=fingerprints(pair_spec),
        configuration=configuration,
        prompts=PromptSet.of(prompts, loaded, chat_template),
        max_new_tokens=options["max_new_tokens"],
        checks=checks,
        issued=datetime.now(UTC),
        environment=environment(),
    )
    point("certified", certificate.save())
    if versions := attach(certificate):
        numbers = ", ".join(map(str, versions))
        point("registry", f"version {numbers} of {pair_spec.name} carries it")


if __name__ == "__main__":
    run(main)
