"""`specdec generate` prints the engine's text and its counts."""

import shutil

import pytest

from jobs import generate
from specdec_core.engine import Engine, Request
from tests.commands import config_file


@pytest.fixture
def generated(command, tiny_spec, tmp_path):
    """Run the command with a chain of the tiny pair."""
    config = config_file(tmp_path, tiny_spec, {"kind": "draft_model"})
    return lambda *arguments: command(generate.main, tmp_path, *arguments, "--config", config)


def count(output, name):
    return next(line for line in output.splitlines() if line.startswith(name)).split()[-1]


def printable(text):
    return "".join(filter(str.isprintable, text))


def expected(pair, tokens):
    engine = Engine(pair)
    [generation] = engine.generate([Request("", engine.encode("def main("), tokens)])
    return f"def main({printable(generation.text)}"


def test_prints_the_text_and_the_counts(generated, tiny_pair):
    done = generated("def main(", "--max-new-tokens", 30)
    assert done.returncode == 0
    assert expected(tiny_pair, 30) in printable(done.stdout)
    assert ", K=5" in done.stdout
    assert count(done.stdout, "tokens ") == "30"
    assert int(count(done.stdout, "accepted")) > 0
    rounds = int(count(done.stdout, "rounds"))
    assert float(count(done.stdout, "MAT")) == pytest.approx(30 / rounds, abs=0.01)


def test_options_reach_the_engine(generated):
    options = ("def main(", "--temperature", 1, "--max-new-tokens", 20, "--seed")
    first, again, other = (generated(*options, seed).stdout for seed in (5, 5, 6))
    assert "(T=1)" in first
    assert first.split("tokens/s")[0] == again.split("tokens/s")[0]
    assert first.split("■")[0] != other.split("■")[0]


def test_a_target_alone_answers_a_message_by_its_chat_template(
    command, tiny_pair_folders, tmp_path
):
    target = tmp_path / "chat"
    shutil.copytree(tiny_pair_folders["target"], target)

    def alone(*arguments):
        options = ("--target", target, "--max-new-tokens", 12)
        return command(generate.main, tmp_path, *arguments, *options)

    done = alone("Why?", "--chat")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"the tokenizer of {target} has no chat template" in " ".join(done.stderr.split())
    template = "{% for m in messages %}def {{ m['content'] }}:{% endfor %}"
    (target / "chat_template.jinja").write_text(template)
    done = alone("Why?", "--chat")
    assert done.returncode == 0
    assert "suffix" in done.stdout
    answer, text = done.stdout.split("■")[0], alone("def Why?:").stdout.split("■")[0]
    assert answer.split("Why?\n\n")[1] == text.split("def Why?:")[1]


def test_models_may_be_on_devices_of_a_cluster(command, ray_running, tiny_pair, tmp_path):
    config = config_file(tmp_path, tiny_pair.spec, {"kind": "pearl"})
    placement = tmp_path / "placement.yaml"
    placement.write_text("draft: {devices: 1}")
    options = ("--max-new-tokens", 200, "--config", config, "--cluster", placement)
    done = command(generate.main, tmp_path, "def main(", *options)
    assert done.returncode == 0
    assert expected(tiny_pair, 200) in printable(done.stdout)
