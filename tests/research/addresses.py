"""What a page would fetch by itself, read from its elements and its styles."""

from __future__ import annotations

import re
from html.parser import HTMLParser

STYLED = re.compile(r"""(?:url\(|@import)\s*["']?([^"')\s]+)""")


def fetched(html: str) -> list[str]:
    """Addresses of scripts, styles, pictures and frames, but for what the page itself holds.

    The figures' data are left alone: numbers in base64 can spell any short word.
    """
    reader = _Reader()
    reader.feed(html)
    return [address for address in reader.found if not address.startswith(("data:", "#"))]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.styled = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.styled = tag == "style"
        for name, value in attrs:
            if name in ("src", "srcset", "poster") or (name == "href" and tag != "a"):
                self.found.append(value or "")
            elif name == "style":
                self.found += STYLED.findall(value or "")

    def handle_endtag(self, tag: str) -> None:
        self.styled = False

    def handle_data(self, data: str) -> None:
        if self.styled:
            self.found += STYLED.findall(data)
