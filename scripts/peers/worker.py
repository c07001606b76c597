"""The peer's end of bench_read.py: writes the peer's own format, then reads turns of it on command.

Run as `read_NAME.py write DATA FOLDER`, or `read_NAME.py serve DATA FOLDER SETTING` with the setting as JSON. Serving
answers each line on stdin by a line of JSON on stdout: `check` compares a batch with the images that went in,
`go SECONDS` reads for so long and returns how many images that were. Needs numpy alone, so that it runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

Batches = Iterator[tuple[Any, Any]]

BATCH: Final = 256
SIZE: Final = 224
#: An epoch shows every image so often, because a real data set seldom begins one and ours would do it all the time.
PASSES: Final = int(os.environ.get("BENCH_PASSES", "16"))
#: Batches at the start of a turn that do not count: they were read ahead while others had theirs.
AHEAD: Final = 8
CHECKED: Final = 16
#: How many levels off on average a JPEG of quality 95 may be: 4.5 was seen of the grainiest photographs with colour at
#: half the resolution and a fast inverse transform; photographs are some tens of levels from one another.
LOSSY: Final = 6.0


def load(data: Path, mode: str | None = "r") -> tuple[np.ndarray, np.ndarray]:
    """Return the images (n, SIZE, SIZE, 3) uint8, mapped unless `mode` is None, and the labels (n,) int64."""
    return np.load(data / "images.npy", mmap_mode=mode), np.load(data / "labels.npy")


def repeated(samples: int) -> np.ndarray:
    """Return the positions of the samples, PASSES times over."""
    return np.tile(np.arange(samples), PASSES)


def run(
    batches: Callable[..., Batches],
    write: Callable[[Path, Path], None] = lambda data, folder: None,
    lossy: bool = False,
) -> None:
    """Be a peer: `batches(data, folder, **setting)` never ends, `write(data, folder)` makes what it reads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("write", "serve"))
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("setting", type=json.loads, nargs="?", default={})
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.data, arguments.folder)
        return
    lossy = lossy or arguments.setting.get("kind") == "jpeg"
    _serve(batches(arguments.data, arguments.folder, **arguments.setting), arguments.data, lossy)


def _serve(stream: Batches, data: Path, lossy: bool) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        command, *rest = line.split()
        answer = check(next(stream), data, lossy) if command == "check" else go(stream, float(rest[0]))
        print(json.dumps(answer), file=answers)


def go(stream: Batches, seconds: float) -> dict[str, Any]:
    """Read for so many seconds and count."""
    for _ in range(AHEAD):
        next(stream)
    count = touched = 0
    start = time.perf_counter()
    while (now := time.perf_counter()) < start + seconds:
        images, labels = next(stream)
        touched += touch(images, labels)
        count += BATCH
    return {"images": count, "seconds": now - start, "touched": touched}


def touch(images: Any, labels: Any) -> int:
    """Return a sum of a few bytes, so that the batch must be there. Raises ValueError when it is not one."""
    if tuple(images.shape) not in ((BATCH, SIZE, SIZE, 3), (BATCH, 3, SIZE, SIZE)) or len(labels) != BATCH:
        raise ValueError(f"a batch of {tuple(images.shape)} and {len(labels)} labels")
    return int(images[0, 0, 0, 0]) + int(images[BATCH // 2, 1, 1, 1]) + int(images[-1, -1, -1, -1])


def check(batch: tuple[Any, Any], data: Path, lossy: bool) -> dict[str, Any]:
    """Find the first images of a batch among those that went in. Raises ValueError when one is another or mislabelled.

    A lossy codec may be LOSSY levels away on average, any other must give the very bytes.
    """
    touch(*batch)
    images, labels = (np.asarray(part) for part in batch)
    if images.shape[1] == 3:
        images = images.transpose(0, 2, 3, 1)
    if images.dtype != np.uint8:
        raise ValueError(f"images of {images.dtype}")
    source, truth = load(data)
    step = slice(8, None, 16)
    thumbs = source[:, step, step].reshape(len(source), -1).astype(np.int16)
    found = []
    for image, label in zip(images[:CHECKED], labels.reshape(-1)[:CHECKED], strict=True):
        near = np.abs(thumbs - image[step, step].reshape(-1)).mean(1)
        twins = np.flatnonzero(near == near.min())
        off = min(np.abs(source[at].astype(np.int16) - image).mean() for at in twins)
        if off > (LOSSY if lossy else 0):
            raise ValueError(f"an image is {off:.2f} levels off the nearest of those that went in")
        if label not in truth[twins]:
            raise ValueError(f"sample {twins[0]} has label {truth[twins[0]]}, not {label}")
        found.append(int(twins[0]))
    if (np.diff(found) == 1).all():
        raise ValueError("the batches are not shuffled")
    return {"checked": found}
