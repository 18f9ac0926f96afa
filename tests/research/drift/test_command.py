"""`specdec lab drift` shows, writes and logs what target-initialised trees change."""

import pandas as pd

from research.drift import __main__ as drift
from tests.commands import assert_shown, prompts_file
from tests.registered import runs_in


def test_drift_is_shown_written_and_logged_by_width(command, tiny_pair_folders, home):
    prompts = prompts_file(home, (f"x{i} = {i} +" for i in range(3)), "sums")
    done = command(
        drift.main,
        home,
        *("--target", tiny_pair_folders["target"], "--draft", f"d={tiny_pair_folders['draft']}"),
        *("--prompts", prompts, "--texts", "2", "--max-new-tokens", "8", "--widths", "1,3"),
        *("--branching", "2,1"),
    )
    assert_shown(done, "likelihood", "lossy", "3 prompts", "MAT")
    folder = home / "drift" / "target_tree"
    texts = pd.read_csv(folder / "drift.csv")
    assert set(zip(texts["draft"], texts["width"], strict=True)) == {
        ("autoregressive", 0), ("d", 1), ("d", 3),
    }  # fmt: skip
    assert list(texts["lossless"]) == [True, True, False]
    assert texts["log_likelihood"].between(-10, 0).all()
    assert "| d | 3 | lossy |" in (folder / "drift.md").read_text()

    client, [run], _ = runs_in(home)
    assert run.data.tags["lossless"] == "false"
    assert {"text.d.width_3.change", "text.autoregressive.log_likelihood"} <= set(run.data.metrics)
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"drift.csv", "drift.md", "drift.html"}
