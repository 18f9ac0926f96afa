from pathlib import Path

import pytest

from jobs.profile import main
from specdec_core.base.errors import UserError
from specdec_core.cost import Profile
from tests.commands import QUICK, UNTRIED, assert_refused, assert_shown, plan_file, printed

PLACEMENTS = Path(__file__).parents[2] / "cluster"


@pytest.mark.parametrize("placement", [None, "local-shards-2"])
def test_a_pairs_profile_is_shown_and_saved(
    command, ray_running, tiny_pair_folders, tmp_path, placement
):
    done = command(
        *(main, tmp_path),
        *("--target", str(tiny_pair_folders["target"])),
        *("--draft", f"noisy={tiny_pair_folders['draft']}"),
        *("--widths", "1,2,4", "--contexts", "16,32", "--batches", "1", "--repeats", "2"),
        *(["--cluster", PLACEMENTS / f"{placement}.yaml"] if placement else []),
    )
    assert_shown(done, "target", "noisy", "÷ target", "R²", "the engine adds", "profiles/")
    (path,) = tmp_path.glob("profiles/*.json")
    # What a forward costs on other devices is not taken for what it costs here.
    assert (f"-on-{placement}-" in path.name) == (placement is not None)
    saved = Profile.load(path)
    assert {m.width for m in saved.target.measurements} == {1, 2, 4}
    assert list(saved.drafts) == ["noisy"]


def test_sweep_file_gives_pair_and_sizes(command, tiny_pair_folders, tmp_path):
    target, draft = (str(tiny_pair_folders[name]) for name in ("target", "draft"))
    pair = {"target": target, "drafts": {"d": draft}}
    search = [{"drafter": {"kind": "draft_model"}}]
    config = plan_file(tmp_path, **QUICK, pair=pair, search=search)
    out = tmp_path / "deep" / "p.json"
    printed(command(main, tmp_path, "--config", config, "--out", out))
    assert [m.width for m in Profile.load(out).drafts["d"].measurements] == [1, 3]


@pytest.mark.parametrize("drafter", UNTRIED)
def test_a_sweep_file_gives_its_pair_whatever_it_searches(command, tmp_path, monkeypatch, drafter):
    def load(spec, *_):
        raise UserError(f"loads {spec.target} and {spec.drafts}")

    monkeypatch.setattr("cluster.placed_engine.loaded_pair", load)
    config = plan_file(tmp_path, search=[{"drafter": drafter}])
    arguments = ["--config", config, "--target", "x", "--draft", "mine=y"]
    assert_refused(command(main, tmp_path, *arguments), "error: loads x and {'mine': 'y'}\n")
