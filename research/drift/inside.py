"""What runs in the two sandboxes of :mod:`research.drift.sandbox`, as a text and with
nothing but the standard library: a program that answers calls, and tests that make them."""

from __future__ import annotations

import ast
import os
import resource
import sys
from typing import Any, TextIO


def limit(seconds: int, memory: int, written: int) -> None:
    """Limit this process to `seconds` of CPU time, `memory` bytes of address space and files of
    `written` bytes."""
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, written),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def _channel() -> tuple[TextIO, TextIO]:
    """Standard input and output for lines of Python literals; what is printed is thrown away."""
    lines = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for descriptor in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    return lines


def _say(value: Any, lines: TextIO) -> None:
    print(ascii(value), file=lines, flush=True)


def _plain(value: Any) -> Any:
    """The value without subclasses: a `Counter` is written as a `dict`."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(_plain, value))
    plain: tuple[Any, ...] = (str, bytes, int, float, complex)
    return next((kind(value) for kind in plain if isinstance(value, kind)), value)


def answer() -> None:
    """Run the program that the first line holds, and call its function with each further line's
    arguments."""
    calls, answers = _channel()
    program, entry = ast.literal_eval(calls.readline())
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "program", "exec"), names)
    for call in calls:
        arguments, named = ast.literal_eval(call)
        value = names[entry](*arguments, **named)
        _say(value if isinstance(value, bool) else _plain(value), answers)


def test(given: int) -> None:
    """Test the other sandbox's program; returns where it passes. `given` is the descriptor of a
    file with the program, its function's name and the tests; their `check` takes the function."""
    with open(given, encoding="ascii") as file:
        program, entry, tests = ast.literal_eval(file.read())
    answers, calls = _channel()
    _say((program, entry), calls)

    def function(*arguments: Any, **named: Any) -> Any:
        _say((arguments, named), calls)
        return ast.literal_eval(answers.readline())  # no value can be more than a literal

    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(tests, "tests", "exec"), names)
    names[entry] = function
    names["check"](function)


if __name__ == "__main__":
    role, *numbers = sys.argv[1:]
    limit(*map(int, numbers[:3]))
    if role == "answer":
        answer()
    elif role == "test":
        test(int(numbers[3]))
