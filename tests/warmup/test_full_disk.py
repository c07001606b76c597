"""A disk that is full in the middle of a warmup: finished work is kept, and with room again the next run ends alike."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from disk import SmallDisk
from made import build_here, digests, write_photos
from patience import PATIENCE
from thorough import thorough

from tpucache import BuildError, Recipe, build_cache
from tpucache.cli import main
from tpucache.warmup.sources import FolderSource
from tpucache.warmup.sources.source import Listing

pytestmark = pytest.mark.slow


# Blocks of 50 and 51 samples: shards of 0.84 MB that differ by a record, out of spooled chunks of 0.62 MB.
_SAMPLES = 101
_SIZE = 64
_RECIPE = Recipe(size=_SIZE)

#: LMDB calls it an input/output error when only a part of what it writes is taken.
FULL = r"^[^\n]*(No space left|Input/output error \(0\.\d MB are free\))[^\n]*make room[^\n]*again[^\n]*$"

# A warmup whose files may not grow beyond a size.
_LIMITED = """
import resource, sys
sys.dont_write_bytecode = True  # a part of a .pyc would be taken for all of it
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from tpucache.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("full") / "photos", _SAMPLES, size=(80, 70))


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("whole") / "cache"
    build_here(photos, cache, _RECIPE)
    assert [path.name for path in sorted(cache.glob("*.lmdb"))] == ["v00-00000.lmdb", "v00-00001.lmdb"]
    return cache


def finished_shards(cache: Path) -> dict[str, tuple[int, int]]:
    receipts = {path.name for path in (cache / ".warmup").glob("shard-*.npz")}
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in cache.glob("*.lmdb")
        if (cache / "manifest.json").exists() or f"shard-{path.stem[4:]}-v00{path.stem[1:3]}.npz" in receipts
    }


class Unsized(FolderSource):
    def list(self) -> Listing:
        found = super().list()
        return dataclasses.replace(found, samples=[dataclasses.replace(each, bytes=0) for each in found.samples])


@pytest.mark.parametrize(
    ("kind", "kilobytes", "jobs"),
    [
        (FolderSource, 1500, 1),
        *thorough(*((FolderSource, size, 1) for size in (40, 900))),
        (Unsized, 1700, 1),
        *thorough(*((Unsized, size, 1) for size in (40, 300, 900))),
        *thorough((Unsized, 40, 2), (Unsized, 1700, 2)),
    ],
)
def test_a_disk_that_fills_up_is_reported_and_with_room_again_the_run_continues(
    photos: Path,
    whole: Path,
    disk: SmallDisk,
    kilobytes: int,
    kind: type[FolderSource],
    jobs: int,
) -> None:
    source = kind(photos)
    disk.mount(f"size={kilobytes}k")
    cache = disk.path / "cache"
    with pytest.raises(BuildError, match=FULL):
        build_cache(source, cache, _RECIPE, jobs=jobs)
    kept = finished_shards(cache)
    if kilobytes == 1500:
        assert list(kept) == ["v00-00000.lmdb"]
    assert not (cache / "manifest.json").exists()
    disk.mount("remount", "size=16m")
    build_cache(source, cache, _RECIPE, jobs=jobs)
    assert kept.items() <= finished_shards(cache).items()
    shards = {name: digest for name, digest in digests(whole).items() if name.endswith(".lmdb")}
    assert shards.items() <= digests(cache).items()


def test_too_little_room_is_reported_before_anything_is_built(
    photos: Path, disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.mount("size=1m")
    command = ["warmup", str(photos), str(disk.path / "cache"), "--size", str(_SIZE), "--jobs", "1", "--shard-mb", "1"]
    assert main(command) == 1
    assert "make room" in capsys.readouterr().err.splitlines()[-1]
    assert finished_shards(disk.path / "cache") == {}
    disk.mount("remount", "size=16m")
    assert main(command) == 0


@pytest.mark.parametrize(
    ("limit", "jobs"), [("spool", "1"), *thorough(("spool", "2"), ("shard", "2")), ("last shard", "1")]
)
def test_a_file_that_may_not_grow_is_reported_and_without_the_limit_the_run_continues(
    photos: Path, whole: Path, tmp_path: Path, limit: str, jobs: str
) -> None:
    first = (whole / "v00-00000.lmdb").stat().st_size
    most = {"spool": 20_000, "shard": first - 1, "last shard": first}[limit]
    cache = tmp_path / "cache"
    options = ["warmup", str(photos), str(cache), "--size", str(_SIZE), "--jobs", jobs]
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(most), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    # One line, not always the last: loky's resource tracker may complain behind it, as it ends.
    reason = r"(File too large|Input/output error \([\d,.]+ MB are free\))"
    assert re.search(rf"{reason}.*make room or repair the disk, then run the same", done.stderr), done.stderr
    kept = finished_shards(cache)
    if (limit, jobs) == ("last shard", "1"):
        assert list(kept) == ["v00-00000.lmdb"]
    assert not (cache / "manifest.json").exists()
    build_here(photos, cache, _RECIPE)
    assert kept.items() <= finished_shards(cache).items()
    assert digests(cache) == digests(whole)
