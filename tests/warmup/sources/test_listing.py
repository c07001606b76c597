"""A long listing reports how far it is, whatever the samples lie in; a short one says nothing."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from made import png, tar_of, write_records, zip_of

from tpucache.warmup.sources import open_source

COUNT = 3


FILES = {f"{number}.png": png(number) for number in range(COUNT)}
LABELS = {f"{number}.cls": b"1" for number in range(COUNT)}


def _write_parquet(path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"image": [*FILES.values()]}), path)


@pytest.mark.parametrize(
    ("name", "write", "lines"),
    [
        ("a.zip", lambda path: path.write_bytes(zip_of(FILES)), ["3 files"]),
        ("a.tar", lambda path: path.write_bytes(tar_of(FILES | LABELS)), ["6 files", "3 samples"]),
        ("a.parquet", _write_parquet, ["3 rows"]),
        ("a.tfrec", lambda path: write_records(path, *({"image": data} for data in FILES.values())), ["3 records"]),
    ],
)
def test_what_is_found_is_counted(
    name: str,
    write: Callable[[Path], object],
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
