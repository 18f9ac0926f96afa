"""Tables from functions that yield their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec

import pandas as pd

Arguments = ParamSpec("Arguments")
Rows = Iterator[dict[str, Any]]


def framed(rows: Callable[Arguments, Rows]) -> Callable[Arguments, pd.DataFrame]:
    """The function that returns the table of what `rows` yields: a row each, a column a key."""

    @wraps(rows)
    def table(*args: Arguments.args, **kwargs: Arguments.kwargs) -> pd.DataFrame:
        return pd.DataFrame(rows(*args, **kwargs))

    return table
