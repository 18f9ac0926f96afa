"""`specdec lab long-form` shows, writes and logs speed, accepted tokens and entropy by context."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from research.long_form import __main__ as long_form
from tests.commands import Command, assert_refused, prompts_file
from tests.registered import runs_in

ROWS = """
rows:
  - drafter: {kind: draft_model, policy: {kind: fixed, max_tokens: [2, 4]}}
"""


def test_long_texts_are_shown_written_and_logged_by_context(
    command: Command, tiny_pair_folders: dict[str, Path], home: Path
) -> None:
    rows = home / "rows.yaml"
    prompts = prompts_file(home, (f"x{i} = {i} +" for i in range(2)), "sums")
    rows.write_text(ROWS)
    done = command(
        long_form.main,
        home,
        *("--target", tiny_pair_folders["target"], "--draft", f"d={tiny_pair_folders['draft']}"),
        *("--rows", rows, "--prompts", prompts, "--contexts", "24,48", "--name", "sums"),
        *("--max-length", "64", "--dtype", "float32"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in ("up to 24 tokens:", "K=4", "Entropy by context", "2 prompts", "rest, ms"):
        assert shown in done.stdout
    folder = home / "long-form" / "sums"
    along = pd.read_csv(folder / "along.csv")
    assert list(dict.fromkeys(along["up_to"])) == [24, 48]
    assert len(along) == 2 * 3
    assert set(pd.read_csv(folder / "entropy.csv")["model"]) == {"target", "d"}
    assert (folder / "long-form.html").exists()
    assert {"context", "generated"} <= set(pd.read_parquet(folder / "rounds.parquet"))

    client, [run] = runs_in(home)
    [mat] = [name for name in run.data.metrics if "K_4" in name and name.endswith(".mat")]
    assert [m.step for m in client.get_metric_history(run.info.run_id, mat)] == [24, 48]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--contexts", "0"), "expected positive numbers"),
        (("--contexts", "100000"), "is more than the"),
    ],
)
def test_what_is_wrong_is_one_line(
    command: Command, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    done = command(long_form.main, tmp_path, *options)
    assert_refused(done, message)
