import hashlib
import json
import os
import sys
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pyarrow
import pyarrow.parquet as parquet
import pytest

from specdec_core.base.errors import UserError
from specdec_core.prompts.conversation import Conversation
from specdec_core.prompts.prompt import Message
from specdec_core.prompts.prompt_sets import FORMATS, Prompt, digest, load_prompts
from tests.commands import ROOT, ran
from tests.conftest import chat_tokenizer, tiny_tokenizer

SPEED_BENCH = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nSum {a}"
SORTED = {"input": "2 1", "output": ""}


def write(path, *records):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def chat(content, role="user"):
    """A record of a chat with one message."""
    return {"messages": [{"role": role, "content": content}]}


TALK = (
    *(Message("system", ""), Message("user", "Why?", "anne")),
    *(Message("assistant", "Because."), Message("user", "And?")),
)
TURNS = ("First.", "Second.")


class TestFormats:
    @pytest.mark.parametrize(
        ("record", "prompt"),
        [
            ({"task_id": "HumanEval/7", "prompt": "def f(", "test": ""}, ("HumanEval/7", "def f(")),
            ({"question": "How many?", "answer": "3"}, ("set/0", "How many?")),
            ({"id": "s3", "instruction": "Sort.", "instances": [SORTED]}, ("s3", "Sort.\n\n2 1")),
            ({"instruction": "Add.", "input": "1 2", "output": "3"}, ("set/0", "Add.\n\n1 2")),
            ({"instruction": "Rest."}, ("set/0", "Rest.")),
            (
                {"question_id": 81, "category": "writing", "turns": list(TURNS)},
                ("81", "First.", "writing", TURNS),
            ),
            ({"prompt": "Go on", "id": 12, "note": None}, ("12", "Go on")),
            ({"prompt": list(TURNS), "prompt_id": 3}, ("set/0", "First.", None, TURNS)),
            (
                {"messages": [{"role": "user", "content": "Why?", "name": None}], "source": "x"},
                ("set/0", "Why?", None, (), (Message("user", "Why?"),)),
            ),
            ({"id": "c1", "messages": list(map(asdict, TALK))}, ("c1", "And?", None, (), TALK)),
            # A prompt beside its answered chat is what it was before chats were read.
            ({"prompt": "Why?"} | chat("Because.", "assistant"), ("set/0", "Why?")),
        ],
    )
    def test_record_of_each_known_form_is_read(self, record, prompt, tmp_path):
        assert load_prompts(write(tmp_path / "set.jsonl", record)) == [Prompt(*prompt)]

    def test_forms_may_be_mixed_and_nothing_but_blank_lines_and_a_byte_order_mark_is_left_out(
        self, tmp_path
    ):
        text = "  def naïve():\n\t→ "
        path = tmp_path / "p.jsonl"
        write(path, {"prompt": text}, "", {"question": "b"}, "  ")
        path.write_text(path.read_text(), encoding="utf-8-sig")
        assert [p.text for p in load_prompts(str(path))] == [text, "b"]

    def test_blanks_around_names_are_no_part_of_them(self, tmp_path):
        paths = [write(tmp_path / f"{name}.jsonl", {"prompt": name}) for name in "ab"]
        assert [p.text for p in load_prompts(" , ".join(paths))] == ["a", "b"]

    def test_files_of_a_folder_are_read_by_name(self, tmp_path):
        for name in "bca":
            write(tmp_path / f"{name}.jsonl", {"prompt": name})
        parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "d"}]), tmp_path / "d.parquet")
        (tmp_path / "README.md").write_text("not prompts")
        prompts = load_prompts(str(tmp_path))
        assert [p.text for p in prompts] == ["a", "b", "c", "d"]
        assert [p.id for p in prompts] == [f"{tmp_path.name}/{number}" for number in range(4)]

    def test_limit_takes_the_first_and_reads_no_further(self, tmp_path):
        path = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}, "not JSON")
        assert [p.text for p in load_prompts(path, limit=2)] == ["a", "b"]


class TestBadInput:
    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            ([{"prompt": "a"}, '{"prompt": '], r"p\.jsonl:2: malformed JSON, .* at column 11 "),
            (['{"prompt": "a"', {"prompt": "b"}], r"p\.jsonl:1: malformed JSON, .* at column 15 "),
            ([{"prompt": "a"}, "", "[1]"], r"p\.jsonl:3: expected a JSON object, got list"),
            ([{"txt": "a", "n": 1}], r"p\.jsonl:1: unknown form with txt, n; known are .*GSM8K"),
            ([{}], r"p\.jsonl:1: unknown form with no keys"),
            ([{"prompt": "a"}, {"prompt": " \n"}], r"p\.jsonl:2: empty prompt"),
            ([{"prompt": 3}], r"p\.jsonl:1: the prompt is not a string \(read as plain"),
            ([{"instruction": "x", "instances": []}], r"p\.jsonl:1: not a complete Alpaca seed"),
            ([{"prompt": "\ud800"}], r"p\.jsonl:1: the prompt holds half a surrogate pair"),
            ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}], r":2: id '1' again, .*:1"),
            ([{"messages": []}], r"p\.jsonl:1: messages: expected a list of messages"),
            ([{"messages": ["Why?"]}], r"p\.jsonl:1: messages\.0: expected role and content"),
            (
                [chat("Why?"), chat("Why?", "tool")],
                r"p\.jsonl:2: messages\.0: role: expected system, user, assistant \(got 'tool'\)",
            ),
            ([chat(None)], r"p\.jsonl:1: messages\.0: content: expected a text \(got None\)"),
            ([chat("Sure.", role="assistant")], r"p\.jsonl:1: .* the assistant's, not the user's"),
            (["[" * 100_000], r"p\.jsonl:1: cannot be read as JSON: nested too deep"),
            ([f'{{"prompt": {"1" * 5000}}}'], r"p\.jsonl:1: cannot be read as JSON: .* digits"),
            ([{"question_id": 1, "turns": [SPEED_BENCH]}], r":1: a placeholder .*prepare_data\.py"),
            ([{"question_id": 81, "turns": ["One.", 2]}], r":1: turns: expected texts \(got 2\)"),
            ([], r"p\.jsonl: no prompts in it"),
        ],
    )
    def test_bad_record_is_one_line_that_says_where(self, lines, message, tmp_path):
        path = write(tmp_path / "p.jsonl", *lines)
        with pytest.raises(UserError, match=message) as caught:
            load_prompts(path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("source", ["", " ", "{0},,{0}", "{0},", "{0}, "])
    def test_empty_name_is_refused_whatever_lies_in_the_working_folder(
        self, source, tmp_path, monkeypatch
    ):
        path = write(tmp_path / "p.jsonl", {"prompt": "a"})
        unasked = pyarrow.Table.from_pylist([{"prompt": "unasked"}])
        parquet.write_table(unasked, tmp_path / "p.parquet")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match=r"^prompts '.*': an empty name; prompts are bundled:"):
            load_prompts(source.format(path))

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("Write a poem. " * 300, "no such file; prompts are bundled:"),
            ("a\0b", "no such file; prompts are bundled:"),
            ("prompts", "prompts: no such file; prompts are bundled:held_out"),
            ("{0}/none.jsonl", r"none\.jsonl: no such file"),
            ("{0}", r"a folder without .jsonl or .parquet files"),
            ("{0}/binary/p.jsonl", "not UTF-8"),
            ("{0}/binary/p.parquet", "cannot be read as Parquet"),
            ("bundled:unseen", "seen, bundled:train, bundled:chat and bundled:conversations"),
        ],
    )
    def test_a_source_that_is_none_gets_one_line(self, source, message, tmp_path):
        (tmp_path / "binary").mkdir()
        for name in ("p.jsonl", "p.parquet"):
            (tmp_path / "binary" / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UserError, match=message) as caught:
            load_prompts(source.format(tmp_path))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("limit", [0, -3])
    def test_limit_below_one(self, limit):
        with pytest.raises(UserError, match=f"at least 1 \\(got {limit}\\)"):
            load_prompts("bundled:held_out", limit=limit)


class TestBundled:
    @pytest.mark.parametrize("split", ["held_out", "seen", "train"])
    def test_split_is_read_from_the_interpreters_own_library(self, split):
        prompts = load_prompts(f"bundled:{split}", limit=3, tokenizer=tiny_tokenizer())
        assert len(prompts) == 3
        assert all(p.id.startswith("stdlib/") and p.text.strip() for p in prompts)

    def test_chats_are_short_requests_that_the_template_writes(self):
        plain = load_prompts("bundled:chat")
        assert len({p.text for p in plain}) == len(plain) == 40
        assert max(len(p.text) for p in plain) < 1000
        written = load_prompts("bundled:chat", limit=3, tokenizer=chat_tokenizer())
        assert [p.messages for p in written] == [p.messages for p in plain[:3]]
        for prompt in written:
            assert prompt.text.endswith(f"[user]{prompt.messages[0].content}\n[assistant]")

    def test_conversations_ask_a_second_question_behind_each_chat(self):
        chats = load_prompts("bundled:chat")
        conversations = load_prompts("bundled:conversations", tokenizer=chat_tokenizer())
        assert [c.turns[0] for c in conversations] == [c.text for c in chats]
        assert all(len(c.turns) == 2 for c in conversations)
        asked = Conversation(conversations[0], chat_tokenizer())
        behind = asked.tokenizer.decode(asked.tokens(["Social."]))
        assert behind.index("Social.") < behind.index(conversations[0].turns[1])

    def test_needs_the_tokenizer_that_cuts_the_prompts(self):
        with pytest.raises(ValueError, match="pass the pair's tokenizer"):
            load_prompts("bundled:held_out")


class TestDigest:
    def test_is_sha256_over_length_prefixed_texts(self):
        raw = b"\0\0\0\0\0\0\0\x02ab" + b"\0\0\0\0\0\0\0\x02" + "é".encode()
        found = digest([Prompt("x", "ab"), Prompt("y", "é")])
        assert found == hashlib.sha256(raw).hexdigest()

    def test_differs_with_the_cut_and_the_order_but_not_with_the_ids(self):
        sets = [["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"]]
        digests = [digest(Prompt("", text) for text in texts) for texts in sets]
        assert len(set(digests)) == len(sets)
        assert digest([Prompt("other", "ab"), Prompt("ids", "c")]) == digests[0]


# --- the hub, as far as its client asks ---------------------------------------------------------

COMMIT = "c" * 40


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A small hub on this machine, and the environment that points the real client at it."""
    sets = {
        "openai/gsm8k": {
            "main/test": [{"question": f"q{i}", "answer": ""} for i in range(300)],
            "socratic/test": [{"question": "wrong configuration", "answer": ""}],
            "main/train": [{"question": "wrong split", "answer": ""}],
        },
        "someone/bench": {
            "default/train": [{"question_id": 5, "turns": ["one", "two"]}],
            "default/validation": [{"question_id": 6, "turns": ["three", "four"]}],
        },
        "someone/images": {"default/test": [{"image": "x", "label": 3}]},
        "someone/odd": {"default/special": [{"prompt": "x"}]},
    }
    folder = tmp_path_factory.mktemp("hub")
    for name, splits in sets.items():
        for split, rows in splits.items():
            path = folder / name / split / "0000.parquet"
            path.parent.mkdir(parents=True)
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "datasets"] and (folder / "/".join(parts[2:4])).is_dir():
                name, what = "/".join(parts[2:4]), parts[4]
                if what == "revision" and parts[5:] == ["refs", "convert", "parquet"]:
                    return self.answer({"id": name, "sha": COMMIT, "siblings": []})
                if what == "tree":
                    files = sorted((folder / name).rglob("*.parquet"))
                    paths = [str(file.relative_to(folder / name)) for file in files]
                    sizes = [file.stat().st_size for file in files]
                    kind = {"type": "file", "oid": "0" * 40}
                    listed = zip(paths, sizes, strict=True)
                    return self.answer([{**kind, "path": p, "size": s} for p, s in listed])
            if parts[0] == "datasets" and parts[3:5] == ["resolve", COMMIT]:
                file = folder.joinpath(*parts[1:3], *parts[5:])
                if file.is_file():
                    return self.answer(file.read_bytes())
            return self.answer(None)

        do_HEAD = do_GET  # noqa: N815

        def answer(self, body):
            data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
            self.send_response(404 if body is None else 200)
            if body is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = tmp_path_factory.mktemp("hub-home")
    yield {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    server.shutdown()
    server.server_close()


def load_in_process(environment, *calls):
    """Load in a fresh process, because the client reads its environment at import. Prompts are
    [id, text] pairs, a UserError is its text."""
    code = (
        "import json, sys\n"
        "from specdec_core.base.errors import UserError\n"
        "from specdec_core.prompts.prompt_sets import load_prompts\n"
        "for source, limit in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        found = [[p.id, p.text] for p in load_prompts(source, limit)]\n"
        "    except UserError as error:\n"
        "        found = str(error)\n"
        "    print(json.dumps(found))\n"
    )
    program = sys.executable, "-c", code, json.dumps(calls)
    said = ran(*program, cwd=ROOT, env=environment, timeout=100)
    return [json.loads(line) for line in said.splitlines()]


class TestHub:
    def test_sets_are_read_from_their_parquet_copy(self, hub):
        gsm8k, bench, images, odd, missing = load_in_process(
            hub,
            ("openai/gsm8k", None),
            *((f"someone/{name}", None) for name in ("bench", "images", "odd", "nothing")),
        )
        assert gsm8k == [[f"openai/gsm8k/{i}", f"q{i}"] for i in range(300)]
        assert bench == [["6", "three"]]  # a split that is not for training, where there is one
        assert images.startswith("someone/images, row 1: unknown form with image, label; known")
        assert odd == "someone/odd: no test, validation or train split on the hub"
        assert missing.startswith("someone/nothing: no such file, and no data set of that name")
        assert "\n" not in missing

        # Without the hub what was downloaded is read again, and the rest is one line.
        nowhere = {**hub, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
        again, error = load_in_process(nowhere, ("openai/gsm8k", 2), ("other/bench", 1))
        assert [text for _, text in again] == ["q0", "q1"]
        assert error.startswith("other/bench: no such file, and no data set of that name")
        assert "\n" not in error


class TestMixtures:
    def test_sources_take_turns_and_name_what_has_no_category(self, tmp_path):
        maths = write(tmp_path / "maths.jsonl", *({"question": f"{n} + {n}?"} for n in range(4)))
        letters = {"prompt": "a"}, {"prompt": "b", "category": "letters"}
        tasks = write(tmp_path / "tasks.jsonl", *letters)
        mixed = load_prompts(f"{maths},{tasks}")
        assert [p.text for p in mixed] == ["0 + 0?", "a", "1 + 1?", "b", "2 + 2?", "3 + 3?"]
        assert [p.category for p in mixed[:4]] == ["maths", "tasks", "maths", "letters"]
        assert load_prompts(f"{maths},{tasks}", limit=3) == mixed[:3]
        assert [p.category for p in load_prompts(tasks)] == [None, "letters"]

    def test_files_of_the_same_name_are_told_apart(self, tmp_path):
        files = [tmp_path / folder / "test.jsonl" for folder in ("one", "two")]
        for file in files:
            file.parent.mkdir()
            write(file, {"question": file.parent.name, "answer": "1"})
        mixed = load_prompts(",".join(map(str, files)))
        assert [p.id for p in mixed] == [f"{file.with_suffix('')}/0" for file in files]
        assert len({p.category for p in mixed}) == 2
        assert load_prompts(str(files[0]))[0].id == "test/0"

    def test_files_that_differ_in_the_suffix_alone_are_told_apart_by_it(self, tmp_path):
        folder = tmp_path / "more"
        folder.mkdir()
        files = [tmp_path / "train.jsonl", tmp_path / "train.json", folder / "train.jsonl"]
        for file in files:
            write(file, {"prompt": file.name})
        mixed = load_prompts(",".join(map(str, files)))
        names = [str(files[0]), str(files[1]), str(folder / "train")]
        assert [p.category for p in mixed] == names
        assert [p.id for p in mixed] == [f"{name}/0" for name in names]

    def test_an_id_in_two_sources_is_refused(self, tmp_path):
        first = write(tmp_path / "first.jsonl", {"prompt": "a", "id": "1"})
        second = write(tmp_path / "second.jsonl", {"prompt": "b", "id": "1"})
        with pytest.raises(UserError, match=r"second\.jsonl: id '1' is in .*first\.jsonl, too"):
            load_prompts(f"{first},{second}")

    def test_a_file_may_have_a_comma_in_its_name(self, tmp_path):
        path = write(tmp_path / "one,two.jsonl", {"prompt": "a"})
        assert [p.text for p in load_prompts(path)] == ["a"]


def test_forms_with_more_keys_come_first():
    """A form with a subset of a later one's keys would hide it."""
    for i, form in enumerate(FORMATS):
        assert not any(set(form.keys) <= set(later.keys) for later in FORMATS[i + 1 :])
