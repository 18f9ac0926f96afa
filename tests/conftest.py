"""Small real models made by configuration, shared by all tests."""

import asyncio
import inspect
import os
import shutil
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from specdec_core.config import PairSpec, RunnerSettings, Sampling
from specdec_core.drafting.heads.card import HeadCard, HeadKind
from specdec_core.drafting.heads.modules import build_head
from specdec_core.drafting.heads.storage import save_head
from specdec_core.models.pair import Pair, load_pair
from tests.bench_race import bench_prompts, bench_result  # noqa: F401 (fixtures)
from tests.commands import command  # noqa: F401 (a fixture)
from tests.full_disk import small_disk  # noqa: F401 (a fixture)
from tests.registered import bare_home, empty_store, home, swept  # noqa: F401 (fixtures)

# A shell's background jobs ignore Ctrl-C, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# xdist's processes have these from readline, and a console keeps the width that it is made with.
# Tests have stores and environments of their own.
for name in ("COLUMNS", "LINES", "MLFLOW_TRACKING_URI", "SPECDEC_VLLM"):
    os.environ.pop(name, None)

torch.set_num_threads(1)  # the models are tiny; threads would only wait for each other

# How long an example takes says how busy the machine is, and no more.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

TESTS = Path(__file__).parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where processes share the tests (`-n 2`), one runs every file that needs Ray, one all of the
    dashboards, and each other file stays whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _together(nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # Ray's files come early and take longest
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that at the end no process waits for another. A test that is a
    coroutine runs in an event loop of its own, for five minutes at most, or half an hour."""
    items.sort(key=lambda item: item.path.name != "test_lossless.py")
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _completed(item.obj, 1800 if item.get_closest_marker("long") else 300)


def _completed(test: Callable[..., Coroutine[Any, Any, None]], seconds: float) -> Any:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), seconds))

    return run


@cache
def _together(file: str) -> str:
    """The name of the group of files that one process runs."""
    if "ray_running" in (TESTS.parent / file).read_text():
        return "ray"
    return "dashboards" if file.startswith("tests/dashboards/") else file


# What a tokenizer learns from some Python: pairs to join, in this order (Ġ: space, Ċ: line break).
# Written down, because margins of tests depend on how their texts are cut into tokens.
MERGES = """
Ġ Ġ, e r, ĠĠ ĠĠ, ĠĠ Ġ, e n, Ġ t, i n, o r, r a, r e, a t, i z, k en, o ken, Ċ ĠĠĠ, Ċ ĠĠĠĠ, er s,
a l, oken iz, e t, ĊĠĠĠĠ ĠĠĠ, okeniz er, d e, p e, a i, o n, s t, " ", in y, ai r, f t, m a, Ġ
s, l a, d ra, e d, f i, m p, Ġ =, Ġ P, dra ft, a r, r o, s e, ( ), d ers, g et, t e, Ġ in, ra
in, pe c, ar get, i d, p air, Ġt iny, a d, c t, h e, i on, i mp, l ders, o lders, t u
"""


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges."""
    merges = [tuple(pair.split()) for pair in MERGES.split(",")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|endoftext|>", *alphabet, *map("".join, merges)]
    vocabulary = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>"
    )


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_tokenizer(template: Any = CHAT_TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    """The same with a chat template, and with a token that begins every text."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = begin = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template
    return tokenizer


def save_random_head(
    pair: Pair, kind: HeadKind, folder: Path, seed: int = 0, draft: str = "draft", **more: Any
) -> None:
    """A head with random weights for a draft of the pair, and with `more` on its card."""
    hidden, own = pair.drafts[draft].config.hidden_size, pair.fingerprints
    card = HeadCard(**{
        "kind": kind, "draft": draft, "depth": 1, "width": 8, "hidden_size": hidden, "top_k": 10,
        "w_acc": 1, "w_rej": 1, "sampling": Sampling(),
        "pair": {"target": own["target"], "draft": own[draft]}, **more,
    })  # fmt: skip
    torch.manual_seed(seed)
    save_head(build_head(kind, hidden, 10, depth=card.depth, width=8), card, folder)


# Of models of any family.
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def tiny_llama(seed: int, hidden: int, layers: int, vocab: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generated(model: Any, prompt: Sequence[int], new_tokens: int, **options: Any) -> list[int]:
    """The tokens that transformers writes after this prompt, greedily."""
    ids = torch.tensor([prompt])
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
    return model.generate(ids, max_new_tokens=new_tokens, **options)[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def ray_running() -> Iterator[None]:
    """One local Ray for all tests that run it in this process: a start and its end take longer
    than most of them."""
    from cluster.session import ray_session  # it takes seconds to import

    with ray_session():
        yield


@pytest.fixture(scope="session")
def tiny_pair_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders `target` and `draft` of two small Llamas that share a tokenizer. The draft is the
    target with some noise, so that some of its candidates are accepted."""
    root = tmp_path_factory.mktemp("tiny-pair")
    tokenizer = tiny_tokenizer()
    target = tiny_llama(0, hidden=32, layers=2, vocab=len(tokenizer))
    draft = tiny_llama(0, hidden=32, layers=2, vocab=len(tokenizer))
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.12 * parameter.std(correction=0) * noise
    folders = {"target": root / "target", "draft": root / "draft"}
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def longrope_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Phi-3 whose positions change, all at once, in a text of more than 64 tokens."""
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = transformers.Phi3Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        max_position_embeddings=256, original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
        pad_token_id=0, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("longrope")
    transformers.Phi3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_spec(tiny_pair_folders: dict[str, Path]) -> PairSpec:
    """The specification of the tiny pair, in float32."""
    return PairSpec(
        target=str(tiny_pair_folders["target"]),
        drafts={"draft": str(tiny_pair_folders["draft"])},
        runner=RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=256),
    )


@pytest.fixture(scope="session")
def tiny_pair(tiny_spec: PairSpec) -> Pair:
    return load_pair(tiny_spec)


@pytest.fixture(scope="session")
def chat_spec(
    tiny_spec: PairSpec,
    tiny_pair_folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> PairSpec:
    """The specification of the tiny pair with a chat template."""
    root = tmp_path_factory.mktemp("chat-pair")
    for name, folder in tiny_pair_folders.items():
        shutil.copytree(folder, root / name)
        chat_tokenizer().save_pretrained(root / name)
    models = {"target": str(root / "target"), "drafts": {"draft": str(root / "draft")}}
    return tiny_spec.model_copy(update=models)


@pytest.fixture(scope="session")
def chat_pair(chat_spec: PairSpec) -> Pair:
    return load_pair(chat_spec)
