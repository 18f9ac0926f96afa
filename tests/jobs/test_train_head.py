"""`specdec train head` trains on a recording, and refuses bad input."""

import shutil

import pytest

from jobs.train_head import grid, main
from specdec_core.base.errors import UserError
from specdec_core.drafting.heads.storage import load_card
from tests.specdec_core.training.heads.test_examples import PROMPTS, record


@pytest.fixture(scope="module")
def home(empty_store, tiny_pair, tmp_path_factory):
    """A workspace with a recording named `numbers`, and one of another target."""
    home = tmp_path_factory.mktemp("home")
    shutil.copy(empty_store, home / "mlflow.db")
    fingerprints = tiny_pair.fingerprints
    recordings: dict[str, tuple[int, dict]] = {
        "numbers": (len(PROMPTS), {}),
        "other": (2, {"fingerprints": {**fingerprints, "target": "x"}}),
    }
    for name, (prompts, changes) in recordings.items():
        folder = home / "traces" / name
        record(tiny_pair, folder, range(prompts), **{"fingerprints": fingerprints, **changes})
    return home


def test_heads_are_trained_once(command, ray_running, home):
    arguments = [
        *("--recording", "numbers", "--learning-rate", "1e-3"),
        *("--depths", "0,1", "--w-rej", "6", "--kinds", "specdecpp,t2", "--set", "epochs=2"),
    ]
    first, second = (command(main, home, *arguments) for _ in range(2))
    assert first.returncode == 0, first.stderr
    names = ["draft-specdecpp-d0-w6", "draft-specdecpp-d1-w6", "draft-t2"]
    for name in names:
        assert name in first.stdout
        assert load_card(home / "heads" / name).settings.epochs == 2
    for shown in ("eval/KL", "test/KL", "AUC"):
        assert shown in first.stdout
    assert "resuming: 3 of 3 done" in second.stdout
    assert second.returncode == 0, second.stderr


def test_the_grid_is_every_depth_with_every_weight_and_the_other_kinds_once():
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
        ({"recording": ["numbers", "other"]}, "other and .*numbers: other target weights"),
    ],
)
def test_bad_input_gets_one_line_before_anything_is_trained(options, complaint, home, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(home))
    before = set((home / "heads").glob("*"))
    with pytest.raises(UserError, match=complaint) as error:
        main(**{"recording": ["numbers"], **options})
    assert "\n" not in str(error.value)
    assert set((home / "heads").glob("*")) == before
