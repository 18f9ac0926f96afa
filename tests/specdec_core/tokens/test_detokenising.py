"""Streamed text is the decoded text, cut at the first stop string, however tokens arrive."""

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdec_core.tokens.detokenising import MAX_OPEN, StreamDecoder

TEXT = "def main(n): return 'naïve café' + \"你好，世界\" # 🚀🎉 done\n    if n  >= 1:\n"


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def metaspace():
    """Like Llama 2: words start with ▁, unknown characters are byte tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def main ( n ) : return 'naive cafe' # done"] * 4, trainer)
    layout = json.loads(tokenizer.to_str())
    layout["added_tokens"] = [t for t in layout["added_tokens"] if t["content"][1:3] != "0x"]
    tokenizer = Tokenizer.from_str(json.dumps(layout))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]


def chunks(rng, tokens):
    cuts = sorted(rng.sample(range(len(tokens) + 1), rng.randint(0, min(6, len(tokens)))))
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def stream(decoder, pieces):
    text = "".join(decoder.push(piece) for piece in pieces) + decoder.finish()
    assert text == decoder.text
    return text


def cut(text, stop):
    """The specification, letter by letter."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def test_streamed_text_is_the_decoded_text(tokenizer):
    rng = random.Random(0)
    tokens = tokenizer.encode(TEXT)
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert expected == TEXT
    for _ in range(50):
        decoder = StreamDecoder(tokenizer)
        assert stream(decoder, chunks(rng, tokens)) == expected
        assert decoder.used == len(tokens)
        assert not decoder.stopped


def test_text_ends_at_the_first_stop_string_and_used_tells_which_tokens_it_needed(tokenizer):
    rng = random.Random(1)
    tokens = tokenizer.encode(TEXT)
    for _ in range(300):
        pieces = []
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(TEXT))
            pieces.append(TEXT[start : start + rng.randint(1, 6)])
            if rng.random() < 0.3:
                pieces[-1] += "x"  # begins like a stop string and is none
        stop = tuple(pieces)
        decoder = StreamDecoder(tokenizer, stop)
        expected = cut(TEXT, stop)
        assert stream(decoder, chunks(rng, tokens)) == expected
        assert decoder.stopped == (expected != TEXT)
        if decoder.stopped:
            needed = tokenizer.decode(tokens[: decoder.used])
            shorter = tokenizer.decode(tokens[: decoder.used - 1])
            assert any(s in needed for s in stop)
            assert not any(s in shorter for s in stop)


def test_text_after_a_prompt_keeps_its_leading_space(tokenizer):
    rng = random.Random(2)
    tokens = tokenizer.encode(TEXT)
    for _ in range(50):
        at = rng.randrange(1, len(tokens))
        prompt = tokenizer.decode(tokens[:at])
        if prompt.endswith("\ufffd"):
            continue
        decoder = StreamDecoder(tokenizer, prompt_ids=tokens[:at])
        assert prompt + stream(decoder, chunks(rng, tokens[at:])) == TEXT


def test_a_character_begun_by_the_prompt_is_completed():
    tokenizer = TOKENIZERS["metaspace"]
    tokens = tokenizer.encode("ae你n")
    assert "\ufffd" in tokenizer.decode(tokens[:-2])
    assert stream(StreamDecoder(tokenizer, prompt_ids=tokens[:-2]), [tokens[-2:]]) == "你n"


def test_no_half_characters_and_no_half_stop_strings_are_shown(tokenizer):
    tokens = tokenizer.encode("café 🚀 STOP STO")
    decoder = StreamDecoder(tokenizer, stop=("STOPPED",))
    shown = ""
    for token in tokens:
        shown += decoder.push([token])
        assert "\ufffd" not in shown
        assert not shown.endswith("S")
    assert shown == "café 🚀 STOP "
    assert decoder.finish() == "STO"


def test_random_bytes_are_decoded_as_a_whole():
    """Random models write bytes that are no UTF-8 at all."""
    tokenizer = TOKENIZERS["byte_level"]
    rng = random.Random(3)
    for _ in range(200):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 80))]
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        assert stream(StreamDecoder(tokenizer), chunks(rng, tokens)) == expected


def test_special_tokens_have_no_text_and_do_not_swallow_spaces(tokenizer):
    tokens = tokenizer.encode("one two")
    eos = tokenizer.eos_token_id
    interleaved = [t for token in tokens for t in (eos, token, eos)]
    decoder = StreamDecoder(tokenizer)
    assert stream(decoder, [[t] for t in interleaved]) == "one two"
    assert decoder.used == len(interleaved)


def test_the_window_stays_small(tokenizer):
    decoder = StreamDecoder(tokenizer)
    broken = tokenizer.encode("你")[-1:] * 1000  # the last byte of a character, again and again
    for token in [*tokenizer.encode(TEXT * 20), *broken]:
        decoder.push([token])
        assert len(decoder._window) <= 2 * (MAX_OPEN + 1)


def test_nothing_comes_after_a_stop_string(tokenizer):
    decoder = StreamDecoder(tokenizer, stop=("two",))
    tokens = tokenizer.encode("one two")
    decoder.push(tokens)
    used = decoder.used
    assert decoder.stopped
    assert decoder.push(tokenizer.encode("three")) == "" == decoder.finish()
    assert (decoder.text, decoder.used) == ("one ", used)


@pytest.mark.parametrize("size", [1, 3, 50])
def test_stop_strings_are_not_looked_for_in_the_first_tokens(tokenizer, size):
    tokens = tokenizer("def main(n): def main(n): def main(n):", add_special_tokens=False)[
        "input_ids"
    ]
    decoder = StreamDecoder(tokenizer, ["main"], free=len(tokens) // 3 + 1)
    parts = [decoder.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    assert decoder.stopped
    assert "".join(parts).split() == ["def", "main(n):", "def"]
