"""Each pair has separate forward times, also where drafts of two pairs have the same name."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from research.bandits.comparison import ArmsPlan
from research.bandits.runs import replay_recording
from specdec_core.base import environment as module
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import parse
from specdec_core.cost import ForwardCost, Profile
from specdec_core.measure.forward_times import forward_times, workspace_profile
from specdec_core.models.fingerprints import fingerprints
from tests.specdec_core.recordings.test_record import record


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    return tmp_path


def profile_of(*drafts):
    costs = {name: ForwardCost.constant(0.25) for name in drafts}
    types = {"target_dtype": "float32", "draft_dtype": "float32"}
    return Profile(target=ForwardCost.constant(0.5), drafts=costs, device="known", **types)


def test_a_pairs_times_are_found_again_and_another_pairs_measured(home, tiny_spec):
    kept = profile_of(*tiny_spec.drafts)
    kept.save(workspace_profile(tiny_spec))
    assert forward_times(tiny_spec, [], None, None) == kept
    other = tiny_spec.model_copy(
        update={"drafts": dict.fromkeys(tiny_spec.drafts, tiny_spec.target)}
    )
    assert forward_times(other, [], None, None).device != "known"
    assert forward_times(tiny_spec, [], None, None) == kept
    assert len(list(home.glob("profiles/*.json"))) == 2


def test_times_of_a_recorded_pair_are_found_without_its_models(home, tiny_spec, tiny_pair):
    models = shutil.copytree(Path(tiny_spec.target).parent, home / "models")
    names = {"target": str(models / "target"), "drafts": {"draft": str(models / "draft")}}
    pair = tiny_spec.model_copy(update=names)
    prints, kept = fingerprints(pair), profile_of("draft")
    path = workspace_profile(pair, {**prints, "another": "0"})
    assert path == workspace_profile(pair)
    kept.save(path)
    recorded = replace(tiny_pair, spec=pair)
    recording = record(recorded, home / "recorded", 2, fingerprints=prints)
    shutil.rmtree(models)
    assert forward_times(pair, [], None, None, weights=prints) == kept
    with pytest.raises(UserError, match="no such folder"):
        forward_times(pair, [], None, None)
    content = {"arms": [{"kind": "prompt_lookup"}, {"kind": "suffix"}], "bandits": [{}]}
    plan = parse(ArmsPlan, content, "test").under(pair, recording.header.sampling)
    assert "known" in replay_recording(recording, plan, None, None, Observer())[1]


def test_how_a_pair_is_run_names_its_times_and_what_it_holds_does_not(home, tiny_spec):
    def run(**settings):
        runner = tiny_spec.runner.model_copy(update=settings)
        return workspace_profile(tiny_spec.model_copy(update={"runner": runner}))

    assert run(max_length=99) == run()
    assert len({run(), run(compile=True), run(threads=2), run(target_dtype="bfloat16")}) == 4


def test_times_of_another_kind_of_machine_are_not_this_ones(home, tiny_spec, monkeypatch):
    """Workspaces may be shared, and copied."""

    def on(**facts):
        monkeypatch.setattr(module, "environment", lambda: {"cpu": "A × 2", **facts})
        return workspace_profile(tiny_spec)

    assert on(git_commit="a") == on(git_commit="b", host="other")
    assert len({on(), on(cpu="B × 2"), on(gpu="G × 1"), on(torch="3")}) == 4


def test_a_file_that_lacks_a_draft_is_refused(home, tiny_spec):
    file = profile_of("other").save(home / "given.json")
    with pytest.raises(UserError, match="no forward time of draft"):
        forward_times(tiny_spec, [], None, file)
