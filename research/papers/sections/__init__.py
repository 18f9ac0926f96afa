"""The sections of the page on the papers that are made from recordings or decoded texts.

A new one is a :class:`~research.papers.sections.section.Exhibit` in the tuple of its paper,
with its words in `sweeps/papers-sections.yaml`.
"""

from research.papers.sections.mcsd import MCSD
from research.papers.sections.post_use import POST_USE
from research.papers.sections.replayed import REPLAYED
from research.papers.sections.section import Exhibit
from research.papers.sections.specdecpp import SPECDECPP
from research.papers.sections.svip import SVIP

SECTIONS: tuple[Exhibit, ...] = (*SPECDECPP, *POST_USE, *MCSD, *REPLAYED, *SVIP)

__all__ = ["SECTIONS", "Exhibit"]
