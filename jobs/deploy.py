"""Have a running server serve another configuration, without a pause, or go back."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from jobs.choice import read_config
from jobs.console import console, print_configuration, program, run, warn
from jobs.options import given
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace

if TYPE_CHECKING:
    from cluster.serving.control import RunningServer
    from cluster.serving.served import Deployment

_LOOK = 2.0  # seconds between looks at how a canary stands

Server = Annotated[
    str | None, Option("--url", help="The server's address; unset, this workspace's only one.")
]


def main(
    which: Annotated[str, Argument(help="champion or challenger.")] = "champion",
    config: Annotated[
        Path | None,
        Option(help="YAML with `pair` and `configuration`, or an id's beginning, instead."),
    ] = None,
    version: Annotated[
        int | None, Option(min=1, help="Version of the registered model, instead.")
    ] = None,
    url: Server = None,
    canary: Annotated[
        str | None,
        Option(help="Give it this share of the traffic, as 10%, until it is shown to be faster."),
    ] = None,
    uncertified: Annotated[
        bool, Option("--uncertified", help="Accept a configuration without a certificate.")
    ] = False,
    back: Annotated[
        bool, Option("--back", help="Instead: serve what the server served before the last switch.")
    ] = False,
    promote: Annotated[
        str | None,
        Option(
            help="Instead: the id (or its beginning) of a sweep's configuration to register as the"
            " champion, or with `challenger` as the challenger; a running server is not changed."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        Option(help="With --promote: as the champion in this server, as vllm; unset, this engine."),
    ] = None,
) -> None:
    """Load a configuration beside the served one, and switch to it. The old one finishes its
    requests, and none fails. A registered version that is deployed becomes the
    champion. If it cannot be loaded, the server continues unchanged."""
    asked = given(config=config, version=version, promote=promote, back=back or None)
    if len(asked) > 1:
        raise UserError(f"--{' and --'.join(asked)}: give one")
    instead = "".join(asked)
    if canary is not None and instead in ("promote", "back"):
        raise UserError(f"--canary: not with --{instead}")
    if uncertified and back:
        raise UserError("--uncertified: not with --back, which asks for no certificate")
    if which != "champion" and instead not in ("", "promote"):
        raise UserError(f"{which}: not with --{instead}")
    if promote is not None:
        if url is not None:
            raise UserError("--url: not with --promote, which changes no running server")
        _promote(promote, _alias(which, None), uncertified, engine)
        return
    if engine is not None:
        raise UserError("--engine goes with --promote; a running server knows its own")
    # torch takes seconds to import
    from cluster.serving.control import find_server
    from cluster.serving.deployment import deployment_of

    server = find_server(url)
    if back:
        _switch(server, server.roll_back)
        return
    if config is not None:
        choice, source = read_config(config)
        pair, configuration = choice.pair, choice.configuration
        deployment = deployment_of(pair, configuration, source, engine=server.program)
    else:
        deployment = _registered(server, _alias(which, version))
    if deployment.certificate is None and not uncertified:
        found = deployment.configuration.id
        # Without --config the command certifies the champion, whose sweep may be elsewhere.
        default = which == "champion" and version is None
        check = certify_command(server.program, config or (None if default else found))
        raise UserError(
            f"{found} ({deployment.source}) has no certificate: `{check}` writes one, --uncertified"
            " accepts it without"
        )
    if canary is not None:
        _try_out(server, deployment, _share(canary))
        return
    _switch(server, partial(server.deploy, deployment))


def _switch(server: RunningServer, order: Callable[[], Deployment]) -> None:
    """Have the server load what `order` names, and serve it. A registered version becomes the
    champion."""
    from dashboards.tracking.registry import CHAMPION, appoint

    with console.status("loading it beside the one that is served"):
        served = order()
    if served.version is not None:
        from dashboards.tracking.certificates import model_of

        appoint(model_of(served.pair.name, server.program), served.version, CHAMPION)
    say(server.url, served)


def certify_command(engine: str | None, config: str | Path | None = None) -> str:
    """The command that certifies a configuration in an engine."""
    options = given(config=config, engine=engine)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return shlex.join([program("specdec"), "certify", *words])


def _model(server: RunningServer) -> str:
    """The registered model of what a server serves."""
    from dashboards.tracking.certificates import model_of

    return model_of(server.name, server.program)


def _promote(config_id: str, alias: Any, uncertified: bool, engine: str | None) -> None:
    """Give the alias, in this library's engine or in another server, to a configuration of a
    finished sweep with a certificate in that engine."""
    from dashboards.tracking.certificates import model_of
    from dashboards.tracking.registry import register
    from specdec_core.evidence.certificate.certificate import find_certificate
    from specdec_core.search.folder import find_trial
    from specdec_core.servers.table import server_of

    if engine is not None:
        server_of(engine, stage="serve", option="--engine")
    result, trial = find_trial(workspace() / "sweeps", config_id)
    certificate = find_certificate(result.pair, trial.configuration, engine)
    if certificate is None and not uncertified:
        raise UserError(
            f"{trial.id} has no certificate for {result.pair.name}:"
            f" `{certify_command(engine, trial.id)}` writes one,"
            " --uncertified accepts it without"
        )
    version = register(result, trial.id, alias=alias, server=engine)
    if not trial.configuration.lossless:
        warn("a lossy method: its output does not keep the target's distribution")
    said = "[yellow]warning:[/yellow] not certified"
    console.print(said if certificate is None else certificate.sentence)
    source = f"{alias} of {model_of(result.pair.name, engine)}, version {version}"
    print_configuration(trial.configuration, source)


def _share(text: str) -> float:
    """A share as `10%` or `0.1`."""
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = 0.0
    if rest or not 0 < share < 1:
        raise UserError(f"--canary {text}: expected a share of the traffic, as 10%")
    return share


def _try_out(server: RunningServer, deployment: Deployment, share: float) -> None:
    """Follow a challenger until the server has decided. The canary continues on the
    server if this is interrupted."""
    from dashboards.tracking.registry import CHAMPION, appoint

    with console.status("loading it beside the one that is served"):
        server.deploy(deployment, share)
    try:
        with console.status("") as status:
            while (state := server.health().get("canary")) and state["state"] == "running":
                status.update(f"{state['label']}: {share:.0%} of the traffic, {_found(state)}")
                time.sleep(_LOOK)
    except KeyboardInterrupt:
        later = "; once it is promoted, `specdec deploy challenger` makes it the champion"
        said = "left; the canary continues on the server, and /health shows its state"
        console.print(f"{said}{later if deployment.version is not None else ''}", markup=False)
        return
    if state is None:
        raise UserError(f"{server.url}: the server was started again, and has no canary any more")
    console.print(f"[bold]{state['state']}[/bold]: {state['reason']} ({_found(state)})")
    if state["state"] == "promoted" and deployment.version is not None:
        appoint(_model(server), deployment.version, CHAMPION)


def _found(state: dict[str, Any]) -> str:
    pairs = f"{state['pairs']} pairs of turns"
    if state["ratio"] is None:
        return pairs
    high = "…" if state["high"] is None else f"{state['high']:.2f}"
    return f"{pairs}, {state['ratio']:.2f}× ({state['low']:.2f}–{high})"


def say(url: str, served: Deployment) -> None:
    """Print what is served now."""
    print_configuration(served.configuration, served.source, f"[green]serving[/green]  {url}  ")
    console.print(served.certificate or "[yellow]warning:[/yellow] not certified")


def _alias(which: str, version: int | None) -> Any:
    if version is not None:
        return version
    if which not in ("champion", "challenger"):
        raise UserError(f"{which}: expected champion or challenger, --config or --version")
    return which


def _registered(server: RunningServer, which: Any) -> Deployment:
    from cluster.serving.deployment import deployment_of
    from dashboards.tracking.registry import load_registered

    pair, configuration, version = load_registered(_model(server), which)
    said = f"version {version}" if isinstance(which, int) else f"{which}, version {version}"
    return deployment_of(pair, configuration, said, version, engine=server.program)


def follow_champion(url: str, version: int | None, seconds: float) -> None:
    """Check for a new champion with a certificate, for ever, and have the server serve it. Each
    obstacle is reported once, and the server stays unchanged. A champion that it refuses is not
    tried again; one that fails for any other reason is. A champion is new after the registered
    `version` that the server serves or, where it serves a file, after the one that the first
    successful look finds: the server was not asked to serve that."""
    from cluster.serving.control import Refusal, find_server
    from dashboards.tracking.registry import champion_version

    server, said = find_server(url), set[str]()
    known, wait = version is not None, 0.0  # the first look is at once
    while True:
        time.sleep(wait)
        wait = seconds
        try:
            newest = champion_version(_model(server))
            if not known:
                version, known = newest, True
            if newest == version:
                continue
            if newest == server.health()["version"]:  # by `specdec deploy`
                version = newest
                continue
            found = _registered(server, "champion")
            if found.certificate is None:
                raise UserError(
                    f"version {found.version}, the new champion, has no certificate for the weights"
                    f" that are here and is not served;"
                    f" `{certify_command(server.program)}` writes one"
                )
            try:
                served = server.deploy(found)
            except Refusal:
                version = found.version
                raise
            version = found.version
            say(server.url, served)
        except Exception as error:  # a store's client raises anything when its server is away
            message = str(error).partition("\n")[0] or type(error).__name__
            if message not in said:
                said.add(message)
                warn(message)


if __name__ == "__main__":
    run(main)
