"""Long texts and large grammars delay no other request."""

from multiprocessing import Pipe
from threading import Event, current_thread

import openai
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.serving.engine_main import _Inbox
from cluster.serving.http.prompts import Prompts
from specdec_core.base.errors import UserError
from specdec_core.engine import Engine, Request
from specdec_core.tokens import grammar as grammars
from specdec_core.tokens.bounds import longest_token
from specdec_core.tokens.grammar import MAX_SOURCE, Grammar, Grammars
from tests.conftest import tiny_tokenizer
from tests.specdec_core.tokens.test_detokenising import metaspace

GRAMMAR = Grammar("regex", "(ab|cd){2,3}x")


def test_a_text_that_cannot_fit_is_refused_before_it_is_cut(client, monkeypatch):
    long = "x" * 2**20
    monkeypatch.setattr(Prompts, "_cut", lambda *_: pytest.fail("it was cut into tokens"))
    sentence = "context holds 256 tokens here, but the prompt has .* of which a token has at most"
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.completions.create(model="tiny", prompt=long)
    with pytest.raises(openai.BadRequestError, match=sentence) as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": long}])
    assert refused.value.code == "context_length_exceeded"


def whole_words(**changes):
    """One token for every word, also for one that is not known."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_no_token_is_longer_than_the_longest():
    for tokenizer in (tiny_tokenizer(), metaspace()):
        most = longest_token(tokenizer)
        if most is None:
            continue
        for text in ("def main(argv):\n    return 1", "é" * 40, " " * 99, "日本語" * 9):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert len(text) <= most * len(tokens)
    assert longest_token(tiny_tokenizer()) == max(map(len, tiny_tokenizer().get_vocab()))


def test_where_a_token_may_stand_for_any_text_there_is_no_longest():
    assert longest_token(whole_words()) is None
    stripping = tiny_tokenizer()
    stripping.backend_tokenizer.normalizer = normalizers.Strip()
    assert longest_token(stripping) is None
    taking = tiny_tokenizer()
    taking.add_tokens(["<|end|>"])
    assert longest_token(taking) is not None
    composing = tiny_tokenizer()
    composing.backend_tokenizer.normalizer = normalizers.NFC()
    assert longest_token(composing) == 4 * longest_token(tiny_tokenizer())


@pytest.fixture
def blocked(monkeypatch):
    """Grammars are compiled once this is set, and on no engine's thread."""
    compiling, compiled = Event(), Grammars._compile

    def slowly(self, grammar):
        assert not current_thread().name.startswith(("engine", "MainThread"))
        assert compiling.wait(60)
        return compiled(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    return compiling


def request(engine, name, grammar=None):
    return Request(name, engine.encode("def main("), 24, grammar=grammar)


def test_an_engines_process_steps_while_a_grammar_is_compiled(tiny_pair, blocked):
    engine = Engine(tiny_pair, slots=2)
    ours, theirs = Pipe()
    inbox = _Inbox(engine, theirs)
    for name in ("slow", "left"):
        ours.send(("add", request(engine, name, GRAMMAR)))
        inbox.handle()
    ours.send(("add", request(engine, "quick")))
    ours.send(("cancel", "left"))
    for _ in range(2):
        inbox.handle()
    assert {chunk.request_id for _ in range(3) for chunk in engine.step()} == {"quick"}
    blocked.set()
    for _ in range(2):
        inbox.handle()
    stepped: set[str] = set()
    while not engine.idle:
        stepped |= {chunk.request_id for chunk in engine.step()}
    assert stepped == {"quick", "slow"}
    ours.close()
    with pytest.raises(EOFError):
        inbox.handle()


def test_compiled_grammars_are_kept_by_their_size():
    tokenizer = tiny_tokenizer()
    own = Grammars(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    many = [Grammar("regex", f"{'a' * (MAX_SOURCE // 8)}{n}") for n in range(40)]
    for grammar in many:
        assert own.prepared(grammar).program is not None
        assert sum(len(kept.source) for kept in own._kept) <= grammars._KEPT
    assert many[-1] in own._kept
    assert many[0] not in own._kept
    for n in range(100):
        own.prepared(Grammar("regex", f"a{n}"))
    assert len(own._kept) <= 64
    with pytest.raises(UserError, match="more than"):
        own.prepared(Grammar("regex", "a" * (MAX_SOURCE + 1)))
