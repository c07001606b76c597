"""Files that are opened for reading are regular files: nothing waits for a pipe, or reads a device without end."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from opened import open_files

from tpucache.store import files
from tpucache.store.growing import ask_for, list_asked, take_asked

OPENERS = [files.OpenFile, files.read_file, files.read_text, files.sha256_file, files.open_regular]


@pytest.mark.parametrize("open_it", OPENERS, ids=lambda each: each.__name__)
def test_only_a_regular_file_is_opened(open_it, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    paths = [tmp_path / "pipe", tmp_path / "socket", Path("/dev/zero"), tmp_path, tmp_path / "missing"]
    for path in paths:
        with pytest.raises(OSError, match=path.name):
            open_it(path)
    assert not open_files(tmp_path)
    with pytest.raises(OSError, match="is a pipe, not a regular file: write its contents to a file first"):
        open_it(tmp_path / "pipe")


@pytest.mark.parametrize("size", [0, 3, 4, 5 << 20])
def test_a_file_that_is_larger_than_it_may_be_is_not_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    assert len(files.read_file(path)) == len(files.read_file(path, size)) == size
    if size > 3:
        with pytest.raises(OSError, match=f"it has {size:,} bytes, and at most 3 are read.*file"):
            files.read_file(path, 3)


@pytest.mark.parametrize("kind", ["pipe", "huge shape", "objects", "text", "two dimensions", "gone"])
def test_a_hostile_request_for_records_asks_for_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "wanted-1.npy"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "huge shape":
        path.write_bytes(
            b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr': '<i8', 'fortran_order': False, 'shape': (70368744177664,), }  \n"
        )
    elif kind != "gone":
        values = {"objects": [None], "text": ["a"], "two dimensions": [[1, 2]]}[kind]
        np.save(path, np.array(values))
    assert take_asked(path, 9).tolist() == []


def test_a_request_for_records_is_taken_once(tmp_path: Path) -> None:
    ask_for(tmp_path, np.array([7, 9, -1, 2]))
    (name,) = list_asked(tmp_path)
    assert take_asked(tmp_path / name, 9).tolist() == [7, 2]
    assert list_asked(tmp_path) == []


# Runs commands in one process, which must not take long, and prints what became of each.
COMMANDS = """
import contextlib, io, json, sys
from tpucache.cli import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            status = main(words)
        except SystemExit as stop:
            status = stop.code
    print(json.dumps([status, said.getvalue().splitlines()[-1:]]))
"""


@pytest.mark.slow
def test_no_command_waits_for_a_pipe(photos, cache, tmp_path, run_with_torch):
    pipe = tmp_path / "pipe"
    for name in ("pipe", "pipe.csv", "pipe.json", "pipe.zip", "pipe.tar", "pipe.tfrec", "pipe.parquet"):
        os.mkfifo(tmp_path / name)
    broken = {}
    for name in ("manifest.json", "index.npy", "samples.npz", "v00-00000.lmdb"):
        broken[name] = tmp_path / name.partition(".")[0]
        shutil.copytree(cache, broken[name])
        (broken[name] / name).unlink()
        os.mkfifo(broken[name] / name)
    table = tmp_path / "table.csv"
    table.write_text("path,label\npipe,0\n")
    built = tmp_path / "built"
    commands = [
        ["warmup", photos, built, "--classes", pipe],
        ["warmup", photos, built, "--config", pipe],
        ["warmup", photos, built, "--boxes", pipe],
        ["warmup", photos, built, "--like", broken["manifest.json"]],
        ["warmup", photos, built, "--variants", "1", "--augment", tmp_path / "pipe.json"],
        ["warmup", photos, built, "--mask-colours", pipe],
        ["warmup", table, built, "--path-col", "path", "--label-col", "label"],
        *(["warmup", tmp_path / f"pipe.{kind}", built] for kind in ("csv", "zip", "tar", "tfrec", "parquet")),
        ["relabel", cache, tmp_path / "pipe.csv", "--label-col", "label"],
        *(["verify", each] for each in broken.values()),
        ["inspect", broken["manifest.json"]],
        *(["preview", each, "-o", tmp_path / "sheet.png"] for name, each in broken.items() if name != "manifest.json"),
    ]
    done = run_with_torch(COMMANDS, json.dumps([[*map(str, words)] for words in commands]))
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(commands)
    for words, (status, said) in zip(commands, found, strict=True):
        assert status in (1, 2), words
        assert said, words
        assert "tpucache" in said[0], words
