"""A race of the tiny pair, shared by the tests of the benchmark."""

from datetime import UTC, datetime

import pytest

from specdec_core.config import AUTOREGRESSIVE, Sampling
from specdec_core.engine import Engine
from specdec_core.evidence.bench.race import EngineContestant, PeerContestant, race
from specdec_core.evidence.bench.result import BenchResult
from specdec_core.prompts.conversation import conversations
from specdec_core.prompts.prompt_sets import Prompt, PromptSet
from tests.configurations import CHAIN
from tests.peers import peers_of

NEW_TOKENS = 10
CATEGORIES = ("writing", "qa", "math")


@pytest.fixture(scope="session")
def bench_prompts():
    texts = ("def main(", "for i in range", "x = 1 +")
    return [
        Prompt(str(number), text, category, (text, "and more"))
        for number, (text, category) in enumerate(zip(texts, CATEGORIES, strict=True))
    ]


@pytest.fixture(scope="session")
def bench_result(tiny_pair, bench_prompts):
    """Our autoregressive decoding and a chain, and three of transformers' ways, twice, greedy and
    sampled."""
    asked = conversations(bench_prompts, tiny_pair.tokenizer, NEW_TOKENS, tiny_pair.max_length)
    engine = Engine(tiny_pair)
    first, assisted, *_, lookup = peers_of(tiny_pair, "transformers")
    peers = [first, assisted, lookup]
    for peer in peers:
        peer.open()
    contestants = [
        EngineContestant(engine, AUTOREGRESSIVE, "specdec"),
        EngineContestant(engine, CHAIN, "specdec"),
        *(PeerContestant(peer, "transformers", not n) for n, peer in enumerate(peers)),
    ]
    samplings = [Sampling(temperature=temperature) for temperature in (0.0, 1.0)]
    rows = race(contestants, asked, NEW_TOKENS, samplings, 2)
    for peer in peers:
        peer.close()
    return BenchResult(
        name="tiny",
        started=datetime(2026, 1, 2, tzinfo=UTC),
        command="specdec bench offline",
        pair=tiny_pair.spec,
        prompts=PromptSet(source="prompts.jsonl", count=3, digest="0" * 64),
        ids=[prompt.id for prompt in bench_prompts],
        categories=list(CATEGORIES),
        max_new_tokens=NEW_TOKENS,
        repeats=2,
        rows=rows,
    )
