"""`specdec generate` prints the engine's text and its counts."""

import shutil
import sys

import pytest
import yaml

from jobs import generate
from jobs.console import run
from specdec_core.engine import Engine, Request


@pytest.fixture
def config(tiny_spec, tmp_path):
    path = tmp_path / "pair.yaml"
    content = {
        "pair": tiny_spec.model_dump(mode="json"),
        "configuration": {"drafter": {"kind": "draft_model"}},
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def command(config, monkeypatch, capsys):
    """Run the command; returns its exit code, standard output and standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        line = ["generate", *map(str, arguments), "--config", str(config)]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as exit:
            run(generate.main)
        return exit.value.code, *capsys.readouterr()

    return call


def count(output: str, name: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(name)).split()[-1]


def test_prints_the_text_and_the_counts(command, tiny_pair):
    code, output, _ = command("def main(", "--max-new-tokens", 30)
    engine = Engine(tiny_pair)
    (expected,) = engine.generate([Request("", engine.encode("def main("), 30)])
    shown = "".join(c for c in expected.text if c.isprintable())
    assert code == 0
    assert f"def main({shown}" in "".join(c for c in output if c.isprintable())
    assert ", K=5" in output
    assert count(output, "tokens ") == "30"
    assert int(count(output, "accepted")) > 0
    assert float(count(output, "MAT")) == pytest.approx(30 / int(count(output, "rounds")), abs=0.01)


def test_options_reach_the_engine(command):
    first = command("def main(", "--temperature", 1, "--seed", 5, "--max-new-tokens", 20)[1]
    again = command("def main(", "--temperature", 1, "--seed", 5, "--max-new-tokens", 20)[1]
    other = command("def main(", "--temperature", 1, "--seed", 6, "--max-new-tokens", 20)[1]
    assert "(T=1)" in first
    assert first.split("tokens/s")[0] == again.split("tokens/s")[0]
    assert first.split("■")[0] != other.split("■")[0]


@pytest.fixture
def alone(monkeypatch, capsys):
    """Run the command without a configuration, on a target without drafts."""

    def call(target, *arguments: object) -> tuple[int, str, str]:
        options = ["--target", target, "--max-new-tokens", 12]
        monkeypatch.setattr(sys, "argv", ["generate", *map(str, [*arguments, *options])])
        with pytest.raises(SystemExit) as exit:
            run(generate.main)
        return exit.value.code, *capsys.readouterr()

    return call


def test_a_target_alone_answers_a_message_by_its_chat_template(alone, tiny_pair_folders, tmp_path):
    target = tmp_path / "chat"
    shutil.copytree(tiny_pair_folders["target"], target)
    code, output, error = alone(target, "Why?", "--chat")
    assert (code, output) == (2, "")
    assert f"the tokenizer of {target} has no chat template" in " ".join(error.split())
    template = "{% for m in messages %}def {{ m['content'] }}:{% endfor %}"
    (target / "chat_template.jinja").write_text(template)
    code, output, _ = alone(target, "Why?", "--chat")
    assert code == 0
    assert "suffix" in output
    answer, text = (output.split("■")[0], alone(target, "def Why?:")[1].split("■")[0])
    assert answer.split("Why?\n\n")[1] == text.split("def Why?:")[1]


def test_a_pair_comes_from_the_options_or_from_a_file(command, tiny_pair_folders):
    code, _, error = command("x", "--target", tiny_pair_folders["target"])
    assert (code, error.count("\n")) == (2, 1)
    assert "leave out --target" in error


def test_bad_prompts_are_one_line(command):
    assert command("") == (2, "", "error: the prompt is empty\n")
    code, output, error = command("x", "--max-new-tokens", 1000)
    assert (code, output, error.count("\n")) == (2, "", 1)
    assert "256" in error
    code, output, error = command("x", "--max-new-tokens", 30, "--max-length", 24)
    assert (code, output, error.count("\n")) == (2, "", 1)
    assert "24" in error


def test_models_may_be_on_devices_of_a_cluster(
    config, command, ray_running, tiny_pair, monkeypatch, tmp_path
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    content = yaml.safe_load(config.read_text())
    content["configuration"] = {"drafter": {"kind": "pearl"}}
    config.write_text(yaml.safe_dump(content))
    placement = tmp_path / "placement.yaml"

    placement.write_text("draft: {devices: 0}")
    code, _, error = command("def main(", "--cluster", placement)
    assert (code, error.count("\n")) == (2, 1)
    assert "a placement that has one for the draft" in error

    placement.write_text("draft: {devices: 1}")
    code, output, _ = command("def main(", "--max-new-tokens", 200, "--cluster", placement)
    engine = Engine(tiny_pair)
    (expected,) = engine.generate([Request("", engine.encode("def main("), 200)])
    shown = "".join(c for c in expected.text if c.isprintable())
    assert code == 0
    assert f"def main({shown}" in "".join(c for c in output if c.isprintable())
