import json

import mlflow
import pytest
import torch
from transformers import AutoModelForCausalLM

from research.bundled_pair import __main__ as job
from research.bundled_pair.corpus_rows import Rows, train_tokenizer
from research.bundled_pair.optimisation import build
from research.bundled_pair.recipe import claim
from research.bundled_pair.settings import SMOKE
from research.bundled_pair.target import sharpen, train_target
from specdec_core.base.bundled import PAIR
from specdec_core.base.errors import UserError


def test_rows_are_the_same_whenever_asked():
    documents = [list(range(start, start + 50)) for start in range(0, 500, 50)]
    rows = Rows(documents, 16, seed=1)
    late = rows.batch(30, 4)
    assert torch.equal(Rows(documents, 16, seed=1).batch(30, 4), late)
    first_epoch = torch.cat([rows.batch(number, 1) for number in range(rows.per_epoch)])
    assert len(first_epoch.unique()) == rows.per_epoch * 16


class Killed(Exception):
    pass


def test_killed_training_resumes_to_the_same_weights(tmp_path):
    settings = SMOKE.model_copy(update={"checkpoint_seconds": 0.0})
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    broken.mkdir()

    def kill_half_way(phase, share, figures):
        if share > 0.5:
            raise Killed

    def quiet(phase, share, figures):
        pass

    tokenizer = train_tokenizer(settings, unbroken)
    train_target(settings, unbroken, tokenizer, quiet)
    with pytest.raises(Killed):
        train_target(settings, broken, tokenizer, kill_half_way)
    assert not (broken / "target.pt").exists()
    train_target(settings, broken, tokenizer, quiet)
    first, second = (
        torch.load(folder / "target.pt", weights_only=True)["model"]
        for folder in (unbroken, broken)
    )
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight)


def test_sharpening_scales_logits_and_keeps_greedy_output(tmp_path):
    settings = SMOKE
    torch.manual_seed(0)
    soft = build(settings.target, settings, end=0).bfloat16().float().eval()
    torch.save({"model": soft.state_dict()}, tmp_path / "target.pt")
    tokenizer = train_tokenizer(settings, tmp_path)
    sharp = sharpen(settings, tmp_path, tokenizer)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        before, after = soft(ids).logits, sharp(ids).logits
    torch.testing.assert_close(after, settings.sharpness * before, rtol=1e-2, atol=1e-3)
    assert torch.equal(after.argmax(-1), before.argmax(-1))


def test_smoke_job_trains_a_loadable_pair_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    work, out = tmp_path / "work", tmp_path / "out"
    threads = torch.get_num_threads()
    try:
        job.main(work=work, out=out, config=None, smoke=True)
        trained = (work / "draft-small.pt").stat().st_mtime_ns
        job.main(work=work, out=out, config=None, smoke=True)
        with pytest.raises(UserError, match=r"settings \(modules, vocabulary, .*; name another"):
            job.main(work=work, out=out, config=None, smoke=False)
    finally:
        torch.set_num_threads(threads)
    assert (work / "draft-small.pt").stat().st_mtime_ns == trained
    for name in PAIR:
        model = AutoModelForCausalLM.from_pretrained(out / "weights" / name)
        assert model.config.vocab_size == 512
    assert json.loads((out / "pair.json").read_text())["facts"]["models"]["draft-small"]["tokens"]
    runs = mlflow.search_runs(experiment_names=[job.EXPERIMENT])
    assert len(runs) == 2
    assert runs["metrics.draft-small.loss"].notna().any()
    assert runs["metrics.held_out.draft-medium.agreement"].notna().all()


def test_phases_of_another_recipe_are_not_gone_on_with(tmp_path):
    claim(SMOKE, tmp_path)
    claim(
        SMOKE.model_copy(update={"threads": 2, "checkpoint_seconds": 9, "new_tokens": 8}), tmp_path
    )
    with pytest.raises(UserError, match=r"json: begun with other settings \(sharpness\); name"):
        claim(SMOKE.model_copy(update={"sharpness": 3.0}), tmp_path)
    claim(SMOKE, tmp_path)
