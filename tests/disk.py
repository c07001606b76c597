"""Fixtures for tests that read from a disk, where the others' files are in memory (see `pytest_configure`).

Linux does not say of a file in /dev/shm, or on a few other file systems, whether it is in memory, so that readers do
there as with one that is not. TMPDIR may be such a place: then another one is taken.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE

from tpucache import machine


def disk_place() -> Path | None:
    """Return a folder of whose files the system says that they are in memory; None where there is none."""
    for place in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path(__file__).parents[1] / "build"):
        with contextlib.suppress(OSError):
            place.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(4096))
                file.flush()
                if machine.is_in_page_cache(file.fileno(), 0):
                    return place
    return None


class DiskFolders:
    """Makes folders as pytest's own factory does; what is made once for all processes stays with that one."""

    def __init__(self, folder: Path, own: pytest.TempPathFactory) -> None:
        self._folder = folder
        self.getbasetemp = own.getbasetemp

    def mktemp(self, name: str) -> Path:
        """Make a folder whose name begins like this."""
        return Path(tempfile.mkdtemp(prefix=name, dir=self._folder))


@pytest.fixture(scope="session")
def tmp_path_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskFolders]:
    """pytest's, on the disk."""
    place = disk_place()
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="tpucache-tests-", dir=place) as folder,
    ):
        if place is None:  # a stand-in for what the system does not say: all that tests write is in memory
            patch.setattr(machine, "is_in_page_cache", lambda *_: True)
        yield DiskFolders(Path(folder), tmp_path_factory)


@pytest.fixture
def tmp_path(tmp_path_factory: DiskFolders) -> Iterator[Path]:
    """pytest's, on the disk."""
    path = tmp_path_factory.mktemp("test")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def cache(cache: Path, tmp_path_factory: DiskFolders) -> Path:
    """A copy on the disk. Not to be written to."""
    return Path(shutil.copytree(cache, tmp_path_factory.mktemp("caches") / "cache"))


class SmallDisk:
    """A file system of its own, in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, *options: str) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(self.path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        if done.returncode:
            pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A place to mount a file system at. Mounting needs to be root."""
    if os.geteuid():
        pytest.skip("no file system may be mounted here: not root")
    path = tmp_path / "disk"
    path.mkdir()
    yield SmallDisk(path)
    # Lazily: files of it may still be open, and a folder that stays mounted cannot be removed by anybody.
    subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True, timeout=PATIENCE)
