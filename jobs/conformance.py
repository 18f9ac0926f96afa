"""Check a server with the field's own clients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import httpx
import typer
from typer import Argument, Option

from jobs.console import console, run
from specdec_core.base.errors import UserError


def main(
    url: Annotated[str, Argument(help="The server, without /v1.")],
    tokenizer: Annotated[str, Option(help="Folder or hub id of the served model's tokenizer.")],
    vllm: Annotated[
        Path | None, Option(help="The Python of an environment with vLLM, for `vllm bench serve`.")
    ] = None,
    guidellm: Annotated[Path | None, Option(help="The program guidellm.")] = None,
    schemathesis: Annotated[Path | None, Option(help="The program schemathesis.")] = None,
    requests: Annotated[int, Option(min=1, help="Requests of each benchmark.")] = 40,
    cases: Annotated[int, Option(min=1, help="Cases of schemathesis for each operation.")] = 100,
) -> None:
    """Run the clients that are named, each from an environment of its own, and count what fails.

    The server's key is in OPENAI_API_KEY, if it needs one."""
    from cluster.serving import field_clients as clients

    if vllm is None and guidellm is None and schemathesis is None:
        raise UserError(
            "name a client: --vllm PYTHON, --guidellm PROGRAM or --schemathesis PROGRAM"
        )
    key = os.environ.get("OPENAI_API_KEY")
    target = clients.Target(url.rstrip("/"), _model(url, key), tokenizer, key)
    passed = True
    for program, client, count in (
        (vllm, clients.vllm_bench, requests),
        (guidellm, clients.guidellm, requests),
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
    if not passed:
        raise typer.Exit(1)


def _model(url: str, key: str | None) -> str:
    """The name of the model that is served. Raises :class:`UserError`."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise UserError(f"{url}: it does not tell its models: {error}") from None


if __name__ == "__main__":
    run(main)
