"""Make an API key for a server's file of keys, which holds only its hash."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from jobs.console import console, run
from specdec_core.base.errors import UserError
from specdec_core.base.files import alone, write_atomically


def main(
    file: Annotated[Path, Argument(help="The file of keys; made if it is not there.")],
    name: Annotated[str, Option(help="Name of the key's owner, written to the file.")] = "",
) -> None:
    """Make a key, show it once, and add its SHA-256 to the file for `serve --api-key-file`."""
    if len(name.splitlines()) > 1:
        raise UserError("--name: one line, please")
    from cluster.serving.http.access import hashes_in  # the server's modules take long to import

    if file.exists():
        hashes_in(file)  # raises for a file of something else
    key = f"sk-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    with alone(file):  # else one of two keys that are made at a time would be lost
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        if before and not before.endswith("\n"):
            before += "\n"
        write_atomically(file, before + f"{digest} {name}".rstrip() + "\n")
    console.print(f"{key}\n", soft_wrap=True, highlight=False)
    console.print(f"Keep it: {file} has only its hash. Clients send it as their API key.")


if __name__ == "__main__":
    run(main)
