"""Memory that is all in use moves into huge pages, unchanged, and takes no more room for it."""

import mmap
from pathlib import Path

import pytest
import torch

from specdec_core.base import memory
from specdec_core.models import huge_pages

MIB = 1 << 20


def in_huge_pages(address):
    """KiB in huge pages of the mapping that holds the address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            start, end = (int(edge, 16) for edge in first.split("-"))
            here = start <= address < end
        elif here and first == "AnonHugePages:":
            return int(line.split()[1])
    raise AssertionError("no such mapping")


@pytest.fixture
def mapped():
    file = Path("/proc/self/pagemap")
    if not file.exists():
        pytest.skip("this system does not say which pages are in use")
    return file


def test_full_memory_moves_and_keeps_its_content(mapped):
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if enabled.exists() and "[always]" in enabled.read_text():
        pytest.skip("this system gives huge pages to all, so there are none to move")
    numbers = torch.arange(16 * MIB // 8)
    before = in_huge_pages(numbers.data_ptr() + 4 * MIB)
    settled = huge_pages.settle()
    if not settled:
        pytest.skip("this system gives no huge pages to who asks")
    assert before == 0
    assert in_huge_pages(numbers.data_ptr() + 4 * MIB) >= 12 * 1024
    assert torch.equal(numbers, torch.arange(16 * MIB // 8))
    assert huge_pages.settle() >= settled - 4 * MIB  # what is there already is not moved again


def test_memory_in_which_little_is_written_stays_small(mapped):
    hollow = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    huge_pages.settle()
    for start in range(0, len(hollow), huge_pages.SIZE):
        hollow[start] = 1
    before = memory.resident()
    huge_pages.settle()
    assert memory.resident() - before < 16
