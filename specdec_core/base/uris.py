"""URIs: built from paths of any name, and shown without the passwords in them."""

from __future__ import annotations

import re
from pathlib import Path

# `user:password@`, where the password may hold any character, or `token@`; a port is no password.
_LOGIN = re.compile(r"(?<=://)(?:[^\s/?#@:\[]*:(?!\d+[/?#])[^\s@]*@)?(?:[^\s/?#]*@)?")
_SECRET = re.compile(r"([?&][\w-]*(?:pass|pwd|secret|token|key)[\w-]*=)[^\s&]+", re.IGNORECASE)


def sqlite_uri(path: Path) -> str:
    """The URI of a SQLite file, for SQLAlchemy, which unquotes it. MLflow does not: it makes the
    folder that a URI names, unless this says which driver to use."""
    quoted = str(path).replace("%", "%25").replace("?", "%3F")
    driver = "sqlite" if quoted == str(path) else "sqlite+pysqlite"
    return f"{driver}:///{quoted}"


def without_passwords(text: str) -> str:
    """`text`, with each URI in it as if it had no user, no password and no keys."""
    return _SECRET.sub(r"\1***", _LOGIN.sub("", text))
