"""Bundled heads are small, and of the targets that they name."""

from importlib import metadata

import pytest

from specdec_core.base.bundled import FOR_FETCHED, bundled_path
from specdec_core.models.eagle.loading import load_head, names_head, read_card
from specdec_core.models.fingerprints import fingerprint
from specdec_core.models.loading import load_skeleton

MEBIBYTE = 1024 * 1024
HEADS = [name for name in FOR_FETCHED if names_head(f"bundled:{name}")]


@pytest.fixture(params=HEADS)
def name(request):
    return f"bundled:{request.param}"


def target_of(name):
    """The head's target, where it is installed."""
    target = read_card(name).target
    package = target.removeprefix("package:")
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed (specdec fetch smollm2)")
    return target


def test_it_is_small_enough_for_the_repository(name):
    folder = bundled_path(name.removeprefix("bundled:"))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12 * MEBIBYTE
    assert names_head(name)


def test_it_is_for_the_target_that_it_names(name):
    target = target_of(name)
    head = load_head(name, load_skeleton(target).config, fingerprint(target))
    assert all(weight.isfinite().all() for weight in head.parameters())
