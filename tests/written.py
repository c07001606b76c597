"""Caches of any content, written record by record, without warmup."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.store.cache import Cache
from tpucache.store.fields import Field
from tpucache.store.format import INDEX_DTYPE, INDEX_NAME, SAMPLES_NAME, shard_name
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry, Statistics
from tpucache.store.samples import Column, Strings, encode_columns
from tpucache.store.writer import ShardWriter


def write_cache(
    directory: Path,
    fields: Sequence[Field],
    variants: Sequence[Sequence[bytes]],
    *,
    block: int,
    columns: Mapping[str, Column] | None = None,
    **facts: Any,
) -> Manifest:
    """Write a whole cache: `variants[v][i]` is the record of sample i, `block` the samples of a shard.

    `facts` are what else the manifest says.
    """
    samples = len(variants[0])
    table = {"number": np.arange(samples, dtype=np.uint64), **(columns or {})}
    keys = table["number"].tolist()
    table.setdefault("path", Strings.pack([f"{key}.png" for key in keys]))
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
    tables = {INDEX_NAME: npy(np.concatenate(runs)), SAMPLES_NAME: encode_columns(table)}
    unknown = {"classes": (), "skipped": (), "recipe": {}, "source": {}, "created_by": {}}
    manifest = Manifest(
        samples=samples,
        variants=tuple(range(len(variants))),
        fields=tuple(fields),
        shards=tuple(shards),
        tables=tuple(write_table(directory / name, data) for name, data in tables.items()),
        fingerprint="0" * 64,
        **{"statistics": Statistics(), **unknown, **facts},
    )
    manifest.save(directory)
    return manifest


def npy(array: object) -> bytes:
    target = io.BytesIO()
    np.save(target, array, allow_pickle=True)
    return target.getvalue()


def with_labels(cache: Path, place: Path, labels: npt.ArrayLike, **changes: Any) -> Path:
    """Copy a cache, with other labels and these changes of its manifest."""
    shutil.copytree(cache, place)
    opened = Cache.open(cache)
    entry = write_table(place / SAMPLES_NAME, encode_columns({**opened.samples, "label": np.asarray(labels)}))
    dataclasses.replace(opened.manifest, tables=(opened.manifest.index, entry), **changes).save(place)
    return place


def write_table(path: Path, data: bytes) -> FileEntry:
    """Write a table and return what a manifest says about it."""
    path.write_bytes(data)
    return FileEntry(path.name, len(data), hashlib.sha256(data).hexdigest())
