"""Tiny caches made of records in memory, without warmup."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import written
from patience import PATIENCE

from tpucache.store.fields import Field, RecordLayout
from tpucache.store.manifest import Manifest

FIELDS = (Field("tokens", "bytes", "|u1", ()),)

Variants = Sequence[Sequence[bytes]]


def write_cache(directory: Path, variants: Variants, block: int = 3, numbers: Sequence[int] | None = None) -> Manifest:
    """Write a whole cache: `variants[v][i]` is the record of sample i, `block` the samples of a shard."""
    keys = np.array(numbers or range(len(variants[0])), np.uint64)
    return written.write_cache(directory, FIELDS, variants, block=block, columns={"number": keys})


def records_of(sizes: Sequence[int], seed: int = 0) -> list[bytes]:
    """Return noise of the given sizes, as records of one `bytes` field."""
    noise = random.Random(seed)
    return [RecordLayout(FIELDS).join([noise.randbytes(size)]) for size in sizes]


#: A cache of eight samples in three shards of each of two variants; equal sizes make its shards equally long.
NUMBERS = (0, 1, 5, 6, 7, 300, 301, 70_000)
SIZES = (5000, 10, 5000, 5000, 10, 5000, 5000, 10)
RECORDS = (records_of(SIZES, 1), records_of(SIZES, 2))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A sound cache of RECORDS that a test may damage."""
    directory = tmp_path / "cache"
    directory.mkdir()
    write_cache(directory, RECORDS, numbers=NUMBERS)
    return directory


@pytest.fixture(scope="session", name="write_cache")
def write_cache_fixture() -> Callable[..., Manifest]:
    """The function `write_cache(directory, variants, block=3, numbers=None)`."""
    return write_cache


@pytest.fixture(scope="session", name="records_of")
def records_of_fixture() -> Callable[..., list[bytes]]:
    """The function `records_of(sizes, seed=0)`."""
    return records_of


@pytest.fixture(scope="session")
def numbers() -> tuple[int, ...]:
    """The sample numbers of `cache`."""
    return NUMBERS


@pytest.fixture(scope="session")
def records() -> tuple[list[bytes], list[bytes]]:
    """The records of `cache`, variant by variant."""
    return RECORDS


@pytest.fixture
def replace_table(cache: Path) -> Callable[[str, bytes], None]:
    """The function `replace_table(name, data)`: another table in `cache`, and a manifest that vouches for it."""

    def replace(name: str, data: bytes) -> None:
        manifest = Manifest.load(cache)
        entry = written.write_table(cache / name, data)
        tables = tuple(entry if table.name == name else table for table in manifest.tables)
        Manifest(**{**vars(manifest), "tables": tables}).save(cache)

    return replace


@pytest.fixture(scope="session")
def run_without_lmdb() -> Callable[..., str]:
    """The function `run_without_lmdb(code, *arguments)`: what a Python prints in which importing lmdb raises."""

    def run(code: str, *arguments: object) -> str:
        program = f"import sys; sys.modules['lmdb'] = None\n{code}"
        command = [sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
