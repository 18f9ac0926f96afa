"""Improved MCSD's quality by width is that of texts written for the recorded prompts."""

from research.papers import mcsd
from research.papers.sections.mcsd import MCSD
from tests.specdec_core.recordings.test_record import record


def test_every_width_is_held_against_the_targets_own_texts(
    tiny_pair, tmp_path_factory, monkeypatch
):
    monkeypatch.setattr(mcsd, "LONGEST", 6)
    sets = {
        name: record(tiny_pair, tmp_path_factory.mktemp(name), prompts=prompts)
        for name, prompts in (("code", 2), ("chat", 6))
    }
    [section] = [each for each in MCSD if each.key == "mcsd-1"]
    table = section.study.measure(sets)
    assert list(table["width"]) == [0, *mcsd.WIDTHS]
    assert list(table["lossless"]) == [True, True, False, False]
    most = 6 * mcsd.TEXTS * (2 + mcsd.MOST)  # MOST of the six
    assert most / 2 < table["tokens"].max() <= most
    shown = section.section(table).shown
    assert shown is not None
    assert len(shown) == 4
    assert "width 1, which is lossless" in section.verdict(table)
