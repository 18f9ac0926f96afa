"""Helpers for the sentences of configurations."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """`1 token`, `4 tokens`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
