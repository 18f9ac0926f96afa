"""The shards of a recording."""

import pytest

from specdec_core.prompts.source import PromptSource
from specdec_core.recordings.plan import SHARD, RecordingPlan, planned
from tests.commands import prompts_file


@pytest.fixture
def sizes(tiny_spec, tmp_path):
    """The sizes of the shards of so many prompts, for a plan with these changes."""

    def found(count, drafts, **changes):
        path = prompts_file(tmp_path, [f"def f{n}(x):" for n in range(count)])
        pair = tiny_spec if drafts else tiny_spec.model_copy(update={"drafts": {}})
        plan = RecordingPlan(pair=pair, prompts=PromptSource(source=str(path)), **changes)
        recording = planned(plan, tmp_path, lambda _: {"target": "0"})
        assert sum(map(len, recording.batches.values())) == count
        return [len(batch) for batch in recording.batches.values()]

    return found


def test_answers_alone_are_recorded_many_at_once_and_by_several_processes(sizes):
    assert sizes(100, drafts=False) == [SHARD] * 12 + [4]
    assert sizes(320, drafts=False) == [20] * 16
    assert sizes(1100, drafts=False) == [64] * 17 + [12]


def test_with_drafts_or_a_server_a_killed_recording_loses_few_prompts(sizes):
    assert set(sizes(1096, drafts=True)) == {SHARD}
    assert set(sizes(1096, drafts=False, served="model")) == {SHARD}
