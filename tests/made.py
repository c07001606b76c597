"""Sources, pictures and archives in a few words."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import io
import sys
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tpucache import Manifest, Recipe, build_cache
from tpucache.errors import SampleError
from tpucache.warmup.records.pillow_modes import find_simplejpeg
from tpucache.warmup.records.presize import find_cykooz_resizer
from tpucache.warmup.sources.source import Item, Listing, Sample


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@dataclass
class Made:
    """A source of what a function makes of each number."""

    count: int
    item: Callable[[int], Item]
    label: Callable[[int], Any] = lambda number: None  # what the listing says
    name: str = "{}"
    bytes: int = 0
    broken: Collection[int] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    loaded: list[int] = field(default_factory=list)

    def list(self) -> Listing:
        numbers = range(self.count)
        samples = [Sample(at, self.name.format(at), self.label(at), self.bytes) for at in numbers]
        return Listing(samples, **self.facts)

    def load(self, sample: Sample) -> Item:
        self.loaded.append(sample.number)
        if sample.number in self.broken:
            raise SampleError(sample.path, "is broken")
        return self.item(sample.number)


def labelled(labels: Any, classes: tuple[str, ...] = (), columns: Mapping[str, Any] | None = None) -> Made:
    """Return a source whose samples alone state these labels."""
    return Made(
        len(labels), lambda at: Item({"tokens": np.arange(4)}, labels[at], columns or {}), facts={"classes": classes}
    )


def encode(
    picture: Image.Image | npt.NDArray[Any], kind: str = "PNG", orientation: int | None = None, **options: Any
) -> bytes:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    if orientation is not None:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = orientation
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def jpeg(picture: Image.Image, **options: Any) -> bytes:
    return encode(picture, "JPEG", **{"quality": 92, **options})


def png(number: int = 0, size: tuple[int, int] = (8, 8)) -> bytes:
    """Return a picture whose colour tells the number."""
    return encode(Image.new("RGB", size, (number * 9, 80, 30)))


def tar_of(files: Mapping[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return target.getvalue()


def zip_of(files: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return target.getvalue()


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


SMALL = Recipe(size=8)


def build_here(source: Any, cache: str | Path, recipe: Recipe = SMALL, **options: Any) -> Manifest:
    return build_cache(source, cache, recipe, jobs=1, **options)


def smooth_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Draw detail at every scale, as photographs have it, so that a shift of half a pixel shows."""
    rng = np.random.default_rng([seed, width, height])
    total = np.zeros((height, width, 3))
    for octave in range(8):
        cells = rng.integers(0, 256, (2 << octave, 3 << octave, 3), np.uint8)
        layer = Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)
        total += (np.asarray(layer, np.float64) - 128) / 1.4**octave
    return Image.fromarray(np.clip(total * 0.4 + 128, 0, 255).astype(np.uint8))


def write_photos(
    root: Path, count: int, classes: Sequence[str] = ("cat", "dog", "emu"), size: Any = (150, 100)
) -> Path:
    for number in range(count):
        turn = 1 + number % 8 if number % 4 == 3 else None
        folder = root / classes[number % len(classes)] if classes else root
        write(folder / f"{number:04d}.jpg", jpeg(smooth_image(*size, seed=number), orientation=turn))
    return root


def write_rows(path: Path, *rows: str) -> Path:
    return write(path, "\n".join(rows) + "\n")


def example(features: Mapping[str, Any], lists: Mapping[str, Any] | None = None) -> bytes:
    """Return a `tf.train.Example`, or with lists of features a SequenceExample, as the library tfrecord writes it."""
    writer, kinds = pytest.importorskip("tfrecord").TFRecordWriter, {bytes: "byte", int: "int", float: "float"}
    several = {name: value if isinstance(value, list) else [value] for name, value in features.items()}
    typed = {name: (values, kinds[type(values[0])] if values else "float") for name, values in several.items()}
    if lists is None:
        return bytes(writer.serialize_tf_example(typed))
    return bytes(writer.serialize_tf_sequence_example(typed, {name: (rows, "int") for name, rows in lists.items()}))


def framed(*records: bytes) -> bytes:
    checksum, parts = pytest.importorskip("tfrecord").TFRecordWriter.masked_crc, list[bytes]()
    for record in records:
        length = len(record).to_bytes(8, "little")
        parts += [length, checksum(length), record, checksum(record)]
    return b"".join(parts)


def write_records(path: Path, *records: bytes | Mapping[str, Any]) -> Path:
    """Write a TFRecord file of these records, or of Examples of these features."""
    return write(path, framed(*(each if isinstance(each, bytes) else example(each) for each in records)))


def digests(folder: Path) -> dict[str, str]:
    """Return what tests compare caches by."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "times.json"
    }


@contextlib.contextmanager
def failing_rename(pattern: str, error: BaseException, after: int = 0) -> Iterator[None]:
    real, renamed = Path.replace, []

    def replace(path: Path, target: Path) -> Path:
        if fnmatch.fnmatch(Path(target).name, pattern):
            if len(renamed) >= after:
                raise error
            renamed.append(target)
        return real(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        yield


@contextlib.contextmanager
def without(*libraries: str) -> Iterator[None]:
    finders = (find_simplejpeg, find_cykooz_resizer)
    with pytest.MonkeyPatch.context() as patch:
        for name in libraries:
            patch.setitem(sys.modules, name, None)
        for find in finders:
            find.cache_clear()
        yield
    for find in finders:
        find.cache_clear()
