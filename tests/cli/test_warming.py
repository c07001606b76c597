"""warmup and verify on the command line: what their logs say, and what they can do without."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from tpucache import CachedDataset
from tpucache.cli import main

# Where a cache is read there may be no image library, no lmdb and no joblib.
_BARE = """
import sys
for name in ("PIL", "lmdb", "joblib", "albumentations", "cv2", "torch"):
    sys.modules[name] = None
from tpucache import CachedDataset
from tpucache.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_verify_needs_none_of_warmups_libraries(cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BARE, "verify", str(cache)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "all sound" in done.stdout


@pytest.mark.slow
def test_a_log_tells_how_much_there_is_to_do_how_fast_it_goes_and_what_was_skipped(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(photos, tmp_path / "source")
    (source / "bee" / "bad.png").write_bytes(b"no image")
    command = ["warmup", str(source), str(tmp_path / "cache"), "--size", "16", "--jobs", "1", "--on-error", "skip"]
    assert main(command) == 0
    first, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"to do: 151 records, about [\d.]+ [kM]B \([\d,.]+ [GT]B are free\), about [\d.]+ s of one core's work", first
    )
    assert re.fullmatch(r"warmup: 151 of 151 samples, [\d,.]+/s, [\d.]+ kB, 1 skipped", last)


@pytest.mark.slow
def test_files_that_are_no_images_by_their_names_are_reported(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    source, cache = shutil.copytree(photos, tmp_path / "source"), str(tmp_path / "cache")
    (source / "bee" / "new.psd").write_bytes(b"a photograph")
    command = ["warmup", str(source), cache, "--size", "16", "--jobs", "1"]
    assert main(command) == 0
    assert "by their names: .psd 1" in capsys.readouterr().out
    assert "1 .psd" in caplog.text
    assert main(["inspect", cache, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == {".psd": 1}
    assert main(["inspect", cache]) == 0
    assert ".psd" in capsys.readouterr().out
    (source / "bee" / "newer.psd").write_bytes(b"another one")
    caplog.clear()
    assert main(command) == 0  # nothing is built, and yet nothing is passed over
    assert "2 .psd" in caplog.text


def test_what_was_repaired_is_printed(
    photos: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(cache, tmp_path / "copy")
    name = min(path.name for path in copy.glob("*.lmdb"))
    (copy / name).unlink()
    command = ["verify", str(copy), "--repair", str(photos), "--jobs", "1"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert f"{name} is missing\n{name} is repaired\n" in printed.out
    assert "repair: " in printed.err
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["repaired"] == []


def test_a_list_of_paths_comes_out_of_a_pipe(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(cache, tmp_path / "copy")
    reading, writing = os.pipe()
    os.write(writing, "\n".join(CachedDataset(cache).paths[:3]).encode())
    os.close(writing)
    assert main(["delete", str(copy), "--paths", f"/dev/fd/{reading}"]) == 0
    os.close(reading)
    assert "147 samples, 3 are deleted" in capsys.readouterr().out
