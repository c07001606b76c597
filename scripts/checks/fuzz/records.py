"""Records of every codec with anything in them, whose checksums were remade."""

from __future__ import annotations

import io
import random
import zlib
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from scripts.checks.fuzz.mutate import mutate_bytes, odd_integer
from scripts.checks.fuzz.tables import vouch, write
from scripts.checks.fuzz.target import Target, refusals
from tpucache import CachedDataset, CachedLoader, Recipe, build_cache, verify_cache
from tpucache.store.codecs import IMAGE_CODECS

_COUNT: Final = 6
_SHAPES: Final = ((16, 16, 3), (9, 21, 3), (16, 16, 1))


class _Made(NamedTuple):
    """The files of a sound cache of one codec, and its images."""

    files: dict[str, bytes]
    images: list[np.ndarray]


def prepare(folder: Path) -> list[_Made]:
    """Return small caches of each codec, in colours and in grey, of noise and of smooth images."""
    made = []
    for codec in IMAGE_CODECS:
        for height, width, channels in _SHAPES:
            if channels == 1 and codec == "yuv420":
                continue
            cache = folder / f"{codec}-{height}-{channels}"
            items = [({"image": _image(number, height, width, channels)}, number % 2) for number in range(_COUNT)]
            recipe = Recipe(size=(height, width), codec=codec, mode="rgb" if channels == 3 else "grey")
            build_cache(_items(folder, cache.name, items), cache, recipe, jobs=1)
            dataset = CachedDataset(cache)
            images = [dataset[number][0].numpy().copy() for number in range(_COUNT)]
            made.append(_Made({path.name: path.read_bytes() for path in cache.iterdir()}, images))
    return made


def _items(folder: Path, name: str, items: list[Any]) -> Path:
    from PIL import Image

    source = folder / f"source-{name}"
    for number, (fields, label) in enumerate(items):
        place = source / str(label) / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        image = fields["image"]
        Image.fromarray(image if image.shape[2] == 3 else image[..., 0]).save(place)
    return source


def _image(number: int, height: int, width: int, channels: int) -> np.ndarray:
    if number % 2:
        return np.random.default_rng(number).integers(0, 256, (height, width, channels), np.uint8)
    rows, columns = np.mgrid[:height, :width]
    return np.repeat((rows * 5 + columns * 3 + number)[..., None] % 256, channels, 2).astype(np.uint8)


def attempt(caches: list[_Made], draws: random.Random, place: Path) -> None:
    """Read a cache of which one record is changed; all others must stay what they were."""
    made = draws.choice(caches)
    files = dict(made.files)
    rows = np.load(io.BytesIO(files["index.npy"]))
    at = draws.randrange(_COUNT)
    shard = bytearray(files["v00-00000.lmdb"])
    start, length = int(rows["offset"][at]), int(rows["length"][at])
    record = mutate_bytes(bytes(shard[start : start + length]), draws)
    if draws.random() < 0.7:
        record = (record + bytes(length))[:length]  # of the length that it had
    # What is longer is written as far as nothing else is overwritten.
    room = min([int(other) for other in rows["offset"] if other > start], default=len(shard)) - start
    record = record[: max(length, room - 32)]
    shard[start : start + len(record)] = record
    rows["length"][at] = len(record)
    if draws.random() < 0.1:
        rows["length"][at] = odd_integer(draws) % 2**32
    rows["crc32"][at] = zlib.crc32(record)
    files["v00-00000.lmdb"] = bytes(shard)
    target = io.BytesIO()
    np.save(target, rows)
    files["index.npy"] = target.getvalue()
    vouch(files)
    cache = write(files, place)
    finish: Literal["host", "device"] = draws.choice(("host", "device"))
    refusals(
        lambda: _others(cache, made, at),
        lambda: CachedDataset(cache)[at],
        lambda: [len(labels) for _, labels in CachedLoader(CachedDataset(cache), 4, threads=1)],
        lambda: [len(labels) for _, labels in CachedLoader(CachedDataset(cache), 4, threads=1, finish=finish)],
        lambda: verify_cache(cache),
    )


def _others(cache: Path, made: _Made, changed: int) -> None:
    dataset = CachedDataset(cache)
    for number, image in enumerate(made.images):
        if number != changed and not np.array_equal(dataset[number][0].numpy(), image):
            raise AssertionError(f"sample {number} changed with record {changed}")


TARGETS: Final = (Target("records", prepare, attempt, 3.0),)
