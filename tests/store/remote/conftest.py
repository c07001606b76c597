"""A cache behind a web server, cut into many small pieces."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from disk import disk

sys.path.append(str(Path(__file__).parent))  # for servers.py

from servers import Server

from tpucache import CachedDataset, Recipe, UsageError, build_cache
from tpucache.store.remote import local, retry
from tpucache.warmup import blocks

__all__ = ["disk"]


@pytest.fixture(scope="session")
def cache(published: Path) -> Path:
    """The photographs at 16x16 with three augmented variants, several shards each. Not to be written to."""
    return published


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut caches into pieces of a few records."""
    monkeypatch.setattr(local, "PIECE_BYTES", 5 << 10)
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0.005)


@pytest.fixture
def server(cache: Path) -> Iterator[Server]:
    """A web server of the cache."""
    server = Server(cache)
    yield server
    server.close()


@pytest.fixture
def opened(server: Server, small_pieces: None, tmp_path: Path) -> Iterator[Callable[..., CachedDataset]]:
    """The function `opened(**options)`: the cache at the server, kept in a folder of this test."""
    datasets: list[CachedDataset] = []

    def make(**options: object) -> CachedDataset:
        options = {"cache_dir": tmp_path / "kept", "in_memory": False, **options}
        datasets.append(CachedDataset(server.url, **options))
        return datasets[-1]

    yield make
    for dataset in datasets:
        with contextlib.suppress(UsageError):  # a test closed it
            dataset.cache.reader.close()


@pytest.fixture(scope="session")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise at 16x16 in three variants, three shards each. Not to be written to."""
    folder = tmp_path_factory.mktemp("small")
    code = "def noise(image, generator):\n    return image ^ generator.integers(0, 9, dtype='u1')\n"
    (folder / "noise_by_test.py").write_text(code)
    rng = np.random.default_rng(0)
    items = [(rng.integers(0, 256, (16, 16, 3), np.uint8), number % 2) for number in range(48)]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(blocks, "MIN_BLOCK_SAMPLES", 16)
        recipe = Recipe(size=16, variants=2, augment="noise_by_test:noise")
        manifest = build_cache(items, folder / "cache", recipe, jobs=1)
    assert len(manifest.shards) == 9
    return folder / "cache"
