"""What the peers of the read benchmark share: writes the peer's own format, then reads turns of it. Needs numpy alone.

Three commands: `write` makes what the peer reads, `check` compares a batch with the images that went in, `go SECONDS`
reads for so long and returns how many images that were.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from scripts.bench.peers.protocol import Commands, Role, Setting

Array = np.ndarray[Any, Any]
Batches = Iterator[tuple[Any, Any]]

BATCH: Final = int(os.environ.get("BENCH_BATCH", "256"))
SIZE: Final = int(os.environ.get("BENCH_SIZE", "224"))
#: An epoch shows every image so often, because a real data set seldom begins one and ours would do it all the time.
PASSES: Final = int(os.environ.get("BENCH_PASSES", "16"))
#: Batches at the start of a turn that do not count: they were read ahead while others had theirs.
AHEAD: Final = 8
CHECKED: Final = 16
#: How many levels off on average a JPEG of quality 90 may be: 8.4 was seen of noise; photographs are some tens of
#: levels from one another.
LOSSY: Final = 10.0


def load(data: Path, mode: Literal["r"] | None = "r") -> tuple[Array, Array]:
    """Return the images (n, SIZE, SIZE, 3) uint8, mapped unless `mode` is None, and the labels (n,) int64."""
    return np.load(data / "images.npy", mmap_mode=mode), np.load(data / "labels.npy")


def repeated(samples: int) -> Array:
    """Return the positions of the samples, PASSES times over."""
    return np.tile(np.arange(samples), PASSES)


def reader(
    batches: Callable[..., Batches],
    write: Callable[[Path, Path], None] = lambda data, folder: None,
    lossy: bool = False,
    finish: Callable[[Any, Path, str], Any] | None = None,
) -> Role:
    """Return the role of `batches(data, folder, **setting)`, without end; `write(data, folder)` makes what it reads.

    `finish(images, data, kind)` makes images of packed ones, which then are what is checked.
    """

    def start(setting: Setting) -> Commands:
        data, folder = Path(setting.pop("data")), Path(setting.pop("folder"))
        kind = setting.get("kind", "")
        most = LOSSY if lossy or kind.startswith(("jpeg", "dct", "yuv")) else 0.0

        @functools.cache
        def stream() -> Batches:
            return batches(data, folder, **setting)

        def look(_: str) -> dict[str, Any]:
            images, labels = next(stream())
            return check((finish(images, data, kind) if finish else images, labels), data, most)

        def make(_: str) -> dict[str, Any]:
            write(data, folder)
            return {"written": str(folder)}

        return {"write": make, "check": look, "go": lambda seconds: go(stream(), float(seconds))}

    return start


def go(stream: Batches, seconds: float) -> dict[str, Any]:
    """Read for a number of seconds and count."""
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
    shape = tuple(images.shape)
    is_packed = len(shape) == 2 and shape[0] == BATCH
    is_image = shape in ((BATCH, SIZE, SIZE, 3), (BATCH, 3, SIZE, SIZE))
    if not (is_packed or is_image) or len(labels) != BATCH:
        raise ValueError(f"a batch of {shape} and {len(labels)} labels")
    if is_packed:
        return int(images[0, 0]) + int(images[BATCH // 2, 1]) + int(images[-1, -1])
    return int(images[0, 0, 0, 0]) + int(images[BATCH // 2, 1, 1, 1]) + int(images[-1, -1, -1, -1])


def check(batch: tuple[Any, Any], data: Path, most: float) -> dict[str, Any]:
    """Find the first images of a batch among those that went in. Raises ValueError when one is another or mislabelled.

    It may be `most` levels away on average; 0 asks for the very bytes. `psnr` is in dB, the mean of these images, None
    where nothing was lost.
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
    found, losses = [], []
    for image, label in zip(images[:CHECKED], labels.reshape(-1)[:CHECKED], strict=True):
        near = np.abs(thumbs - image[step, step].reshape(-1)).mean(1)
        twins = np.flatnonzero(near == near.min())
        differences = [source[at].astype(np.int16) - image for at in twins]
        off = min(np.abs(difference).mean() for difference in differences)
        losses.append(min(np.square(difference, dtype=np.int64).mean() for difference in differences))
        if off > most:
            raise ValueError(f"an image is {off:.2f} levels off the nearest of those that went in")
        if label not in truth[twins]:
            raise ValueError(f"sample {twins[0]} has label {truth[twins[0]]}, not {label}")
        found.append(int(twins[0]))
    if (np.diff(found) == 1).all():
        raise ValueError("the batches are not shuffled")
    psnr = [10 * np.log10(255**2 / loss) for loss in losses if loss]
    return {"checked": found, "psnr": float(np.mean(psnr)) if psnr else None}
