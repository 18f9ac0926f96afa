"""What is kept of the code that measured."""

import subprocess

from specdec_core.base import environment


def test_changed_code_is_told_and_prompts_beside_it_are_no_change(tmp_path, monkeypatch):
    source = tmp_path / "code.py"
    source.write_text("x = 1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init"], ["add", "code.py"], [*who, "commit", "--message", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    # A copy that is installed inside the repository is no part of it.
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "installed.py"))
    assert "git_commit" not in environment.environment()
    monkeypatch.setattr(environment, "__file__", str(source))
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    assert len(environment.environment()["git_commit"]) == 40
    source.write_text("x = 2\n")
    assert environment.environment()["git_commit"].endswith("-dirty")
