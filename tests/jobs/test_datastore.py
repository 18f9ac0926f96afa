"""`specdec datastore` builds from texts and from recordings, and refuses bad input in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs.datastore import main
from specdec_core.drafting.datastores.datastore import open_datastore
from specdec_core.models.loading import load_tokenizer
from specdec_core.models.pair import Pair
from specdec_core.prompts import stdlib as corpus
from specdec_core.training.datastores.corpus import read_texts
from tests.commands import Command, assert_refused
from tests.specdec_core.recordings.test_record import record


def test_a_folder_of_texts_becomes_a_datastore(
    command: Command, tiny_pair_folders: dict[str, Path], tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    (texts / "deeper").mkdir(parents=True)
    (texts / "a.txt").write_text("def f(x):\n    return x\n")
    (texts / "deeper" / "b.py").write_text("import os\n")
    (texts / "binary").write_bytes(b"\xff\xfe\x00")
    (texts / ".hidden").write_text("secret")
    (texts / "records.jsonl").write_text(
        '{"text": "one"}\n\n{"prompt": "x", "completion": "def f(x):"}\n'
    )
    target = tiny_pair_folders["target"]
    done = command(main, tmp_path, "mine", "--source", texts, "--target", target)
    assert done.returncode == 0, done.stderr
    assert "4 documents" in done.stdout
    assert "{kind: retrieval, datastore: mine}" in " ".join(done.stdout.split())
    folder = tmp_path / "datastores" / "mine"
    store, tokenizer = open_datastore(folder), load_tokenizer(str(target))
    assert store.card.documents == 4
    phrase = tokenizer("def f(x):")["input_ids"]
    assert store.longest(phrase, 1, 64).length == len(phrase)
    assert not store.longest(tokenizer("secret")["input_ids"], 4, 4)

    arguments = ["mine", "--source", texts / "a.txt", "--target", target]
    done = command(main, tmp_path, *arguments)
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*mine: is there already; --replace .*\n", done.stderr)
    assert open_datastore(folder).card.documents == 4
    assert command(main, tmp_path, *arguments, "--replace").returncode == 0
    assert open_datastore(folder).card.documents == 1


def test_recorded_prompts_and_outputs_become_a_datastore(
    command: Command, tiny_pair: Pair, tmp_path: Path
) -> None:
    recorded = record(tiny_pair, tmp_path / "traces" / "own").prompts
    done = command(main, tmp_path, "recorded", "--recording", "own")
    assert done.returncode == 0, done.stderr
    store = open_datastore(tmp_path / "datastores" / "recorded", tiny_pair.tokenizer_digest)
    assert store.card.documents == len(recorded.ids)
    prompt, output = recorded.tokens[1].tolist(), recorded.outputs[1].tolist()
    matches = store.longest([*prompt, *output[:5]], 1, 64)
    assert matches.length == len(prompt) + 5
    assert [place[0] for place in store.continuations(matches, 8, 1)] == output[5:13]
    done = command(main, tmp_path, "x", "--recording", "own", "--target", "bundled:target")
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*own: recorded with another tokenizer than .*\n", done.stderr)


def test_the_bundled_training_corpus_is_apart_from_all_bundled_prompts() -> None:
    texts = set(read_texts("bundled:train"))
    assert len(texts) > 100
    for split in ("seen", "held_out"):
        used = {corpus.module_source(r.module) for r in corpus.load_references(split)}
        assert not texts & used


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], "give --source or --recording"),
        (["x", "--source", "nowhere"], "nowhere: no such file or folder; a corpus is"),
        (["x", "--source", "bundled:all"], "bundled:all: no such bundled corpus; there are"),
        (["x", "--source", "empty"], "empty: no text in it; an empty datastore finds nothing"),
        (["x", "--source", "odd.jsonl"], r"odd\.jsonl:2: expected an object with a `text`"),
        (["x", "--source", "binary"], "binary: not UTF-8 text"),
        (["..", "--source", "empty"], "expected a name for the datastore"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2_and_leaves_nothing(
    command: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd.jsonl").write_text('{"text": "a"}\n{"other": 1}\n')
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    here = [tmp_path / a if a != ".." and (tmp_path / a).exists() else a for a in arguments]
    done = command(main, tmp_path, *here)
    assert_refused(done, message)
    assert not (tmp_path / "datastores").exists()
