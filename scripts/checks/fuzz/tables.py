"""manifest.json, index.npy and samples.npz with anything in them, vouched for by the manifest."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.checks.fuzz.mutate import mutate_bytes, mutate_json, mutate_text, odd_integer
from scripts.checks.fuzz.target import Target, refusals
from tpucache import CachedDataset, CachedLoader, Manifest, Recipe, build_cache, verify_cache
from tpucache.report.inspect import describe, describe_lines

_COUNT: Final = 12
_SIDE: Final = 8


def prepare(folder: Path) -> dict[str, bytes]:
    """Return the files of a small cache with classes, columns of numbers and text, and a variant."""
    from PIL import Image

    source = folder / "source"
    source.mkdir()
    rows = ["path,label,fold,age,note"]
    for number in range(_COUNT):
        Image.fromarray(np.full((_SIDE, _SIDE, 3), number, np.uint8)).save(source / f"{number}.png")
        rows.append(f"{number}.png,{'abc'[number % 3]},{number % 2},{number / 2},n{number}")
    (source / "table.csv").write_text("\n".join(rows))
    from tpucache.warmup.sources import TableOptions, TableSource

    table = TableSource(source / "table.csv", TableOptions(label_cols=("label",), fold_col="fold"))
    build_cache(table, folder / "cache", Recipe(size=_SIDE, variants=1), jobs=1)
    return {path.name: path.read_bytes() for path in (folder / "cache").iterdir()}


def vouch(files: dict[str, bytes]) -> None:
    """Have a manifest state the sizes and hashes of the files as they are."""
    manifest = json.loads(files["manifest.json"])
    manifest.pop("digest", None)  # as in caches of before 0.3, or nothing behind it would be tried
    for entry in (*manifest["tables"], *manifest["shards"]):
        data = files[entry["name"]]
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files["manifest.json"] = json.dumps(manifest).encode()


def write(files: dict[str, bytes], place: Path) -> Path:
    """Write files into a folder."""
    for name, data in files.items():
        (place / name).write_bytes(data)
    return place


def attempt_manifest(files: dict[str, bytes], draws: random.Random, place: Path) -> None:
    """Read a cache whose manifest is changed, as text or in its values."""
    data = files["manifest.json"]
    if draws.random() < 0.25:
        data = mutate_bytes(data, draws)
    else:
        content = json.loads(data)
        content.pop("digest", None)
        for _ in range(draws.choice((1, 1, 1, 2, 5))):
            content = mutate_json(content, draws)
        data = json.dumps(content).encode()
    read(write({**files, "manifest.json": data}, place))


def attempt_index(files: dict[str, bytes], draws: random.Random, place: Path) -> None:
    """Read a cache whose index is changed, in its header or in its rows."""
    files = dict(files)
    data = bytearray(files["index.npy"])
    start = 10 + int.from_bytes(data[8:10], "little")
    way = draws.randrange(4)
    if way == 0:
        files["index.npy"] = mutate_bytes(bytes(data), draws)
    elif way == 1:
        header = mutate_text(data[10:start].decode("latin-1"), draws).encode("latin-1", "replace")[:65535]
        files["index.npy"] = bytes(data[:8]) + len(header).to_bytes(2, "little") + header + bytes(data[start:])
    else:
        rows = np.load(io.BytesIO(bytes(data)))
        for _ in range(draws.choice((1, 1, 3))):
            name = draws.choice(rows.dtype.names)
            most = np.iinfo(rows.dtype[name]).max
            rows[name][draws.randrange(len(rows))] = odd_integer(draws) % (int(most) + 1)
        target = io.BytesIO()
        np.save(target, rows)
        files["index.npy"] = target.getvalue()
    if draws.random() < 0.9:
        vouch(files)
    read(write(files, place))


def attempt_samples(files: dict[str, bytes], draws: random.Random, place: Path) -> None:
    """Read a cache whose samples table is changed: in its archive, a column's header or a column's values."""
    files = dict(files)
    if draws.random() < 0.2:
        files["samples.npz"] = mutate_bytes(files["samples.npz"], draws)
    else:
        with zipfile.ZipFile(io.BytesIO(files["samples.npz"])) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
        for at in draws.sample(range(len(members)), draws.choice((1, 1, 2))):
            members[at] = _changed_column(*members[at], draws)
        if draws.random() < 0.1:
            members.append(draws.choice(members))
        if draws.random() < 0.1:
            del members[draws.randrange(len(members))]
        files["samples.npz"] = _archive(members, draws)
    if draws.random() < 0.9:
        vouch(files)
    read(write(files, place))


def _changed_column(name: str, data: bytes, draws: random.Random) -> tuple[str, bytes]:
    start = 10 + int.from_bytes(data[8:10], "little")
    way = draws.randrange(5)
    if way == 0:
        return name, mutate_bytes(data, draws)
    if way == 1:
        header = mutate_text(data[10:start].decode("latin-1"), draws).encode("latin-1", "replace")[:65535]
        return name, data[:8] + len(header).to_bytes(2, "little") + header + data[start:]
    if way == 2:
        return mutate_text(name, draws)[:200].replace("\0", "").encode("utf-8", "replace").decode(), data
    array = np.load(io.BytesIO(data)).copy()
    flat = array.reshape(-1)
    if way == 3 and len(flat):
        value: Any = odd_integer(draws)
        if array.dtype.kind == "f":
            flat[draws.randrange(len(flat))] = draws.choice((float("nan"), float("inf"), -1e300, float(value % 2**64)))
        else:
            flat.view(f"u{array.dtype.itemsize}")[draws.randrange(len(flat))] = value % 2 ** (8 * array.dtype.itemsize)
    else:
        array = draws.choice(
            (array[:-1], array[None], array.astype(">i8" if array.dtype.kind in "iu" else ">f8"), array[:0])
        )
    target = io.BytesIO()
    np.save(target, array)
    return name, target.getvalue()


def _archive(members: list[tuple[str, bytes]], draws: random.Random) -> bytes:
    import warnings

    target = io.BytesIO()
    way = zipfile.ZIP_DEFLATED if draws.random() < 0.05 else zipfile.ZIP_STORED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name twice is what is wanted
        with zipfile.ZipFile(target, "w", way) as archive:
            for name, data in members:
                archive.writestr(name or "x", data)
    data = target.getvalue()
    return mutate_bytes(data, draws) if draws.random() < 0.1 else data


def read(cache: Path) -> None:
    """Read all that a cache holds, in each way that there is."""
    refusals(
        lambda: _describe(Manifest.load(cache)),
        lambda: _samples(CachedDataset(cache)),
        lambda: _columns(CachedDataset(cache)),
        lambda: CachedDataset(cache).where("class == 'a' and age >= 0 and note != ''"),
        lambda: [len(labels) for _, labels in CachedLoader(CachedDataset(cache, "epoch"), 5, threads=1)],
        lambda: verify_cache(cache),
    )


def _describe(manifest: Manifest) -> None:
    json.dumps(describe(manifest))
    "\n".join(describe_lines(manifest)).encode("utf-8", "backslashreplace")


def _samples(dataset: CachedDataset) -> None:
    for position in range(min(len(dataset), _COUNT)):
        sample = dataset[position]
        image = next(iter(sample.values())) if isinstance(sample, dict) else sample[0]
        assert image.numel() <= 1 << 30


def _columns(dataset: CachedDataset) -> None:
    for name in dataset.table:
        list(dataset.table[name])
    assert len(dataset.labels) == len(dataset.paths) == len(dataset)


TARGETS: Final = (
    Target("manifest", prepare, attempt_manifest, 2.0),
    Target("index", prepare, attempt_index),
    Target("samples", prepare, attempt_samples, 2.0),
)
