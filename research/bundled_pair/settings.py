"""What the bundled pair's recipe depends on."""

from pydantic import Field

from specdec_core.config import Value


class Shape(Value):
    """Shape of a Llama with tied embeddings."""

    width: int
    layers: int
    inner: int
    heads: int


class Settings(Value):
    """Everything the recipe depends on, besides the interpreter's own source."""

    seed: int = 0
    threads: int = 2
    modules: int | None = None
    vocabulary: int = 4096
    context: int = 2048

    target: Shape = Shape(width=384, layers=8, inner=1024, heads=6)
    drafts: dict[str, Shape] = Field(
        default={
            "draft-medium": Shape(width=256, layers=2, inner=704, heads=4),
            "draft-small": Shape(width=128, layers=1, inner=384, heads=2),
        }
    )

    rows: int = 24
    row_tokens: int = 320
    target_tokens: int = 9_000_000
    target_minutes: float = 40.0
    matrix_rate: float = 0.02
    other_rate: float = 4e-3

    sharpness: float = 2.0
    own_text_tokens: int = 790_000
    corpus_text_tokens: int = 1_400_000
    text_rows: int = 96
    text_row_tokens: int = 320
    text_greedy: float = 0.6
    text_kept: int = 16

    distil_tokens: int = 12_000_000
    distil_minutes: float = 30.0
    distil_rows: int = 12
    distil_own_text: float = 0.6
    distil_matrix_rate: float = 0.02
    distil_other_rate: float = 4e-3
    argmax_weight: float = 0.5

    held_out_prompts: int = 128
    seen_prompts: int = 64
    new_tokens: int = 128
    checkpoint_seconds: float = 180.0


SMOKE = Settings(
    threads=1,  # models this small lose by waiting for a second one
    modules=12,
    vocabulary=512,
    context=512,
    target=Shape(width=32, layers=2, inner=64, heads=2),
    drafts={
        "draft-medium": Shape(width=16, layers=2, inner=32, heads=2),
        "draft-small": Shape(width=16, layers=1, inner=32, heads=2),
    },
    rows=4,
    row_tokens=64,
    target_tokens=64 * 4 * 10,
    own_text_tokens=512,
    corpus_text_tokens=512,
    text_rows=4,
    text_row_tokens=64,
    distil_tokens=64 * 4 * 10,
    distil_rows=4,
    held_out_prompts=6,
    seen_prompts=4,
    new_tokens=16,
    checkpoint_seconds=0.5,
)
"""The whole recipe in seconds: what it makes is of no use but to show that every phase runs."""
