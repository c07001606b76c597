"""What is renamed into place was written to the disk as a whole before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from tpucache.store.files import write_atomically


@pytest.mark.parametrize("data", [b"", b"x", bytes(3_000_000)])
def test_all_bytes_are_synced_before_the_rename_and_the_rename_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    path, synced = tmp_path / "file", []

    def sync(descriptor: int) -> None:
        content = Path(f"/proc/self/fd/{descriptor}")
        synced.append((content.is_dir() or content.read_bytes(), path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    write_atomically(path, data)
    assert synced == [(data, False), (True, True)]
    assert path.read_bytes() == data


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail(_: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="gone"):
        write_atomically(path, b"after")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"before"


def test_a_file_that_grows_too_large_is_named_with_what_to_do_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = (
        "import resource, sys; from pathlib import Path; from tpucache.store.files import write_atomically, "
        "append_chunks; import hashlib; resource.setrlimit(resource.RLIMIT_FSIZE, (9999, resource.RLIM_INFINITY))\n"
        "path = Path(sys.argv[1])\n"
        "for write in (lambda: write_atomically(path, bytes(20000)), "
        "lambda: append_chunks(path.with_name('other'), [bytes(20000)], hashlib.sha256())):\n"
        "    try: write()\n"
        "    except OSError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    first, second = done.stdout.splitlines()
    for line, name in ((first, "file"), (second, "other")):
        assert "File too large" in line
        assert line.endswith(f"'{tmp_path / name}'")
    assert path.read_bytes() == b"old"
    assert {each.name for each in tmp_path.iterdir()} == {"file", "other"}
