"""Tiny caches made of records in memory, without warmup."""

from __future__ import annotations

import hashlib
import io
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE

from tpucache.store.fields import Field, RecordLayout
from tpucache.store.format import INDEX_DTYPE, INDEX_NAME, SAMPLES_NAME, shard_name
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry, Statistics
from tpucache.store.samples import Strings, encode_columns
from tpucache.store.writer import ShardWriter

FIELDS = (Field("tokens", "bytes", "|u1", ()),)

Variants = Sequence[Sequence[bytes]]


def write_cache(directory: Path, variants: Variants, block: int = 3, numbers: Sequence[int] | None = None) -> Manifest:
    """Write a whole cache: `variants[v][i]` is the record of sample i, `block` the samples of a shard."""
    samples = len(variants[0])
    keys = list(numbers or range(samples))
    shards: list[ShardEntry] = []
    runs = [np.zeros(0, INDEX_DTYPE)]
    for variant, records in enumerate(variants):
        for first in range(0, samples, block):
            name = shard_name(variant, first // block)
            with ShardWriter(directory / f"{name}.tmp") as writer:
                for key, record in zip(keys[first : first + block], records[first : first + block], strict=True):
                    writer.append(key, record)
                sealed = writer.seal(directory / name)
            sealed.rows["shard"] = len(shards)
            runs.append(sealed.rows)
            at = {"variant": variant, "block": first // block, "first": first, "records": len(sealed.rows)}
            shards.append(ShardEntry(name, sealed.bytes, sealed.sha256, records_sha256=sealed.records_sha256, **at))
    columns = {"number": np.array(keys, np.uint64), "path": Strings.pack([f"{key}.png" for key in keys])}
    index = io.BytesIO()
    np.save(index, np.concatenate(runs))
    manifest = Manifest(
        samples=samples,
        variants=tuple(range(len(variants))),
        fields=FIELDS,
        classes=(),
        shards=tuple(shards),
        tables=(
            write_table(directory / INDEX_NAME, index.getvalue()),
            write_table(directory / SAMPLES_NAME, encode_columns(columns)),
        ),
        skipped=(),
        statistics=Statistics(),
        fingerprint="0" * 64,
        recipe={},
        source={},
        created_by={},
    )
    manifest.save(directory)
    return manifest


def write_table(path: Path, data: bytes) -> FileEntry:
    """Write a table and return what a manifest says about it."""
    path.write_bytes(data)
    return FileEntry(path.name, len(data), hashlib.sha256(data).hexdigest())


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
        entry = write_table(cache / name, data)
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
