"""What a release wrote, unpacked, and the commands that continue it."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tpucache.cli import main

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for pictures.py


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder with what a release wrote; it is not to be written to."""
    folders: dict[str, Path] = {}

    def of(release: str) -> Path:
        if release not in folders:
            folders[release] = tmp_path_factory.mktemp(release)
            with zipfile.ZipFile(HERE / "data" / f"{release}.zip") as archive:
                archive.extractall(folders[release])
        return folders[release]

    return of


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a command on plain torch, with the network that the runs are of on the path."""
    monkeypatch.syspath_prepend(HERE.parent / "training")

    def run(*arguments: str | Path) -> None:
        assert main([*map(str, arguments), "--backend", "torch"]) == 0

    return run
