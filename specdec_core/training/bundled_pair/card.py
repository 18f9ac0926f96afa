"""The model card of the bundled pair: its recipe, data, figures and limits, from one training."""

from pathlib import Path
from typing import Any

from specdec_core.training.bundled_pair.settings import Settings


def _alignment_table(alignment: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    lines = [
        "| draft | prompts | N | agreement | oracle N_target/N | AUC of confidence "
        "| AUC of entropy | mean confidence | mean entropy | KL |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for split, drafts in alignment.items():
        for name, a in drafts.items():
            lines.append(
                f"| {name} | {split} ({a['trajectories']}) | {a['positions']} "
                f"| {a['agreement']:.3f} | {a['oracle_verification_rate']:.3f} "
                f"| {a['confidence_auc']:.3f} | {a['entropy_auc']:.3f} "
                f"| {a['mean_confidence']:.3f} | {a['mean_entropy']:.2f} | {a['kl']:.3f} |"
            )
    return lines


def _model_table(facts: dict[str, Any], results: dict[str, Any]) -> list[str]:
    lines = [
        "| model | parameters | width x layers | held-out loss (nats a token) "
        "| forward of one token, ms, float32 | bfloat16 | of the target's, float32 | bfloat16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    full, half = results["forward_ms"]["float32"], results["forward_ms"]["bfloat16"]
    for name, model in facts["models"].items():
        lines.append(
            f"| {name} | {model['parameters'] / 1e6:.2f} M | {model['width']} x {model['layers']} "
            f"| {results['held_out_loss'][name]:.3f} | {full[name]:.2f} | {half[name]:.2f} "
            f"| {full[name] / full['target']:.3f} | {half[name] / half['target']:.3f} |"
        )
    return lines


def write_card(
    settings: Settings, facts: dict[str, Any], results: dict[str, Any], path: Path
) -> None:
    """Write the card to `path` (README.md of the weights).

    `facts` and `results` are what `recipe.train_pair` returns.
    """
    seen = facts["models"]["target"]["corpus_tokens"]
    text = [
        "# The bundled pair",
        "A target and two drafts, Llama architecture with tied embeddings and one byte-level BPE "
        f"vocabulary of {settings.vocabulary:,}, trained on the source of Python's standard "
        "library. They are here so that every command and test has a real pair to run on: they "
        "write Python-like text, not useful code.",
        "",
        *_figures(settings, facts, results),
        "## Data",
        f"The `.py` files of the running interpreter's standard library (CPython "
        f"{facts['python']}), without tests, encodings and tables. A module is held out when the "
        "first byte of the SHA-256 of its dotted name is a multiple of 10. Tokenizer and models "
        f"saw the other modules only: {seen:,} tokens. The prompts "
        "(`prompts.json`) are references into both parts, kept apart.",
        "",
        *_recipe(settings, facts["models"]),
        "## Limits",
        "The drafts are distilled for greedy decoding from prompts that are Python source; on "
        "other text agreement is lower. Compare figures between configurations on this pair, not "
        "with those of large models.",
        "",
    ]
    path.write_text("\n".join(text), encoding="utf-8")


def _figures(settings: Settings, facts: dict[str, Any], results: dict[str, Any]) -> list[str]:
    loss = results["held_out_loss"]
    return [
        "## Figures",
        *_model_table(facts, results),
        "",
        f"Held-out loss: {results['held_out_tokens']:,} tokens of held-out modules; the target's "
        f"before sharpening is {loss['target before sharpening']:.3f} (sharpening trades it for "
        "decisiveness, as post-training does). Forward times: median of one cached token at "
        "context 192 on, one thread, the models interleaved in runs of eight forwards, as a draft "
        "runs them.",
        "",
        f"Alignment with the target on its own greedy trajectories, {settings.new_tokens} new "
        "tokens after each bundled prompt, float32 with the shipped bfloat16 weights. The oracle "
        "rate is (disagreements + prompts) / N (SpecDec++, Thm 4.1); the AUCs rank the draft's "
        "disagreements by low confidence (top probability) and by high entropy.",
        "",
        *_alignment_table(results["alignment"]),
        "",
        f"Of the target's generated 4-grams {results['distinct']['held_out']:.0%} are distinct on "
        "held-out prompts: like any model of this size it falls into repetition, which is easy to "
        "draft. The rows of the first 32 tokens show the part before that.",
        "",
    ]


def _recipe(settings: Settings, models: dict[str, Any]) -> list[str]:
    target, drafts = models["target"], {name: models[name] for name in settings.drafts}
    taught = next(iter(drafts.values()))
    epochs = target["batches"] * settings.rows / target["rows_per_epoch"]
    tokens = ", ".join(
        f"{draft['tokens']:,} tokens in {draft['seconds'] / 60:.0f} minutes ({name})"
        for name, draft in drafts.items()
    )
    return [
        "## Recipe",
        f"1. *Target*: {target['tokens']:,} tokens ({epochs:.2f} epochs, final training "
        f"loss {target['training_loss']:.2f}), rows of {settings.row_tokens}, "
        f"{settings.rows} a batch, Muon (rate {settings.matrix_rate}) for the hidden matrices and "
        f"AdamW ({settings.other_rate}) for embeddings and norms, bfloat16 autocast, linear decay "
        f"to zero; {target['seconds'] / 60:.0f} minutes on {settings.threads} threads.",
        f"2. *Sharpening*: the final norm's weight times {settings.sharpness}, so that all logits "
        "grow by it. It leaves greedy output as it was.",
        f"3. *Own text*: {taught['own_text_tokens']:,} tokens in rows of "
        f"{settings.text_row_tokens}, half after definitions, half anywhere in seen modules; "
        f"{settings.text_greedy:.0%} greedy, the rest at temperature 1. With it and with "
        f"{taught['corpus_text_tokens']:,} tokens of seen modules the sharpened target's "
        f"{settings.text_kept} strongest tokens at each position are kept.",
        f"4. *Distillation* from them, {settings.distil_own_text:.0%} own text, several times "
        f"over: {tokens}; cross-entropy with (1 - {settings.argmax_weight}) p + "
        f"{settings.argmax_weight} onehot(argmax p); {settings.distil_rows} rows a batch, Muon "
        f"({settings.distil_matrix_rate}) and AdamW ({settings.distil_other_rate}).",
        f"5. Exported in bfloat16. Seed {settings.seed}.",
        "",
        "Schedules end at a token budget or a time budget, whichever comes first, so a faster "
        "machine sees more tokens; the figures above are of these weights. Reproduce:",
        "```",
        "python -m jobs.train_pair --work build/pair --out build/bundled",
        "```",
        "",
    ]
