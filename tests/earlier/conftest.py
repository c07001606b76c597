"""What the two commits wrote, unpacked, and the commands that continue it."""

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
    """Return the folder with what a commit wrote; it is not to be written to."""
    folders: dict[str, Path] = {}

    def of(commit: str) -> Path:
        if commit not in folders:
            folders[commit] = tmp_path_factory.mktemp(commit)
            with zipfile.ZipFile(HERE / "data" / f"{commit}.zip") as archive:
                archive.extractall(folders[commit])
        return folders[commit]

    return of


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a command on plain torch, with the network that the runs are of on the path."""
    monkeypatch.syspath_prepend(HERE.parent / "training")

    def run(*arguments: str | Path) -> None:
        assert main([*map(str, arguments), "--backend", "torch"]) == 0

    return run
