"""What strangers' servers, tables, records and names do."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import re
import struct
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lab import COUNT, assert_same, write_photos
from patience import PATIENCE
from PIL import Image
from refusals import assert_refused, refuses, succeeded
from signed import signed

from tpucache import CachedDataset, CachedLoader, DamageError, FormatError

#: Serves a folder by ranges, each answer followed by 64 MB more, or packed by gzip; prints its port, then bytes sent.
SERVER = """
import gzip, http.server, pathlib, re, sys
folder, way = pathlib.Path(sys.argv[1]), sys.argv[2]

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        path = folder / self.path.rpartition("/")[2]
        if not path.is_file():
            return self.send_error(404)  # else it would be asked for again and again
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\\d+)-(\\d+)", self.headers.get("Range", ""))
        self.send_response(206 if asked else 200)
        if asked:
            first, last = int(asked[1]), int(asked[2])
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        if way == "gzip" and asked:
            data = gzip.compress(data)
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(data)
        if way == "endless" and asked:
            for _ in range(64):
                self.wfile.write(bytes(1 << 20))
                print(1, flush=True)

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def serving(folder: Path, way: str) -> Iterator[tuple[str, Callable[[], int]]]:
    command = [sys.executable, "-c", SERVER, str(folder), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None

        def end() -> int:
            server.terminate()
            return server.communicate(timeout=PATIENCE)[0].count("1")

        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}/x", end
        finally:
            server.kill()


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


def test_a_server_whose_answers_to_ranges_never_end(lab):
    with serving(lab.shared.cache, "endless") as (url, end):
        succeeded(lab.command("fetch", url, lab.folder / "fetched"))
        sent = end()
    files = len(list((lab.folder / "fetched").iterdir()))
    assert sent <= 8 * files, f"of 64 MB after each answer, at most 8 were sent, not {sent} of {files} files"


def test_a_server_that_packs_its_answers(lab):
    with serving(lab.shared.cache, "gzip") as (url, _):
        assert_refused(lab.command("fetch", url, lab.folder / "fetched"), "gzip", "was not asked for")


def test_a_parquet_file_that_names_pictures_elsewhere(lab):
    import pyarrow
    import pyarrow.parquet

    photo = next(lab.shared.photos.rglob("*.png"))
    for name in (str(photo), "../" * 20 + str(photo)[1:]):
        table = lab.folder / "others.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"image": [name]}), table)
        assert_refused(lab.warmup(table, lab.folder / "cache", "--path-col", "image"), "outside of", "--root", status=1)
    succeeded(lab.warmup(table, lab.folder / "cache", "--path-col", "image", "--root", "/"))


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
