"""The page on the papers names what is there, and shows what was measured."""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import yaml

from dashboards import cells
from dashboards.sections import Section
from research.papers.__main__ import METHODS, PAPERS
from research.papers.inputs import with_own_heads
from research.papers.methods import Paper, load_methods, measured_range
from research.papers.page import papers_page
from research.papers.plan import Claim, load_paper_plan
from research.papers.result import PapersResult
from research.papers.sections import SECTIONS, Exhibit
from research.papers.sections import section as section_module
from research.papers.sections.section import SectionWords
from research.papers.studies import LONG_FORM, LONG_FORM_GREEDY, OWN_HEADS, PAIR, TIMES
from research.papers.table_verdicts import OTHERS, VERDICT, verdict
from specdec_core.base.errors import UserError
from tests.observers import Heard
from tests.research.papers.test_tables import frontier, result  # noqa: F401 (fixtures)

ROOT = Path(__file__).parents[3]
EXHIBITS = {  # how many figures and tables the papers have
    "SpecDec++": {"Fig.": 5, "Table": 4},
    "Post-use & Pre-cut": {"Fig.": 6, "Table": 11},
    "Improving MCSD": {"Fig.": 8, "Table": 4},
    "BanditSpec": {},  # slides, without numbers
    "SVIP": {"Fig.": 8, "Table": 5},
}


MOST_WORDS = 4000  # of a page


def unjudged(page: str) -> list[str]:
    """The exhibits of a page without a verdict, by key."""
    exhibits = re.split(r'<a id="([^"]+)"></a>', page)[1:]
    return [
        key
        for key, text in zip(exhibits[::2], exhibits[1::2], strict=True)
        if not re.search(rf"\*\*{VERDICT}\*\*: \S", text)
    ]


def words(page: str) -> int:
    """The words of a page without what makes up tables and links."""
    return len(re.findall(r"[^\s|*`\[\]#()]*\w[^\s|]*", re.sub(r"\]\([^)]*\)|<[^>]*>", "", page)))


def test_every_method_has_its_code_its_test_and_its_row():
    keys = [section.key for section in SECTIONS]
    papers = load_methods(METHODS, load_paper_plan(PAPERS), keys)
    assert len(papers) == 5
    for paper in papers:
        for each in paper.methods:
            assert (ROOT / each.code).is_file()
            assert (ROOT / each.test).is_file()
    shown = [key for paper in papers for key in paper.tables]
    assert sorted(shown) == sorted(load_paper_plan(PAPERS).tables)
    assert len(set(keys)) == len(keys)
    assert {section.words.paper for section in SECTIONS} <= {paper.title for paper in papers}
    for paper in papers:
        assert {
            f"{kind} {number}"
            for kind, most in EXHIBITS[paper.title].items()
            for number in range(1, most + 1)
        } <= {re.sub(r"(\d)[abc]$", r"\1", name) for name in paper.exhibits}
    inputs = {LONG_FORM, LONG_FORM_GREEDY, OWN_HEADS, PAIR, TIMES}
    known = {*inputs, *load_paper_plan(PAPERS).recordings}
    assert {name for section in SECTIONS for name in section.needs} <= known


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("row: UCBSpec,", "row: UBCSpec,", "no row 'UBCSpec' in 'banditspec'"),
        ("tables: [svip-1, svip-2]", "tables: [svip-9]", "no table 'svip-9'"),
        (
            "Table 5: [svip-t5]",
            "Table 5: [svip-t6]",
            "SVIP: Table 5: no table or section 'svip-t6'",
        ),
        ("{section: svip-t4}", "{section: svip-t9}", "no section 'svip-t9'"),
    ],
)
def test_a_method_of_no_table_is_refused(tmp_path, old, new, said):
    file = tmp_path / "methods.yaml"
    file.write_text(METHODS.read_text().replace(old, new))
    with pytest.raises(UserError, match=said):
        load_methods(file, load_paper_plan(PAPERS), [section.key for section in SECTIONS])


PAPER = Paper.model_validate(
    yaml.safe_load("""
title: A paper
tables: [methods, lengths]
methods:
  - {method: Chains, source: Eq. 1, code: chain.py, test: test_chain.py, reported: 2.0×,
     ours: {table: lengths, row: Chain, quantity: speedup}}
  - {method: Theory, source: Thm 1, code: theory.py, test: test_theory.py}
  - {method: Lengths, source: Fig. 2, code: lengths.py, test: test_lengths.py, reported: "9",
     ours: {section: lengths-2}}
exhibits:
  Fig. 1: a drawing
  Fig. 2: [lengths-2]
  Table 1: [methods, lengths]
  Table 2: [methods, lengths]
errata: [Eq. 1 has a wrong sign.]
""")
)


def test_the_papers_own_page_has_both_numbers_and_whole_tables(
    result: PapersResult,  # noqa: F811
) -> None:
    page, files = papers_page(result, [PAPER], "specdec lab papers")
    text = files["papers-a-paper.md"]
    low, high = measured_range(result, PAPER.methods[0].ours)
    assert low < high
    row = next(line for line in text.splitlines() if line.startswith("| Chains"))
    assert row.split(" | ")[-2:] == ["2.0×", f"{low:.2f}×–{high:.2f}× |"]
    assert "| Theory | Thm 1 | `theory.py` | `test_theory.py` | – | – |" in text
    assert "- Eq. 1 has a wrong sign." in text
    assert "## Methods by task" in text
    assert "[Whole table](papers-a-paper.md#methods)" in page
    figures = {name: svg for name, svg in files.items() if name.endswith(".svg")}
    assert sorted(figures) == ["lengths.svg", "methods.svg"]
    for name, svg in figures.items():
        assert f"]({name})" in page
        assert f"]({name})" in text
        texts = [node.text for node in ElementTree.fromstring(svg).iter() if node.text]
        assert any(text.startswith(("Chain", "chain")) for text in texts)


def test_a_section_has_both_numbers_its_setting_and_its_figure(
    result: PapersResult,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = SectionWords(
        paper="A paper",
        source="Fig. 2",
        title="Lengths",
        reported="nine.",
        setting="another pair.",
    )
    monkeypatch.setattr(section_module, "section_words", lambda: {"lengths-2": words})
    section = Exhibit(
        "lengths-2",
        ("greedy",),
        pd.DataFrame,
        lambda table: Section(key="", svg="<svg/>", shown=cells.everything(table)),
        lambda table: verdict(table["length"] > 5, "4 and 7 against 9."),
    )
    studied = {"lengths-2": pd.DataFrame({"length": [4, 7]})}
    page, files = papers_page(result, [PAPER], "specdec lab papers", studied, [section])
    text = files["papers-a-paper.md"]
    link = "[Lengths](#lengths-2)"
    assert f"| Lengths | Fig. 2 | `lengths.py` | `test_lengths.py` | 9 | {link} |" in text
    assert "## Lengths\n\n![Lengths](lengths-2.svg)\n\nA paper, Fig. 2.\n" in text
    assert "- In the paper: nine.\n- Here: another pair.\n" in text
    assert "- **Verdict**: Holds partly (1 of 2): 4 and 7 against 9." in page
    assert files["lengths-2.svg"] == "<svg/>"
    _, files = papers_page(result, [PAPER], "specdec lab papers", {}, [section])
    assert "| `test_lengths.py` | 9 | – |" in files["papers-a-paper.md"]
    assert "lengths-2.svg" not in files


def test_an_exhibit_without_a_verdict_is_refused(
    result: PapersResult,  # noqa: F811
    frontier: PapersResult,  # noqa: F811
) -> None:
    claim = Claim(of=("Chain",), over=("PLD",), paper="1.5×")
    table = result.plan.tables["methods"].model_copy(update={"claim": claim})
    plan = result.plan.model_copy(
        update={"tables": {"methods": table, "lengths": result.plan.tables["lengths"]}}
    )
    page, files = papers_page(result.model_copy(update={"plan": plan}), [PAPER], "by hand")
    assert unjudged(page) == ["lengths"]  # a table about which its plan claims nothing
    assert unjudged(files["papers-a-paper.md"]) == ["lengths"]
    assert "**Verdict**: Does not hold here: Chain has ratio 1.95× against 2.00× of PLD" in page
    assert "measured reason: tokens a round" in page
    assert "chosen on these prompts; paper" not in page  # a row a side
    several = {"claim": claim.model_copy(update={"of": ("Chain", "UCBSpec")})}
    tables = {**plan.tables, "methods": table.model_copy(update=several)}
    plan = plan.model_copy(update={"tables": tables})
    page, _ = papers_page(result.model_copy(update={"plan": plan}), [PAPER], "by hand")
    assert ", the best of each chosen on these prompts; paper: 1.5×" in page
    rates = PAPER.model_copy(update={"tables": ("rates",)})
    page, _ = papers_page(frontier, [rates], "by hand")
    assert unjudged(page) == ["rates"]  # the regression has one


def test_every_table_of_the_plans_has_a_claim_of_rows_that_are_there():
    for file in (PAPERS, PAPERS.with_name("papers-llm.yaml")):
        for key, table in load_paper_plan(file).tables.items():
            if table.claim is None:
                assert key in OTHERS
                continue
            for pattern in (*table.claim.of, *table.claim.over):
                assert any(fnmatchcase(row.name, pattern) for row in table.rows), (key, pattern)
            assert table.claim.quantity in table.columns


@pytest.mark.parametrize("file", sorted(ROOT.glob("docs/results/**/papers.md")), ids=str)
def test_a_published_page_has_verdicts_and_at_most_its_words(file: Path):
    page = file.read_text()
    assert "**Verdict**" in page
    assert unjudged(page) == []
    assert words(page) <= MOST_WORDS


def test_rows_with_the_head_of_another_pair_are_left_out():
    def rows(plan):
        return [row.name for row in plan.tables["specdecpp-1"].rows]

    watching = Heard()
    own = load_paper_plan(PAPERS, only=["specdecpp-1"])
    assert rows(with_own_heads(own, watching)) == rows(own)
    assert not watching.warnings
    # The other draft takes the first place, for which the head was not trained.
    pair = own.pair.model_copy(update={"drafts": {"other": own.pair.drafts["medium"]}})
    other = with_own_heads(own.model_copy(update={"pair": pair}), watching)
    left_out = [f"SpecDec++, h={h}" for h in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert [name for name in rows(own) if name not in rows(other)] == left_out
    assert "SpecDec++, h=0.1 is left out" in watching.warnings[0]


def test_a_table_of_the_second_draft_uses_it_or_is_left_out(tmp_path):
    both = load_paper_plan(PAPERS, only=["specdecpp-4"])
    drafts = [m.configurations[0].draft for m in both.methods("specdecpp-4")]
    assert set(drafts) == {list(both.pair.drafts)[1]}
    assert with_own_heads(both) == both
    one = {**both.pair.model_dump(), "drafts": {"small": "bundled:draft-small"}}
    assert "specdecpp-4" not in load_paper_plan(PAPERS, pair=one).tables
    with pytest.raises(UserError, match="--table specdecpp-4: the pair has too few drafts"):
        load_paper_plan(PAPERS, only=["specdecpp-4"], pair=one)
