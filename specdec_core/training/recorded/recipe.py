"""How a model was trained, in words: a part of the README that it is shipped with."""

from __future__ import annotations

from specdec_core.config.wording import count
from specdec_core.training.recorded.finished import CARD, TrainingCard

_RESTARTED = (
    "- *Restarts*: the last part of it began with the best weights of what was before, its rate"
    " warmed up again."
)


def recipe(card: TrainingCard, loss: str) -> list[str]:
    """The recipe of a card as Markdown, by lines; the `loss` is a sentence."""
    settings = card.settings
    return [
        "## Recipe",
        f"- *Texts*: the target's own answers to {card.texts['train']:,} prompts.",
        f"- *Loss*: {loss}",
        f"- *Optimizer*: AdamW, rate {settings.learning_rate:g}, {settings.batch_tokens} tokens of"
        f" answers a batch, seed {settings.seed}; {card.tokens:,} tokens in"
        f" {card.seconds / 60:.0f} minutes.",
        *([_RESTARTED] if settings.after else []),
        f"- *Kept*: the best of {count(len(card.curve), 'evaluation')}, after {card.best.tokens:,}"
        f" tokens. `{CARD}` has all of them.",
    ]
