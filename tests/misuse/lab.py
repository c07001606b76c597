"""What these tests work with: generated photographs and caches of them, a folder of their own, and the command line."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from patience import PATIENCE
from PIL import Image
from refusals import Done, succeeded

from tpucache import CachedDataset, CachedLoader
from tpucache.cli import main

SIDE: Final = 16
COUNT: Final = 24
CLASSES: Final = ("ant", "bee", "cat")
#: What a process that is started for a test may take, in seconds; one that takes longer hangs.
SECONDS: Final = PATIENCE
MODULE: Final = """
import os
from torch import nn

calls = 0


def invert(image, generator):
    global calls
    calls += 1
    if calls == int(os.environ.get("LAB_KILL_AT", 0)):
        os.kill(os.getpid(), 9)
    return 255 - image


def tiny(outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, outputs))
"""
INVERT: Final = ("--variants", 2, "--augment", "lab_module:invert")
TRAIN: Final = (
    "--backend", "torch", "--model", "lab_module:tiny", "--batch-size", "8", "--epochs", "1", "--lr", "0.01",
)  # fmt: skip
#: The program of a process that runs a command, after the code of `first`.
APART: Final = """
import os, runpy, sys
sys.path[:0] = [os.getcwd(), {shared!r}]
{first}
sys.argv[0] = "tpucache"
runpy.run_module("tpucache", run_name="__main__", alter_sys=True)
"""
_WITHOUT: Final = """
libraries = {libraries!r}
for name in list(sys.modules):
    if name.split(".")[0] in (*libraries, "tpucache"):
        del sys.modules[name]
sys.modules.update(dict.fromkeys(libraries))  # None is what makes an import fail
"""


def without(*libraries: str) -> str:
    return _WITHOUT.format(libraries=libraries)


def pixels(number: int, side: int = SIDE) -> np.ndarray:
    return np.random.default_rng([number, side]).integers(0, 256, (side, side, 3), dtype=np.uint8)


def write_photos(folder: Path, count: int = COUNT, classes: tuple[str, ...] = CLASSES, first: int = 0) -> Path:
    for number in range(first, first + count):
        path = folder / (classes[number % len(classes)] if classes else "") / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number)).save(path)
    return folder


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def table_rows(count: int = COUNT) -> list[dict[str, Any]]:
    return [{"path": f"{class_of(n)}/{n:04d}.png", "label": class_of(n), "fold": n % 3} for n in range(count)]


def files_of(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def flip(path: Path, share: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 1
    path.write_bytes(data)


def exchange_bytes(left: Path, right: Path) -> None:
    contents = left.read_bytes(), right.read_bytes()
    size = max(map(len, contents))
    for path, content in zip((left, right), reversed(contents), strict=True):
        path.write_bytes(content.ljust(size, b"\0"))


def array(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


def assert_same(found: Any, expected: np.ndarray, what: str = "") -> None:
    np.testing.assert_array_equal(np.asarray(found), expected, err_msg=what, strict=True)


def number_of(path: str) -> int:
    return int(Path(path.split("#", maxsplit=1)[0]).stem)


def class_of(number: int) -> str:
    return CLASSES[number % len(CLASSES)]


def rotated_class_of(number: int) -> str:
    return CLASSES[(number + 1) % len(CLASSES)]


def check_photos(dataset: CachedDataset, classes: Callable[[int], str] | None, numbers: Iterable[int]) -> None:
    found = [number_of(path) for path in dataset.paths]
    assert sorted(found) == sorted(numbers)
    loader = CachedLoader(dataset, 7, threads=2)
    images, labels = zip(*loader, strict=True) if found else ((), ())
    rows = [image for batch in images for image in batch]
    names = [label for batch in labels for label in batch.tolist()]
    for position, number in enumerate(found):
        image, label = dataset[position]
        name = dataset.classes[int(label)] if classes else None
        assert_same(array(image), pixels(number), dataset.paths[position])
        assert_same(array(rows[position]), pixels(number), f"{dataset.paths[position]} in a batch")
        assert name == (classes(number) if classes else None)
        assert names[position] == int(label)


class Shared:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "lab_module.py").write_text(MODULE)

    @functools.cached_property
    def photos(self) -> Path:
        return write_photos(self.folder / "photos")

    @functools.cached_property
    def rotated(self) -> Path:
        return write_photos(self.folder / "rotated", classes=(*CLASSES[1:], CLASSES[0]))

    @functools.cached_property
    def cache(self) -> Path:
        return self._warmup("cache", self.photos)

    @functools.cached_property
    def relabelled(self) -> Path:
        return self._warmup("relabelled", self.rotated)

    @functools.cached_property
    def augmented(self) -> Path:
        return self._warmup("augmented", self.photos, *INVERT)

    @functools.cached_property
    def folds(self) -> Path:
        rows = [{**row, "fold": n // 3 % 3, "age": 20 + n} for n, row in enumerate(table_rows())]
        table = write_csv(self.folder / "train.csv", rows)
        return self._warmup("folds", table, "--root", self.photos, "--label-col", "label", "--fold-col", "fold")

    @functools.cached_property
    def run(self) -> Path:
        folder = self.folder / "run"
        succeeded(command("train", self.cache, "--run", folder, "--valid", "0.25", *TRAIN))
        return folder

    def _warmup(self, name: str, source: Path, *words: object) -> Path:
        folder = self.folder / name
        succeeded(command("warmup", source, folder, "--size", SIDE, "--jobs", 1, *words))
        return folder


def command(*words: object) -> Done:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:  # argparse has said why
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    printed, said = (stream.buffer.getvalue().decode() for stream in (out, err))
    return Done(status, printed, said)


class Lab:
    def __init__(self, folder: Path, shared: Shared, run: Callable[..., Done] = command) -> None:
        self.folder = folder
        self.shared = shared
        self._run = run

    def command(self, *words: object, **how: str) -> Done:
        return self._run(*words, **how)

    def warmup(self, source: object, cache: object, *words: object, **how: str) -> Done:
        return self._run("warmup", source, cache, "--size", SIDE, "--jobs", 1, *words, **how)

    def train(self, cache: Path, run: Path, *words: object, **how: str) -> Done:
        return self._run("train", cache, "--run", run, *TRAIN, *words, **how)

    def copy(self, folder: Path, name: str = "copy") -> Path:
        """Copy a shared folder, so that it may be damaged."""
        return Path(shutil.copytree(folder, self.folder / name))


def forget_modules_of(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]
