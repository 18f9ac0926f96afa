"""URIs: built from paths of any name, and shown without the passwords in them."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

# `user:password@`, where the password may hold any character, or `token@`; a port is no password.
_LOGIN = re.compile(r"(?<=://)(?:[^\s/?#@:\[]*:(?!\d+[/?#])[^\s@]*@)?(?:[^\s/?#]*@)?")
_SECRET = re.compile(r"([?&][\w-]*(?:pass|pwd|secret|token|key)[\w-]*=)[^\s&]+", re.IGNORECASE)


def sqlite_uri(path: Path) -> str:
    """The URI of a SQLite file, for SQLAlchemy, which unquotes it. Optuna formats it first. MLflow
    does not unquote it, and makes the folder that it names, unless it names a driver, too."""
    quoted = re.sub("[%?{}]", lambda found: quote(found[0]), str(path))
    driver = "sqlite" if quoted == str(path) else "sqlite+pysqlite"
    return f"{driver}:///{quoted}"


def without_passwords(text: str) -> str:
    """`text`, with each URI in it as if it had no user, no password and no keys."""
    return _SECRET.sub(r"\1***", _LOGIN.sub("", text))
