"""Show that a configuration changes nothing but the speed, and write that down."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs import options
from jobs.choice import choose
from jobs.console import console, point, print_configuration, run
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Placement, RunnerSettings, parse
from specdec_core.prompts.chat import AUTO

if TYPE_CHECKING:
    from cluster.certified_server import ServerChecks

FULL = {"limit": 32, "max_new_tokens": 64, "texts": 4, "timed": 12, "repeats": 3}
QUICK = {"limit": 8, "max_new_tokens": 32, "texts": 2, "timed": 4, "repeats": 2}


def main(
    config: options.Config = None,
    prompts: options.Prompts = "bundled:held_out",
    chat_template: options.ChatTemplate = AUTO,
    limit: options.MaybeLimit = None,
    max_new_tokens: options.MaybeTokens = None,
    max_length: options.MaxLength = None,
    quick: Annotated[
        bool, Option("--quick", help="Fewer and shorter texts: only large faults are found.")
    ] = False,
    cluster: options.Placed = None,
    engine: Annotated[
        str | None,
        Option(help="Start this server, as vllm, with and without speculation, and check that."),
    ] = None,
    server: Annotated[
        str | None,
        Option(help="Check the running server at this URL (OpenAI's protocol), with speculation."),
    ] = None,
    server_model: options.ServerModel = None,
    against: Annotated[
        str | None,
        Option(
            help="With --server: the URL of the same server without speculation; unset, the"
            " target's weights on this machine."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        Option(help="With --engine or --server: the data type in which the target computes."),
    ] = None,
) -> None:
    """Check a configuration on its own models and write a certificate. Three checks: greedy output
    in float32 is the target's, token by token; sampled tokens have the target's probabilities; it
    is not slower than autoregressive decoding. The certificate goes to the workspace and, if the
    configuration is registered, to the registry. If a check fails, there is no certificate, and the
    exit code is 1.

    With --cluster the models are on these devices. A configuration that drafts while the target
    verifies (PEARL) needs a device for each model.

    With --engine or --server another server is checked over HTTP, with and without its speculation,
    but not its speed. In another type than float32, greedy output may differ where two tokens are
    nearly equally likely."""
    choice, source, _ = choose(config, engine)
    pair_spec = options.chosen_pair(choice.pair, None, None, max_length)
    configuration = choice.configuration
    elsewhere = _elsewhere(configuration, engine, server, server_model, against, dtype, cluster)
    if dtype is not None:
        changes = {"target_dtype": dtype, "draft_dtype": dtype}
        runner = {**pair_spec.runner.model_dump(), **changes}
        pair_spec = pair_spec.model_copy(
            update={"runner": parse(RunnerSettings, runner, "--dtype")}
        )
    placement = None if cluster is None else Placement.load(cluster)
    if elsewhere and configuration.asynchronous:
        raise UserError(f"{configuration.label} drafts on a device of its own, not in a server")
    print_configuration(configuration, source)
    counts = {
        **(QUICK if quick else FULL),
        **options.given(limit=limit, max_new_tokens=max_new_tokens),
    }
    count = counts.pop("limit")

    # torch and MLflow take seconds to import.
    from dashboards.outputs.console import show
    from dashboards.progress import ConsoleProgress
    from dashboards.reports.certificate import checked
    from dashboards.tracking.certificates import attach
    from specdec_core.base.environment import environment
    from specdec_core.evidence.certificate.certificate import Certificate
    from specdec_core.evidence.certificate.certify import Extent, check_all
    from specdec_core.models.fingerprints import fingerprints, served_fingerprints
    from specdec_core.models.pair import check_pair
    from specdec_core.prompts.prompt_sets import PromptSet, load_prompts

    extent = Extent(**counts)
    tokenizer = check_pair(pair_spec, served=elsewhere is not None)
    loaded = load_prompts(prompts, count, tokenizer, chat_template)
    certified = None
    if elsewhere is not None:
        with ConsoleProgress(console) as progress:
            found = elsewhere(spec=pair_spec, prompts=loaded, extent=extent, observer=progress)
        checks, certified, pair_spec = found.checks, found.server, found.pair
    else:
        from cluster.placed_engine import loaded_pair

        with ConsoleProgress(console) as progress:
            progress.stage(f"loading {pair_spec.name}")
            with loaded_pair(pair_spec, placement, [configuration]) as pair:
                checks = check_all(pair, configuration, loaded, extent, progress)
    show(console, [checked(checks)])
    if checks.failures:
        if checks.greedy.first:
            console.print(checks.greedy.first, soft_wrap=True, markup=False)
        console.print(f"[red]not certified:[/red] {', '.join(checks.failures)}")
        sys.exit(1)
    certificate = Certificate(
        pair=pair_spec,
        fingerprints=(
            fingerprints(pair_spec)
            if certified is None
            else served_fingerprints(pair_spec, pair_spec.target)
        ),
        configuration=configuration,
        prompts=PromptSet.of(prompts, loaded, chat_template),
        max_new_tokens=counts["max_new_tokens"],
        checks=checks,
        issued=datetime.now(UTC),
        environment=environment(),
        server=certified,
    )
    point("certified", certificate.save())
    if versions := attach(certificate):
        point("registry", f"added to {', '.join(versions)}")


def _elsewhere(
    configuration: Configuration,
    engine: str | None,
    server: str | None,
    server_model: str | None,
    against: str | None,
    dtype: str | None,
    cluster: Path | None,
) -> Callable[..., ServerChecks] | None:
    """The checks in another server that the options ask for, of a pair, prompts and extent; None
    where they ask for none. Raises :class:`UserError` for options that do not go together."""
    if server is None:
        for option, value in (("against", against), ("server-model", server_model)):
            if value is not None:
                raise UserError(f"--{option} needs --server")
        if engine is None:
            if dtype is not None:
                raise UserError("--dtype needs --engine or --server")
            return None
    elif engine is not None:
        raise UserError("--engine starts the server: give it or --server")
    if cluster is not None:
        raise UserError("--cluster has the devices of this library's engine, not of a server")
    from cluster.certified_server import check_engine, check_running
    from specdec_core.servers.answers import ServerAddress
    from specdec_core.servers.table import server_of

    if engine is not None:
        program = server_of(engine, stage="serve", option="--engine")
        return partial(check_engine, program, configuration=configuration)
    assert server is not None
    if against is not None and _address(against) == _address(server):
        raise UserError(f"--against {against}: this is --server; name one without speculation")
    plain = None if against is None else ServerAddress(url=against, model=server_model)
    address = ServerAddress(url=server, model=server_model)
    return partial(check_running, address, plain, configuration=configuration)


def _address(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").lower()


if __name__ == "__main__":
    run(main)
