"""Adds the boxes of a COCO JSON file to the images of any source."""

from __future__ import annotations

import dataclasses
import logging
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SampleError, SourceError
from tpucache.store.ahead import cached_for_threads
from tpucache.store.fields import BOXES
from tpucache.store.files import read_file
from tpucache.text import parse_json
from tpucache.warmup.sources.columns import to_number
from tpucache.warmup.sources.labels import named
from tpucache.warmup.sources.source import DerivedSource, Item, Listing, Sample, Source, source_name

#: The column of the samples table that counts the boxes which reach beyond a sample's image.
OUTSIDE: Final = "boxes_outside"
_UNLISTED: Final = "(not in the JSON)"
_STRAY: Final = "(annotation of an image that is not in the JSON)"
_ID: Final = (int, float, str)  # the types of ids in JSON
_UNREAD: Final = ("keypoints", "segmentation")  # what annotations may have besides their boxes
_LARGEST: Final = 1 << 31  # more pixels than the side of any image

_log: Final = logging.getLogger("tpucache")


@dataclasses.dataclass(frozen=True)
class _Boxes:
    """The boxes of one image, float64 (n, 5) of left, top, right, bottom, class.

    `outside` counts the boxes that reach beyond the image, and `crowds` the boxes of crowds, which are left out. `size`
    is the image's (width, height), None if the file does not state it. If an annotation of the image cannot be used,
    `fault` names the annotation and says why.
    """

    boxes: npt.NDArray[np.float64]
    outside: int
    crowds: int
    size: tuple[int, int] | None
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class _Coco:
    """The content of a COCO JSON file: the boxes of each image by its file name, and the names of the classes.

    `plain` maps file names without folders to names with folders, if only one file has that name. `strays` names the
    annotations whose images are not listed. `unread` counts the annotations with keypoints and with segmentations,
    which are not read, and `turned` names those whose box is rotated.
    """

    images: Mapping[str, _Boxes]
    classes: tuple[str, ...]
    plain: Mapping[str, str]
    strays: Sequence[str]
    unread: Mapping[str, int]
    turned: Sequence[str]

    def find(self, path: str) -> str | None:
        """Return the file name in the JSON for the sample with this path, or None."""
        return path if path in self.images else self.plain.get(posixpath.basename(path))


def box_source(source: Source, path: str | Path) -> Source:
    """Return a source of the samples that the COCO JSON file at `path` lists, with their boxes."""
    return BoxSource(source, Path(path).absolute())


@dataclasses.dataclass(frozen=True, repr=False)
class BoxSource(DerivedSource):
    """The samples of another source that a COCO JSON file lists, each with its boxes, perhaps none.

    A sample is found by its path, or else by its file name if that is unique in the COCO file. The classes of boxes are
    the file's categories in the order of their ids; they are the classes of the listing, too, if the other source has
    no labels. The box of a crowd (`iscrowd`) does not belong to a single object and is left out. A sample does not load
    if one of its annotations has no box, or a category that the file does not list. Annotations of images that the file
    does not list are counted as left out.
    """

    source: Source
    path: Path

    def list(self) -> Listing:
        """Return the samples that the file lists; other samples are counted as left out. Raises SourceError.

        Boxes that reach beyond their image are counted in a warning, and for each image in the column `boxes_outside`.
        """
        listing, coco = self.source.list(), _coco_of(self.path)
        names = _names([sample.path for sample in listing.samples], coco)
        kept = [at for at, sample in enumerate(listing.samples) if sample.path in names]
        if not kept:
            raise SourceError(
                f"{self.path} lists none of the samples of {source_name(self.source)}: their paths are such as "
                f"{listing.samples[0].path!r}, the names in the file such as {next(iter(coco.images), '')!r:.200}"
            )
        found = [coco.images[names[listing.samples[at].path]] for at in kept]
        outside = np.array([each.outside for each in found], np.int64)
        if outside.any():
            worst = listing.samples[kept[int(outside.argmax())]].path
            _log.warning(
                "%s: %d boxes of %d images reach beyond their image, for example of %s: they are clipped, and "
                "counted in the column %s", self.path, outside.sum(), (outside > 0).sum(), worst, OUTSIDE,
            )  # fmt: skip
        crowds = sum(each.crowds for each in found)
        if crowds:
            _log.warning("%s: %d boxes of crowds are left out", self.path, crowds)
        if coco.unread:
            what = " and ".join(f"the {name} of {count} annotations" for name, count in coco.unread.items())
            _log.warning("%s: only boxes are read, and %s are left out", self.path, what)
        if coco.turned:
            _log.warning(
                "%s: %d boxes are rotated, such as that of %s, and are read as they are without the rotation: write "
                "the upright box around each of them in bbox", self.path, len(coco.turned), coco.turned[0],
            )  # fmt: skip
        if coco.strays:
            _log.warning(
                "%s: %d annotations of images that the file does not list are left out, such as %s",
                self.path, len(coco.strays), coco.strays[0],
            )  # fmt: skip
        apart = [(path, name) for path, name in names.items() if _are_apart(path, name)]
        if apart:
            _log.warning(
                "%s: %d images are found by file name alone, in another folder than in the JSON, such as %r for %r. If "
                "these are other images, name the folder that the JSON is of",
                self.path, len(apart), *apart[0],
            )  # fmt: skip
        missing = len(coco.images) - len(kept)
        if missing:
            _log.warning("%s lists %d images that the source does not have", self.path, missing)
        unlisted = len(listing.samples) - len(kept)
        has_labels = any(sample.label is not None for sample in listing.samples)
        if has_labels and listing.classes and listing.classes != coco.classes:
            _log.warning(
                "%s: the classes of the cache are those of the images, %s; boxes have the positions of their "
                "categories, %s. If the images' classes are only folders, put all images into one folder",
                self.path, named(listing.classes), named(coco.classes),
            )  # fmt: skip
        return dataclasses.replace(
            listing,
            samples=[
                dataclasses.replace(
                    listing.samples[at], number=number, bytes=listing.samples[at].bytes + found[number].boxes.nbytes
                )
                for number, at in enumerate(kept)
            ],
            classes=listing.classes if has_labels else coco.classes,
            columns={
                **{
                    name: column[np.array(kept)] if isinstance(column, np.ndarray) else [column[at] for at in kept]
                    for name, column in listing.columns.items()
                },
                OUTSIDE: outside,
            },
            asked={**listing.asked, "boxes": self.path.name},
            left_out={
                **listing.left_out,
                **({_UNLISTED: unlisted} if unlisted else {}),
                **({_STRAY: len(coco.strays)} if coco.strays else {}),
            },
        )

    def load(self, sample: Sample) -> Item:
        """Load a sample from `source`, and return it with the boxes of its image. Raises SampleError."""
        item = self.source.load(sample)
        coco = _coco_of(self.path)
        name = coco.find(sample.path)
        if name is None:
            raise SampleError(sample.path, f"is no longer in {self.path}: put its entry back")
        found = coco.images[name]
        if found.fault:
            raise SampleError(sample.path, f"{found.fault}: correct it in {self.path}, or skip such images")
        return dataclasses.replace(item, fields={**item.fields, BOXES: found.boxes}, boxes_size=found.size)


def _names(paths: Sequence[str], coco: _Coco) -> dict[str, str]:
    """Return the file name in the JSON for each path that the JSON lists.

    Raises SourceError if two paths have the same file name in the JSON.
    """
    found = {path: coco.find(path) for path in paths}
    names = {path: name for path, name in found.items() if name is not None}
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        first, second = [path for path, name in names.items() if name == twice[0]][:2]
        raise SourceError(
            f"{first!r} and {second!r} both match {twice[0]!r} in the JSON: list each by its path in the JSON, or "
            "remove one from the source"
        )
    return names


def _are_apart(path: str, name: str) -> bool:
    """Return whether the paths of one file name differ in the folder that they name last, and each has a folder."""
    folder, other = (posixpath.basename(posixpath.dirname(each)) for each in (path, name))
    return bool(folder and other) and folder != other


def _coco_of(path: Path) -> _Coco:
    try:
        status = path.stat()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    return _read_coco(path, status.st_size, status.st_mtime_ns)


@cached_for_threads(2)
def _read_coco(path: Path, _size: int, _changed: int) -> _Coco:
    """Read a COCO JSON file; `_size` and `_changed` only make the cache read it again after a change."""
    try:
        content = parse_json(read_file(path))
        _check_ids(content)
        categories = _category_names(content["categories"])
        numbers = {key: number for number, key in enumerate(categories)}
        images = {item["id"]: item for item in content["images"]}
        rows: dict[Any, list[list[float]]] = {key: [] for key in images}
        crowds, faults, strays = dict.fromkeys(images, 0), dict[Any, str](), list[str]()
        turned = list[str]()
        for number, item in enumerate(content["annotations"]):
            key = item.get("image_id")
            if not isinstance(key, _ID) or key not in images:
                strays.append(f"{_annotation(item, number)} of image {key!r:.60}")
            else:
                try:
                    if _is_crowd(item):
                        crowds[key] += 1
                    else:
                        rows[key].append(_row(item, numbers))
                        turned += [_annotation(item, number)] if _is_turned(item) else []
                except ValueError as error:
                    faults.setdefault(key, f"{_annotation(item, number)} {error}")
        if images and strays and len(strays) == len(content["annotations"]):
            raise ValueError(f"the file lists none of the images of its annotations, such as {strays[0]}")
        found = {}
        for key, item in images.items():
            boxes = np.array(rows[key], np.float64).reshape(-1, 5)
            size = _image_size(item)
            outside = _count_outside(boxes, size)
            found[str(item["file_name"])] = _Boxes(boxes, outside, crowds[key], size, faults.get(key, ""))
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    except KeyError as error:
        raise SourceError(f"{path} is not a COCO JSON file of boxes: there is no {error!s:.60}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise SourceError(f"{path} is not a COCO JSON file of boxes: {error!s:.200}") from error
    if len(found) != len(images):
        raise SourceError(f"{path} has two images with the same file name: give each image a name of its own")
    counts = Counter(map(posixpath.basename, found))
    plain = {posixpath.basename(name): name for name in found if counts[posixpath.basename(name)] == 1}
    unread = {name: sum(bool(item.get(name)) for item in content["annotations"]) for name in _UNREAD}
    unread = {name: count for name, count in unread.items() if count}
    return _Coco(found, tuple(categories.values()), plain, strays, unread, turned)


def _check_ids(content: Mapping[str, Any]) -> None:
    """Raise ValueError if an id is repeated: boxes would go to another image or class."""
    for part in ("images", "categories"):
        twice = [value for value, count in Counter(item["id"] for item in content[part]).items() if count > 1]
        if twice:
            raise ValueError(f"the id {twice[0]!r} is there twice among the {part}")


def _category_names(categories: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """Return the name of each category by its id, in the order of ids. Equal names get their ids added."""
    counts = Counter(str(item["name"]) for item in categories)
    names = {item["id"]: str(item["name"]) for item in categories}
    return {key: name if counts[name] == 1 else f"{name} (id {key})" for key, name in sorted(names.items())}


def _annotation(item: Mapping[str, Any], number: int) -> str:
    return f"annotation {item['id']!r:.60}" if "id" in item else f"the annotation at position {number}"


def _is_turned(item: Mapping[str, Any]) -> bool:
    """Return whether an annotation has a rotation, in degrees, as CVAT writes it next to the box without rotation."""
    attributes = item.get("attributes")
    angle = attributes.get("rotation") if isinstance(attributes, dict) else None
    return isinstance(angle, (int, float)) and angle % 360 != 0


def _is_crowd(item: Mapping[str, Any]) -> bool:
    """Return whether an annotation is of a crowd. Raises ValueError, as `_row` does."""
    value = item.get("iscrowd")
    if value not in (None, 0, 1):
        raise ValueError(f"has the iscrowd {value!r:.60}, which is not 0 or 1")
    return bool(value)


def _row(item: Mapping[str, Any], numbers: Mapping[Any, int]) -> list[float]:
    """Return left, top, right, bottom and class of an annotation.

    Raises ValueError, whose text completes a sentence that begins with the annotation's name.
    """
    category = item.get("category_id")
    if not isinstance(category, _ID) or category not in numbers:
        raise ValueError(f"has the category {category!r:.60}, which the file does not list")
    if not item.get("bbox"):
        raise ValueError("has no bbox")
    left, top, width, height = _box(item["bbox"])
    return [left, top, left + width, top + height, numbers[category]]


def _box(value: Any) -> tuple[float, float, float, float]:
    """Return left, top, width and height of a `bbox`. Raises ValueError unless it has these, of possible sizes."""
    is_box = isinstance(value, list) and len(value) == 4 and all(map(_is_length, value))
    if not is_box or min(value[2:]) < 0:
        raise ValueError(
            f"has the box {value!r:.60}, which is not left, top, width, height in pixels, {_LARGEST:,} at most"
        )
    left, top, width, height = map(float, value)
    return left, top, width, height


def _is_length(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # this excludes nan, too


def _image_size(item: Mapping[str, Any]) -> tuple[int, int] | None:
    width, height = (_side(item.get(name)) for name in ("width", "height"))
    return None if width is None or height is None else (width, height)


def _side(value: Any) -> int | None:
    if isinstance(value, str):  # some programs write numbers as text
        value = to_number(value)
    return int(value) if isinstance(value, (int, float)) and 1 <= value <= _LARGEST else None


def _count_outside(boxes: npt.NDArray[np.float64], size: tuple[int, int] | None) -> int:
    """Return how many boxes reach more than a pixel beyond an image; 0 if the image's size is unknown."""
    if size is None:
        return 0
    low = (boxes[:, :2] < -1).any(axis=1)
    return int((low | (boxes[:, 2:4] > np.array(size) + 1).any(axis=1)).sum())
