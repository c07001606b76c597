"""What strangers' servers, tables, records and names do."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lab import COUNT, assert_same, write_photos
from PIL import Image
from refusals import assert_refused, refuses, succeeded
from signed import signed

from tpucache import CachedDataset, CachedLoader, DamageError, FormatError


def vouch(cache: Path, name: str, data: bytes, **changes: Any) -> None:
    (cache / name).write_bytes(data)
    manifest = json.loads((cache / "manifest.json").read_text())
    for entry in (*manifest["tables"], *manifest["shards"]):
        if entry["name"] == name:
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (cache / "manifest.json").write_text(signed(manifest | changes))


def change_record(cache: Path, change: Callable[[bytes], bytes]) -> None:
    rows = np.load(cache / "index.npy")
    name = json.loads((cache / "manifest.json").read_text())["shards"][int(rows[0]["shard"])]["name"]
    shard = bytearray((cache / name).read_bytes())
    start, stop = int(rows[0]["offset"]), int(rows[0]["offset"] + rows[0]["length"])
    record = change(bytes(shard[start:stop]))
    shard[start:stop] = record
    rows["crc32"][0] = zlib.crc32(record)
    table = io.BytesIO()
    np.save(table, rows)
    vouch(cache, name, bytes(shard))
    vouch(cache, "index.npy", table.getvalue())


def change_columns(cache: Path, **changes: bytes) -> None:
    with zipfile.ZipFile(cache / "samples.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in (members | {f"{name}.npy": data for name, data in changes.items()}).items():
            archive.writestr(name, data)
    vouch(cache, "samples.npz", target.getvalue())


def npy(array: np.ndarray) -> bytes:
    target = io.BytesIO()
    np.save(target, array)
    return target.getvalue()


def test_a_record_whose_header_says_thirty_thousand_pixels_square(lab):
    photos = write_photos(lab.folder / "photos")
    succeeded(lab.warmup(photos, lab.folder / "cache", "--codec", "png"))

    def enlarge(record: bytes) -> bytes:
        at = record.index(b"IHDR")
        header = record[at : at + 4] + struct.pack(">II", 30_000, 30_000) + record[at + 12 : at + 17]
        return record[:at] + header + struct.pack(">I", zlib.crc32(header)) + record[at + 21 :]

    change_record(lab.folder / "cache", enlarge)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for read in (lambda: CachedDataset(lab.folder / "cache")[0], lambda: first_batch(lab.folder / "cache")):
            with refuses(DamageError, "30000"):
                read()


def first_batch(cache: Path) -> Any:
    return next(iter(CachedLoader(CachedDataset(cache), 4)))


def test_a_samples_table_whose_shape_has_truth_values(lab):
    cache = lab.copy(lab.shared.cache)
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': (True, {COUNT}), }}\n".encode()
    change_columns(cache, label=b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + bytes(8 * COUNT))
    assert_refused(lab.command("verify", cache), "samples.npz", "copy|verify|repair")
    with refuses(FormatError, "label"):
        CachedDataset(cache).labels  # noqa: B018


def test_corrupt_zstd_frames_whose_checksum_was_remade(lab):
    flat = lab.folder / "photos"
    flat.mkdir()
    for number in range(4):
        Image.fromarray(np.full((16, 16, 3), 9 * number, np.uint8) + np.arange(16, dtype=np.uint8)[:, None]).save(
            flat / f"{number}.png"
        )
    succeeded(lab.warmup(flat, lab.folder / "cache", "--codec", "zstd"))
    refusals = same = 0
    for seed in range(40):
        cache = lab.copy(lab.folder / "cache", f"copy{seed}")
        draws = random.Random(seed)

        def flip(record: bytes, draws: random.Random = draws) -> bytes:
            at = draws.randrange(8, len(record))
            return record[:at] + bytes([record[at] ^ (1 << draws.randrange(8))]) + record[at + 1 :]

        change_record(cache, flip)
        try:
            image = CachedDataset(cache)[0][0]
        except DamageError:
            refusals += 1
            continue
        assert_same(first_batch(cache)[0][0].numpy(), image.numpy())
        same += 1
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    assert re.search(r"corrupt zstd frame.*libzstd", text)
