"""Build a datastore to retrieve candidate tokens from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated

from typer import Argument, Option

from jobs.console import console, point, run
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import PairSpec


def main(
    name: Annotated[str, Argument(help="The datastore's name, or a path to its folder.")],
    source: Annotated[
        list[str] | None,
        Option(help="bundled:train|seen|held_out, .jsonl file, folder of texts; repeatable."),
    ] = None,
    recording: Annotated[
        list[str] | None,
        Option(help="Recording whose prompts and outputs to take; repeatable."),
    ] = None,
    target: Annotated[
        str | None,
        Option(
            help="Whose tokenizer to use: hub id, folder or bundled:<name>; unset, the recording's."
        ),
    ] = None,
    replace: Annotated[
        bool, Option("--replace", help="Replace the datastore of that name.")
    ] = False,
) -> None:
    """Build a datastore for retrieval drafters (REST): the tokens of a corpus and their suffix
    array. A drafter `{kind: retrieval, datastore: NAME}` then proposes the tokens that follow the
    sequence's last tokens in the corpus.
    """
    if not source and not recording:
        raise UserError("nothing to build from: give --source or --recording")
    if not name or name in (".", ".."):
        raise UserError(f"{name!r}: expected a name for the datastore")
    # transformers takes seconds to import.
    from specdec_core.drafting.datastores.datastore import resolve_datastore

    folder = resolve_datastore(name)
    if folder.exists() and not replace:
        raise UserError(f"{folder}: is there already; --replace builds it again")
    from dashboards.progress import ConsoleProgress
    from specdec_core.models.fingerprints import tokenizer_digest
    from specdec_core.models.loading import load_tokenizer
    from specdec_core.recordings.find import open_named
    from specdec_core.training.datastores.build import write_datastore

    recordings = [open_named(folder_or_name, workspace()) for folder_or_name in recording or []]
    if target is None:
        target = recordings[0].header.pair.target if recordings else PairSpec().target
    tokenizer = load_tokenizer(target)
    for each in recordings:
        own = load_tokenizer(each.header.pair.target)
        if tokenizer_digest(own) != tokenizer_digest(tokenizer):
            raise UserError(f"{each.folder}: recorded with another tokenizer than {target}'s")

    from specdec_core.training.datastores.corpus import encode, read_texts, recorded

    def documents() -> Iterator[Sequence[int]]:
        for name in source or []:
            yield from encode(read_texts(name), tokenizer, progress)
        for each in recordings:
            yield from recorded(each, progress)

    sources = [*(source or []), *(str(each.folder) for each in recordings)]
    start = time.perf_counter()
    with ConsoleProgress(console) as progress:
        progress.stage("reading")
        card = write_datastore(documents(), sources, tokenizer, folder)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    console.print(
        f"{card.documents:,} documents, {card.tokens:,} tokens, {size:.1f} MiB, built in "
        f"{seconds:.1f} s"
    )
    point("datastore", folder)
    point("drafter", f"{{kind: retrieval, datastore: {name}}}")


if __name__ == "__main__":
    run(main)
