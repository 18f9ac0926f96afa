"""The sections of the page on the papers that are made from recordings or decoded texts.

A new one is a :class:`~dashboards.reports.paper_sections.section.PaperSection` in the tuple of its
paper.
"""

from dashboards.reports.paper_sections.mcsd import MCSD
from dashboards.reports.paper_sections.post_use import POST_USE
from dashboards.reports.paper_sections.replayed import REPLAYED
from dashboards.reports.paper_sections.section import PaperSection
from dashboards.reports.paper_sections.specdecpp import SPECDECPP
from dashboards.reports.paper_sections.svip import SVIP

SECTIONS: tuple[PaperSection, ...] = (*SPECDECPP, *POST_USE, *MCSD, *REPLAYED, *SVIP)

__all__ = ["SECTIONS", "PaperSection"]
