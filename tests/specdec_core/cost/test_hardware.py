"""Another machine's forward times re-rank configurations, and bad ones are told in one line."""

from pathlib import Path

import pytest

import jobs
from specdec_core.base.errors import UserError
from specdec_core.cost import load_hardware
from tests.specdec_core.cost.examples import counts

SHIPPED = sorted((Path(jobs.__file__).parent / "hardware").glob("*.yaml"))

GOOD = """
name: a machine
target: {speculative: 0.2, alone: 0.1}
drafts: {small: 0.01, "*": 0.05}
"""


def write(folder, text):
    path = folder / "h.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def hardware(tmp_path):
    return load_hardware(write(tmp_path, GOOD))


@pytest.fixture
def llama():
    path = next(path for path in SHIPPED if path.name == "llama2-7b-70b-2xA100.yaml")
    return load_hardware(path).profile(["draft"])


class TestProfile:
    def test_rounds_cost_their_own_forwards_and_the_baseline_the_stand_alone_one(self, hardware):
        profile = hardware.profile(["small"])
        c = counts(n_draft=40, n_target=10, n_discarded=12)
        assert profile.estimate_seconds(c, "small") == pytest.approx(40 * 0.01 + 10 * 0.2)
        assert profile.autoregressive_seconds(c.n) == pytest.approx(c.n * 0.1)
        assert profile.speedup(c) == pytest.approx(c.n * 0.1 / 2.4)

    def test_decoding_without_a_draft_is_its_own_baseline(self, hardware):
        alone = counts(n_draft=0, n_target=50, n_discarded=0)
        assert hardware.profile(["small"]).speedup(alone) == 1

    def test_time_does_not_depend_on_shape(self, hardware):
        profile = hardware.profile(["small"])
        assert profile.t_target(1, 10) == profile.t_target(20, 4000) == 0.2
        assert profile.t_draft("small", 10) == profile.t_draft("small", 4000) == 0.01

    def test_the_star_stands_for_drafts_that_are_not_named(self, hardware):
        profile = hardware.profile(["other", "small"])
        assert (profile.t_draft("other"), profile.t_draft("small")) == (0.05, 0.01)
        assert profile.t_draft() == 0.05  # the pair's first draft

    def test_one_target_time_is_both(self, tmp_path):
        text = "name: m\ntarget: 2e-1\ndrafts: {7: 0.01}\n"
        profile = load_hardware(write(tmp_path, text)).profile(["7"])
        assert profile.t_target() == profile.autoregressive_seconds(1) == 0.2


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (("0.2", "-0.2"), "target.speculative: .*greater than 0.*-0.2"),
            (("0.1}", "0}"), "target.alone: .*greater than 0"),
            (("0.01", ".nan"), "drafts.small: .*nan"),
            (("0.05", ".inf"), r"drafts.\*: .*finite"),
            (("0.05", "5 ms"), r"drafts.\*: .*number.*5 ms"),
            (('{small: 0.01, "*": 0.05}', "{}"), "drafts: .*at least 1"),
            (("drafts:", "draft:"), "drafts: .*required; draft: unknown key"),
            (("alone:", "lone:"), "target.lone: unknown key"),
            (("{speculative: 0.2, alone: 0.1}", "-1"), "target.*greater than 0.*-1"),
            (("name: a machine", ""), "name: .*required"),
            (("drafts: {", "drafts: {{"), "not valid YAML"),
        ],
    )
    def test_is_one_line_that_names_file_and_key(self, tmp_path, change, message):
        assert change[0] in GOOD
        with pytest.raises(UserError, match=rf"h\.yaml: .*{message}") as caught:
            load_hardware(write(tmp_path, GOOD.replace(*change)))
        assert "\n" not in str(caught.value)

    def test_missing_file(self, tmp_path):
        with pytest.raises(UserError, match=r"h\.yaml: no such file"):
            load_hardware(tmp_path / "h.yaml")

    def test_draft_without_a_time(self, tmp_path):
        hardware = load_hardware(write(tmp_path, GOOD.replace(', "*": 0.05', "")))
        with pytest.raises(UserError, match=r"h\.yaml: drafts\.big: no time .*small"):
            hardware.profile(["small", "big"])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_can_be_read(path):
    assert load_hardware(path).profile(["draft"]).speedup(counts(40, 10, 12)) > 0


class TestLlama2OnTwoA100:
    """SpecDec++'s own figures come out."""

    def test_the_target_alone_makes_9_26_tokens_a_second(self, llama):
        assert 1 / llama.autoregressive_seconds(1) == pytest.approx(9.26, abs=5e-3)

    def test_the_oracle_makes_about_27_tokens_a_second(self, llama):
        # §4.1: N_target/N = 0.164 gives 27.06 tokens/s and 2.92x, as means over prompts; the rate
        # of the mean is a little lower.
        oracle = counts(n_draft=836, n_target=164, n_discarded=0)
        assert oracle.n / llama.estimate_seconds(oracle) == pytest.approx(26.37, abs=0.01)
        assert oracle.n / llama.estimate_seconds(oracle) == pytest.approx(27.06, rel=0.03)
        assert llama.speedup(oracle) == pytest.approx(2.92, rel=0.03)
