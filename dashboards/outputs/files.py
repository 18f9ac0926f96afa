"""A report's files: Markdown, HTML, and the numbers as CSV."""

from __future__ import annotations

from pathlib import Path

from dashboards.outputs.html import page
from dashboards.outputs.markdown import document, part
from dashboards.sections import Report
from specdec_core.base.files import write_atomically


def write_page(report: Report, folder: Path, name: str = "report") -> Path:
    """Write `<name>.html` alone."""
    return write_atomically(Path(folder) / f"{name}.html", page(report))


def write(report: Report, folder: Path, name: str = "report", apart: bool = False) -> list[Path]:
    """Write `<name>.md` and `<name>.html`, and the CSV and SVG files of the sections; with `apart`
    also a Markdown file of each section that has numbers. Returns the paths, the page's last."""
    frames = {s.key: s.frame for s in report.sections if s.frame is not None} | {**report.frames}
    return [
        *(
            write_atomically(folder / f"{key}.csv", frame.to_csv(index=False))
            for key, frame in frames.items()
        ),
        *(
            write_atomically(folder / f"{section.key}.svg", section.svg)
            for section in report.sections
            if section.svg
        ),
        *(
            write_atomically(folder / f"{section.key}.md", part(section) + "\n")
            for section in report.sections
            if apart and section.frame is not None
        ),
        write_atomically(folder / f"{name}.md", document(report)),
        write_page(report, folder, name),
    ]
