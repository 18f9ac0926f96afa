"""`specdec train head` trains on a recording, judges thresholds, and refuses bad input."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jobs.train_head import grid, main
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Sampling
from specdec_core.drafting.heads.storage import load_card
from specdec_core.measure.forward_times import workspace_profile
from specdec_core.measure.profiling import profile_pair
from specdec_core.models.pair import Pair
from tests.commands import Command
from tests.specdec_core.training.heads.test_examples import PROMPTS, record


@pytest.fixture(scope="module")
def home(empty_store: Path, tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a profile, a recording named `numbers`, and others to judge heads on."""
    home = tmp_path_factory.mktemp("home")
    shutil.copy(empty_store, home / "mlflow.db")
    fingerprints = tiny_pair.fingerprints
    recordings: dict[str, tuple[int, dict]] = {
        "numbers": (len(PROMPTS), {}),
        "bare": (2, {"continuations": False}),
        "short": (5, {"max_draft": 4}),
        "other": (2, {"fingerprints": {**fingerprints, "target": "x"}}),
        "lost": (5, {}),
    }
    for name, (prompts, changes) in recordings.items():
        folder = home / "traces" / name
        record(tiny_pair, folder, range(prompts), **{"fingerprints": fingerprints, **changes})
    shutil.rmtree(home / "traces" / "lost" / "drafts")
    profile_pair(tiny_pair, widths=(1, 2, 4), contexts=(16, 32), repeats=2).save(
        home / workspace_profile(tiny_pair.spec).relative_to(workspace())
    )
    return home


def test_heads_are_trained_judged_and_not_trained_again(
    command: Command, ray_running: None, home: Path
) -> None:
    arguments = [
        *("--recording", "numbers", "--evaluate", "numbers", "--learning-rate", "1e-3"),
        *("--depths", "0,1", "--w-rej", "6", "--kinds", "specdecpp,t2", "--set", "epochs=2"),
    ]
    first, second = (command(main, home, *arguments) for _ in range(2))
    assert first.returncode == 0, first.stderr
    names = ["draft-specdecpp-d0-w6", "draft-specdecpp-d1-w6", "draft-t2"]
    for name in names:
        assert first.stdout.count(name) >= 2  # its fit, its best threshold
        assert load_card(home / "heads" / name).settings.epochs == 2
    for shown in ("eval/KL", "test/KL", "AUC", "fixed K", "confidence product", "over the product"):
        assert shown in first.stdout
    assert "resuming: 3 of 3 done" in second.stdout
    assert second.returncode == 0, second.stderr


@pytest.mark.long
def test_heads_are_judged_on_a_recording_of_rejection_sampling(
    command: Command, ray_running: None, home: Path, tiny_pair: Pair, tmp_path: Path
) -> None:
    fingerprints, sampling = tiny_pair.fingerprints, Sampling(temperature=1)
    sampled = {"fingerprints": fingerprints, "sampling": sampling}
    record(tiny_pair, home / "traces" / "sampled", range(len(PROMPTS)), **sampled)
    arguments = [
        *("--recording", "sampled", "--evaluate", "sampled", "--learning-rate", "1e-3"),
        *("--depths", "0", "--w-rej", "1", "--kinds", "specdecpp,t2", "--set", "epochs=1"),
        *("--out", tmp_path),
    ]
    done = command(main, home, *arguments)
    assert done.returncode == 0, done.stderr
    judged = done.stdout.partition("modelled speedup")[2]
    for name in ("fixed K", "SVIP", "draft-T1-specdecpp-d0-w1", "draft-T1-t2"):
        assert name in judged


def test_the_grid_is_every_depth_with_every_weight_and_the_other_kinds_once() -> None:
    specs = grid("specdecpp,t1,joint", (0, 3), (1.0, 12.0), width=32)
    assert [spec.label for spec in specs] == [
        *("specdecpp-d0-w1", "specdecpp-d3-w1", "specdecpp-d0-w12", "specdecpp-d3-w12"),
        *("t1", "joint"),
    ]
    assert specs[-1].width == 32


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"recording": ["nowhere"]}, "no such folder, and no recording of that name"),
        ({"draft": "huge"}, "no draft 'huge'"),
        ({"kinds": "specdecpp,t9"}, "kind: .*t9"),
        ({"depths": "1,deep"}, "--depths 1,deep: expected numbers"),
        ({"w_rej": "0"}, "w_rej: .*greater than 0"),
        ({"evaluate": "bare"}, "bare: cannot be replayed; that takes continuations"),
        ({"evaluate": "short"}, "short: .* at most 4 were recorded"),
        ({"evaluate": "other"}, "other and .*numbers: other target weights"),
        ({"evaluate": "lost"}, "missing from the recording; record it again"),
    ],
)
def test_bad_input_gets_one_line_before_anything_is_trained(
    options: dict, complaint: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(home))
    before = set((home / "heads").glob("*"))
    with pytest.raises(UserError, match=complaint) as error:
        main(**{"recording": ["numbers"], **options})
    assert "\n" not in str(error.value)
    assert set((home / "heads").glob("*")) == before
