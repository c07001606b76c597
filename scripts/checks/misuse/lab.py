"""What rows work with: generated photographs and caches of them, a folder of their own, and the command line."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib
import os
import pkgutil
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

import tpucache
from scripts.checks.misuse.outcome import Done, Wrong, equal, succeeded
from tpucache import CachedDataset, CachedLoader

SIDE: Final = 16
COUNT: Final = 24
CLASSES: Final = ("ant", "bee", "cat")
SECONDS: Final = 60.0
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
TRAIN: Final = (
    "--backend",
    "torch",
    "--model",
    "lab_module:tiny",
    "--batch-size",
    "8",
    "--epochs",
    "1",
    "--lr",
    "0.01",
)


def pixels(number: int, side: int = SIDE) -> np.ndarray:
    """Return the pixels of photograph `number`: uint8 noise (side, side, 3), another one for each number."""
    return np.random.default_rng([number, side]).integers(0, 256, (side, side, 3), dtype=np.uint8)


def write_photos(folder: Path, count: int = COUNT, classes: tuple[str, ...] = CLASSES, first: int = 0) -> Path:
    """Write photographs as PNG files, a folder a class, or flat without classes; return the folder."""
    for number in range(first, first + count):
        path = folder / (classes[number % len(classes)] if classes else "") / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number)).save(path)
    return folder


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write a table whose columns are the first row's keys."""
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def files_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file at or below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def array(image: torch.Tensor) -> np.ndarray:
    """Return an image (C, H, W) as an array (H, W, C)."""
    return image.permute(1, 2, 0).numpy()


def number_of(path: str) -> int:
    """Return the number of the photograph in a file."""
    return int(Path(path.split("#", maxsplit=1)[0]).stem)


def check_photos(dataset: CachedDataset, classes: Callable[[int], str] | None, numbers: Iterable[int]) -> str:
    """Compare a dataset with the photographs of these numbers: every pixel, class and path, by dataset and loader.

    `classes` gives the class of a number; None where nothing is labelled. Returns what was compared. Raises Wrong.
    """
    found = [number_of(path) for path in dataset.paths]
    equal("the samples", sorted(found), sorted(numbers))
    loader = CachedLoader(dataset, 7, threads=2)
    images, labels = zip(*loader, strict=True) if found else ((), ())
    rows = [image for batch in images for image in batch]
    names = [label for batch in labels for label in batch.tolist()]
    for position, number in enumerate(found):
        image, label = dataset[position]
        name = dataset.classes[int(label)] if classes else None
        equal(f"pixels of {dataset.paths[position]}", array(image), pixels(number))
        equal(f"pixels of {dataset.paths[position]} in a batch", array(rows[position]), pixels(number))
        equal(f"class of {dataset.paths[position]}", name, classes(number) if classes else None)
        equal(f"label of {dataset.paths[position]} in a batch", names[position], int(label))
    return f"{len(found)} samples: pixels, labels and paths are those that were drawn"


def class_of(number: int) -> str:
    """Return the class that a photograph was written into."""
    return CLASSES[number % len(CLASSES)]


def rotated_class_of(number: int) -> str:
    """Return the class of a photograph in the relabelled cache."""
    return CLASSES[(number + 1) % len(CLASSES)]


class Running:
    """A command in a process of its own, forked so that nothing is imported again."""

    def __init__(self, folder: Path, words: Iterable[object], before: Callable[[], object] | None = None) -> None:
        self._streams = [folder / f".{stream}-{time.monotonic_ns()}" for stream in ("out", "err")]
        self.pid = os.fork()
        if not self.pid:
            _run_command([str(word) for word in words], self._streams, before)

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = SECONDS) -> Done:
        """Wait for its end. Raises Wrong, and kills it, when it takes too long."""
        until = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > until:
                self.signal(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise Wrong(f"the command hangs: it was killed after {seconds:.0f} s")
            time.sleep(0.005)
        out, err = (path.read_text(errors="replace") if path.exists() else "" for path in self._streams)
        for path in self._streams:
            path.unlink(missing_ok=True)
        return Done(os.waitstatus_to_exitcode(status), out, err)


def _run_command(words: list[str], streams: list[Path], before: Callable[[], object] | None) -> None:
    """Run `python -m tpucache WORDS` in this process, and end it as Python would."""
    status = 1
    try:
        for number, path in enumerate(streams, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
        if before is not None:
            before()
        sys.stdin, sys.stdout, sys.stderr = (open(at, mode, closefd=False) for at, mode in enumerate("rww"))  # noqa: SIM115
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = ["tpucache", *words]
        runpy.run_module("tpucache", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # Python would print any other
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # it is closed, or nobody reads it
                stream.flush()
        os._exit(status)


class Shared:
    """Photographs, caches and a run that all rows read and none changes, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lab_module.py").write_text(MODULE)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # for lab_module, here and in what is forked from here

    def make_all(self) -> None:
        """Make everything, before rows run side by side; import everything, so that what is forked has it."""
        for module in pkgutil.walk_packages(tpucache.__path__, "tpucache."):
            if not module.name.endswith(("xla", "__main__")):
                importlib.import_module(module.name)
        for make in (self.cache, self.relabelled, self.folds, self.augmented, self.run):
            make()

    def photos(self) -> Path:
        """24 photographs of 16x16 pixels in three classes."""
        return self._make("photos", write_photos)

    def cache(self) -> Path:
        """They as a raw cache in shards of 8 samples or so, without augmented variants."""
        return self._warmup("cache", self.photos())

    def relabelled(self) -> Path:
        """The same photographs, each in another class."""
        photos = self._make("rotated", lambda folder: write_photos(folder, classes=(*CLASSES[1:], CLASSES[0])))
        return self._warmup("relabelled", photos)

    def augmented(self) -> Path:
        """The photographs with two variants, both of them inverted."""
        return self._warmup("augmented", self.photos(), "--variants", 2, "--augment", "lab_module:invert")

    def table(self) -> Path:
        """A table of the photographs: path, label, fold 0 to 2 of equal sizes, age."""
        rows = [
            {"path": f"{class_of(n)}/{n:04d}.png", "label": class_of(n), "fold": n // 3 % 3, "age": 20 + n}
            for n in range(COUNT)
        ]
        return (
            write_csv(self.photos() / "train.csv", rows)
            if not (self.photos() / "train.csv").exists()
            else (self.photos() / "train.csv")
        )

    def folds(self) -> Path:
        """A cache of the table, with folds."""
        return self._warmup("folds", self.table(), "--label-col", "label", "--fold-col", "fold")

    def run(self) -> Path:
        """A finished run on the cache, validated on a quarter of it."""
        cache = self.cache()
        return self._command("run", lambda to: ["train", cache, "--run", to, "--valid", "0.25", *TRAIN])

    def _make(self, name: str, make: Callable[[Path], object]) -> Path:
        folder = self.folder / name
        if not folder.exists():
            make(folder)
        return folder

    def _warmup(self, name: str, source: Path, *words: object) -> Path:
        return self._command(name, lambda to: ["warmup", source, to, "--size", SIDE, "--jobs", 1, *words])

    def _command(self, name: str, words: Callable[[Path], list[object]]) -> Path:
        return self._make(name, lambda folder: succeeded(Running(self.folder, words(folder)).wait()))


class Lab:
    """One row's own folder, and what it shares with the others."""

    def __init__(self, folder: Path, shared: Shared) -> None:
        self.folder = folder
        self.shared = shared

    def command(self, *words: object, before: Callable[[], object] | None = None) -> Done:
        """Run `python -m tpucache WORDS` to its end; `before` is called first, in its process."""
        return self.start(*words, before=before).wait()

    def start(self, *words: object, before: Callable[[], object] | None = None) -> Running:
        """Start it, and continue."""
        return Running(self.folder, words, before)

    def warmup(self, source: object, cache: object, *words: object, before: Any = None) -> Done:
        """Run warmup at 16x16 pixels in one process."""
        return self.command("warmup", source, cache, "--size", SIDE, "--jobs", 1, *words, before=before)

    def train(self, cache: Path, run: Path, *words: object, before: Any = None) -> Done:
        """Run train with a tiny model on plain torch, for one epoch; later options win."""
        return self.command("train", cache, "--run", run, *TRAIN, *words, before=before)

    def copy(self, folder: Path, name: str = "copy") -> Path:
        """Copy a shared folder, so that it may be damaged."""
        return Path(shutil.copytree(folder, self.folder / name))


def without(*libraries: str) -> Callable[[], None]:
    """Return a function that makes importing these libraries fail in the process that calls it."""

    def hide() -> None:
        for name in list(sys.modules):
            if name.split(".")[0] in (*libraries, "tpucache"):
                del sys.modules[name]
        sys.modules.update(dict.fromkeys(libraries))  # type: ignore[arg-type]  # None is what makes an import fail

    return hide
