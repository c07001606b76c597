"""A long listing reports how far it is, whatever the samples lie in; a short one says nothing."""

from __future__ import annotations

import io
import itertools
import re
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tpucache.warmup.sources import open_source

COUNT = 3


def _png(number: int) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(target, "PNG")
    return target.getvalue()


def _write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(COUNT):
            archive.writestr(f"{number}.png", _png(number))


def _write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(COUNT):
            for ending, data in (("png", _png(number)), ("cls", b"1")):
                entry = tarfile.TarInfo(f"{number}.{ending}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


def _write_parquet(path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"image": [_png(number) for number in range(COUNT)]}), path)


def _write_tfrecord(path: Path) -> None:
    tfrecord = pytest.importorskip("tfrecord")
    writer = tfrecord.TFRecordWriter(str(path))
    for number in range(COUNT):
        writer.write({"image": (_png(number), "byte")})
    writer.close()


@pytest.mark.parametrize(
    ("name", "write", "lines"),
    [
        ("a.zip", _write_zip, ["3 files"]),
        ("a.tar", _write_tar, ["6 files", "3 samples"]),
        ("a.parquet", _write_parquet, ["3 rows"]),
        ("a.tfrec", _write_tfrecord, ["3 records"]),
    ],
)
def test_what_is_found_is_counted(
    name: str,
    write: Callable[[Path], None],
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for copy in ("quiet", "told"):
        (tmp_path / copy).mkdir()
        write(tmp_path / copy / name)
    assert len(open_source(tmp_path / "quiet" / name).list().samples) == COUNT
    assert capsys.readouterr().err == ""
    clock = itertools.count(0, 20)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert len(open_source(tmp_path / "told" / name).list().samples) == COUNT
    counted = re.findall(r"^list: (?:(\d+)(?: of 3)?) (\w+), [\d,.]+/s", capsys.readouterr().err, re.MULTILINE)
    last = {unit: number for number, unit in counted}
    assert [f"{number} {unit}" for unit, number in last.items()] == lines
    assert int(counted[0][0]) == (1 if name.endswith("tar") else COUNT)
