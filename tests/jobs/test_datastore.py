"""`specdec datastore` builds from texts and from recordings, and refuses bad input in one line."""

from jobs.datastore import main
from specdec_core.drafting.datastores.datastore import open_datastore
from specdec_core.models.loading import load_tokenizer
from specdec_core.prompts import stdlib as corpus
from specdec_core.training.datastores.corpus import read_texts
from tests.commands import assert_refused, printed
from tests.specdec_core.recordings.test_record import record


def test_a_folder_of_texts_becomes_a_datastore(command, tiny_pair_folders, tmp_path):
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
    shown = printed(command(main, tmp_path, "mine", "--source", texts, "--target", target))
    assert "4 documents" in shown
    assert "{kind: retrieval, datastore: mine}" in shown
    folder = tmp_path / "datastores" / "mine"
    store, tokenizer = open_datastore(folder), load_tokenizer(str(target))
    assert store.card.documents == 4
    phrase = tokenizer("def f(x):")["input_ids"]
    assert store.longest(phrase, 1, 64).length == len(phrase)
    assert not store.longest(tokenizer("secret")["input_ids"], 4, 4)

    arguments = ["mine", "--source", texts / "a.txt", "--target", target]
    assert_refused(command(main, tmp_path, *arguments), "mine: is there already; --replace ")
    assert open_datastore(folder).card.documents == 4
    printed(command(main, tmp_path, *arguments, "--replace"))
    assert open_datastore(folder).card.documents == 1


def test_recorded_prompts_and_outputs_become_a_datastore(command, tiny_pair, tmp_path):
    recorded = record(tiny_pair, tmp_path / "traces" / "own").prompts
    printed(command(main, tmp_path, "recorded", "--recording", "own"))
    store = open_datastore(tmp_path / "datastores" / "recorded", tiny_pair.tokenizer_digest)
    assert store.card.documents == len(recorded.ids)
    prompt, output = recorded.tokens[1].tolist(), recorded.outputs[1].tolist()
    matches = store.longest([*prompt, *output[:5]], 1, 64)
    assert matches.length == len(prompt) + 5
    assert [place[0] for place in store.continuations(matches, 8, 1)] == output[5:13]
    done = command(main, tmp_path, "x", "--recording", "own", "--target", "bundled:target")
    assert_refused(done, "own: recorded with another tokenizer than ")


def test_the_bundled_training_corpus_is_apart_from_all_bundled_prompts():
    texts = set(read_texts("bundled:train"))
    assert len(texts) > 100
    for split in ("seen", "held_out"):
        used = {corpus.module_source(r.module) for r in corpus.load_references(split)}
        assert not texts & used
