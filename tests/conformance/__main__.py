"""Check a server with clients of other projects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from typer import Argument, Option

from jobs.console import console, run
from specdec_core.base.errors import UserError


def main(
    url: Annotated[str, Argument(help="The server, without /v1.")],
    tokenizer: Annotated[
        str, Option(help="The served model, for its tokenizer: folder, hub id or bundled:….")
    ],
    vllm: Annotated[
        Path | None, Option(help="The Python of an environment with vLLM, for `vllm bench serve`.")
    ] = None,
    schemathesis: Annotated[Path | None, Option(help="The program schemathesis.")] = None,
    leaving: Annotated[
        int,
        Option(
            min=0, help="Requests of 32 clients, a third of which leave midway; as many warm up."
        ),
    ] = 0,
    answers: Annotated[
        int,
        Option(min=0, help="JSON answers by random schemas, every second one not speculated."),
    ] = 0,
    requests: Annotated[int, Option(min=1, help="Requests of each benchmark.")] = 40,
    cases: Annotated[int, Option(min=1, help="Cases of schemathesis for each operation.")] = 100,
) -> None:
    """Run the named clients, each from its own environment, and count failures; then clients that
    leave midway (--leaving) and clients that ask for JSON (--answers).

    The server's key is in OPENAI_API_KEY, if it needs one."""
    from specdec_core.models.location import located
    from tests.conformance import field_clients as clients
    from tests.conformance.fire import json_answers, under_fire

    if not any((vllm, schemathesis, leaving, answers)):
        raise UserError(
            "name a client: --vllm PYTHON or --schemathesis PROGRAM; or give --leaving or --answers"
        )
    key = os.environ.get("OPENAI_API_KEY")
    model = _model(url, key)
    target = clients.Target(
        url.rstrip("/"), model, located(tokenizer), key, chats=_answers_chats(url)
    )
    if vllm and not target.chats:
        console.print("its model has no chat template: completions alone")
    passed = True
    for program, client, count in (
        (vllm, clients.vllm_bench, requests),
        (schemathesis, clients.schemathesis, cases),
    ):
        if program is None:
            continue
        for outcome in client(program.absolute(), target, count):
            passed &= outcome.passed
            mark = "[green]passed[/green]" if outcome.passed else "[red]failed[/red]"
            console.print(
                f"{mark}  {outcome.client} {outcome.path}: {outcome.requests} requests,"
                f" {outcome.failed} failed"
            )
            if outcome.said:
                console.print(outcome.said, markup=False, highlight=False)
    if leaving:
        found = under_fire(target.url, key, leaving)
        grown = "" if found.growth is None else f", memory {found.growth:+.1%}"
        passed &= _say(
            f"{2 * leaving} requests, {found.answered} answered, {found.left} left midway{grown}",
            found.faults,
        )
    if answers:
        given = json_answers(target.url, key, answers)
        passed &= _say(f"{given.asked} JSON answers, {given.ended} ended", given.faults)
    if not passed:
        raise typer.Exit(1)


def _say(what: str, faults: Sequence[str]) -> bool:
    """Print the outcome of a check; returns whether it passed."""
    mark = "[red]failed[/red]" if faults else "[green]passed[/green]"
    console.print(f"{mark}  {what}")
    for fault in faults:
        console.print(f"  {fault}", markup=False, highlight=False)
    return not faults


def _model(url: str, key: str | None) -> str:
    """The name of the model that is served. Raises :class:`UserError`."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise UserError(f"{url}: it does not tell its models: {error}") from None


def _answers_chats(url: str) -> bool:
    """Whether the server answers chats, unless it says otherwise. Raises :class:`UserError`."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/health", trust_env=False)
        return not (answer.is_success and answer.json().get("chat") is False)
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        raise UserError(f"{url}: it does not tell its health: {error}") from None


if __name__ == "__main__":
    run(main)
