"""`specdec train` trains drafts, EAGLE heads and decision heads once."""

import re
import shutil

import pytest

from jobs import train_draft, train_eagle, train_head
from specdec_core.drafting.heads.storage import load_card
from specdec_core.models.pair import load_pair
from specdec_core.models.reduced_draft.model import ReducedDraft
from specdec_core.prompts.prompt_sets import BUNDLED
from specdec_core.recordings.find import finish
from specdec_core.recordings.schema import Recording, save_header
from specdec_core.training.eagle.training import EagleTrainingCard
from specdec_core.training.reduced_draft.training import DraftTrainingCard
from tests.commands import ROOT, assert_refused, assert_shown, printed, ran
from tests.registered import runs_in
from tests.specdec_core.training.conftest import recorded_answers
from tests.specdec_core.training.heads.test_examples import PROMPTS, record

SMALL = ("draft_vocab_size=100", "batch_tokens=100", "epochs=2")
DRAFT = ("width=16", "layers=1", "inner=16", "heads=2", "key_value_heads=1")


def trained_twice(command, main, home, pair, settings, *more):
    """What the first of two runs on the same recordings printed, and the data of its MLflow run."""
    found = recorded_answers(pair, home / "traces", prompts=60, new_tokens=12)
    arguments = [*more, *(part for each in (*SMALL, *settings) for part in ("--set", each))]
    for recording, name in zip(found.recordings, ("greedy", "sampled"), strict=True):
        recording.folder.rename(home / "traces" / name)
        arguments += ["--recording", name]
    first, second = (
        printed(command(main, home, *arguments, "--out", home / "out")) for _ in range(2)
    )
    assert "resuming: 100 of 100 done" in second
    assert not any((home / "out" / ".training").iterdir()), "checkpoints of what is finished"
    client, (training,), _ = runs_in(home)
    assert training.info.status == "FINISHED"
    return first, training.data, [a.path for a in client.list_artifacts(training.info.run_id)]


@pytest.mark.long
def test_a_draft_is_trained_and_not_trained_again(command, tiny_pair, tiny_spec, home):
    said, data, files = trained_twice(command, train_draft.main, home, tiny_pair, DRAFT)
    assert "Σ min(p, q)" in said
    folder = home / "out" / "draft"
    card = DraftTrainingCard.load(folder)
    assert card.best in card.curve
    pair = load_pair(tiny_spec.model_copy(update={"drafts": {"d": str(folder)}}))
    assert isinstance(pair.drafts["d"], ReducedDraft)
    assert data.metrics["kept_agreement"] == card.best.agreement
    assert files == ["draft"]


@pytest.mark.long
def test_a_head_is_trained_and_not_trained_again(command, tiny_pair, home):
    asked = ["steps=2"], "--layers", "0,1"
    said, data, files = trained_twice(command, train_eagle.main, home, tiny_pair, *asked)
    assert "tokens a round" in said
    card = EagleTrainingCard.load(home / "out" / "head")
    assert card.best in card.curve
    assert 50 < sum(card.texts.values()) <= 60  # an answer may be empty
    assert "kept_acceptance_greedy_2" in data.metrics
    assert files == ["head"]

    start = str(home / "out" / "head")
    asked = ("--recording", "greedy", "--from", start, "--set", "steps=2", "--set", "epochs=1")
    printed(command(train_eagle.main, home, *asked, "--out", home / "further"))
    further = EagleTrainingCard.load(home / "further" / "head")
    assert further.settings.start == start
    assert further.head == card.head  # the layers that it reads, too


@pytest.mark.parametrize(
    ("main", "asked", "complaint"),
    [
        (train_draft.main, ("bundled:draft-small",), "no draft with a reduced vocabulary"),
        (
            train_draft.main,
            ("bundled:smollm2-eagle",),
            "an EAGLE head, which `specdec train eagle`",
        ),
        (train_draft.main, ("bundled:smollm2-draft",), "was trained for another target"),
        (train_eagle.main, ("bundled:smollm2-eagle",), "was trained for another target"),
        (train_eagle.main, ("none",), "none: "),
        (train_eagle.main, ("none", "--layers", "0,1"), "--layers: none has its own"),
        (train_eagle.main, ("none", "--set", "draft_vocab_size=9"), "draft_vocab_size: none has"),
    ],
)
def test_what_cannot_be_trained_further_is_refused_before_features_are_recorded(
    command, recordings_home, main, asked, complaint
):
    refused = command(main, recordings_home, "--recording", "numbers", "--from", *asked)
    assert_refused(refused, complaint)
    assert not list(recordings_home.rglob("features"))


@pytest.mark.parametrize("kind", ["head", "draft"])
def test_a_folder_with_something_else_is_not_replaced(command, recordings_home, tmp_path, kind):
    """As a draft that was downloaded to models/draft."""
    (tmp_path / kind).mkdir()
    main = {"head": train_eagle.main, "draft": train_draft.main}[kind]
    refused = command(main, recordings_home, "--recording", "numbers", "--out", tmp_path)
    assert_refused(refused, "holds something else than a trained model; name another --out")
    assert not list(tmp_path.rglob("features"))


@pytest.fixture(scope="module")
def recordings_home(empty_store, tiny_pair, tmp_path_factory):
    """A workspace with a recording named `numbers`."""
    recordings_home = tmp_path_factory.mktemp("home")
    shutil.copy(empty_store, recordings_home / "mlflow.db")
    facts = {"fingerprints": tiny_pair.fingerprints}
    folder = recordings_home / "traces" / "numbers"
    record(tiny_pair, folder, range(len(PROMPTS)), **facts)
    finish(folder)
    return recordings_home


def test_heads_are_trained_once(command, ray_running, recordings_home):
    arguments = [
        *("--recording", "numbers", "--learning-rate", "1e-3"),
        *("--depths", "0,1", "--w-rej", "6", "--kinds", "specdecpp,t2", "--set", "epochs=2"),
    ]
    first, second = (command(train_head.main, recordings_home, *arguments) for _ in range(2))
    names = ["draft-specdecpp-d0-w6", "draft-specdecpp-d1-w6", "draft-t2"]
    assert_shown(first, *names, "eval/KL", "test/KL", "AUC")
    for name in names:
        assert load_card(recordings_home / "heads" / name).settings.epochs == 2
    assert_shown(second, "resuming: 3 of 3 done")


def test_unless_it_is_named_no_head_is_trained_for_an_eagle_head(
    command, ray_running, recordings_home, tmp_path
):
    folder = shutil.copytree(recordings_home / "traces" / "numbers", tmp_path / "recording")
    header = Recording.open(folder).header
    pair = header.pair.model_copy(update={"drafts": {**header.pair.drafts, "eagle": "eagle"}})
    prints = {**header.fingerprints, "eagle": "0"}
    changed = {"pair": pair, "fingerprints": prints, "eagle_heads": ("eagle",)}
    save_header(header.model_copy(update=changed), folder)
    asked = ("--recording", folder, "--kinds", "t2", "--learning-rate", "1e-3", "--set", "epochs=2")
    done = command(train_head.main, recordings_home, *asked, "--out", tmp_path / "heads")
    assert_shown(done, "heads of draft", "draft-t2")
    assert "heads of eagle" not in done.stdout


def test_what_make_trains_on_a_gpu_is_installed_or_comes_along():
    make = ("make", "--file", ROOT / "Makefile", "--dry-run", "gpu-train", "GPU_PYTHON=python")
    shown = ran(*make)
    assert shown.index("python -m jobs.fetch smollm2") < shown.index("python -m jobs.record")
    assert re.search(r"--prompts (\S+)", shown)[1] in BUNDLED
    assert "jobs.fetch" not in ran(*make, "TARGET=org/large")


def test_the_grid_is_every_depth_with_every_weight_and_the_other_kinds_once():
    specs = train_head.grid("specdecpp,t1,joint", (0, 3), (1.0, 12.0), width=32)
    assert [spec.label for spec in specs] == [
        *("specdecpp-d0-w1", "specdecpp-d3-w1", "specdecpp-d0-w12", "specdecpp-d3-w12"),
        *("t1", "joint"),
    ]
    assert specs[-1].width == 32
