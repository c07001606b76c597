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
from tpucache.store.fields import BOXES
from tpucache.store.files import read_file
from tpucache.text import parse_json
from tpucache.warmup.sources.columns import to_number
from tpucache.warmup.sources.source import (
    DerivedSource,
    Item,
    Listing,
    Sample,
    Source,
    cached_until_changed,
    name_some,
    repeated,
    source_name,
    taken,
)

#: The column of the samples table that counts the boxes which reach beyond a sample's image.
OUTSIDE: Final = "boxes_outside"
_UNLISTED: Final = "(not in the JSON)"
_STRAY: Final = "(annotation of an image that is not in the JSON)"
_ID: Final = (int, float, str)  # the types of ids in JSON
_UNREAD: Final = ("keypoints", "segmentation")  # what annotations may have besides their boxes
_LARGEST: Final = 1 << 31  # more pixels than the side of any image

_log: Final = logging.getLogger("tpucache")


@dataclasses.dataclass
class _Boxes:
    """The boxes of one image as lists of left, top, right, bottom, class, without those of crowds.

    `size` is the image's (width, height), None if the file does not state it. If an annotation of the image cannot be
    used, `fault` names the annotation and says why.
    """

    rows: list[list[float]]
    size: tuple[int, int] | None
    fault: str = ""

    @property
    def boxes(self) -> npt.NDArray[np.float64]:
        return np.array(self.rows, np.float64).reshape(-1, 5)

    @property
    def outside(self) -> int:
        """How many boxes reach more than a pixel beyond the image; 0 if the image's size is unknown."""
        if self.size is None:
            return 0
        boxes = self.boxes
        return int(((boxes[:, :2] < -1) | (boxes[:, 2:4] > np.array(self.size) + 1)).any(axis=1).sum())


@dataclasses.dataclass(frozen=True)
class _Coco:
    """The content of a COCO JSON file: the boxes of each image by its file name, and the names of the classes.

    `plain` maps file names without folders to names with folders, if only one file has that name. `strays` counts the
    annotations whose images are not listed. `notes` say what is left out or read otherwise than it may be meant.
    """

    images: Mapping[str, _Boxes]
    classes: tuple[str, ...]
    plain: Mapping[str, str]
    strays: int
    notes: Sequence[str]

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
        """Return the samples that the file lists; other samples are counted as left out.

        Boxes that reach beyond their image are counted in a warning, and for each image in the column `boxes_outside`.
        """
        listing, coco = self.source.list(), _coco_of(self.path)
        names = {sample.path: name for sample in listing.samples if (name := coco.find(sample.path)) is not None}
        if twice := repeated(names.values()):
            both = " and ".join(repr(path) for path, name in names.items() if name == twice)
            raise SourceError(
                f"{both} both match {twice!r} in the JSON: list each by its path in the JSON, or remove one from the "
                "source"
            )
        kept = [at for at, sample in enumerate(listing.samples) if sample.path in names]
        if not kept:
            raise SourceError(
                f"{self.path} lists none of the samples of {source_name(self.source)}: their paths are such as "
                f"{listing.samples[0].path!r}, the names in the file such as {next(iter(coco.images), '')!r:.200}"
            )
        chosen = taken(listing, kept)
        found = [coco.images[names[sample.path]] for sample in chosen.samples]
        outside = np.array([each.outside for each in found], np.int64)
        has_labels = any(sample.label is not None for sample in listing.samples)
        self._tell(coco, names, outside, chosen.samples)
        if has_labels and listing.classes and listing.classes != coco.classes:
            _log.warning(
                "%s: the classes of the cache are those of the images, %s; boxes have the positions of their "
                "categories, %s. If the images' classes are only folders, put all images into one folder",
                self.path, name_some(listing.classes), name_some(coco.classes),
            )  # fmt: skip
        left_out = {_UNLISTED: len(listing.samples) - len(kept), _STRAY: coco.strays}
        return dataclasses.replace(
            chosen,
            samples=[
                dataclasses.replace(sample, bytes=sample.bytes + each.boxes.nbytes)
                for sample, each in zip(chosen.samples, found, strict=True)
            ],
            classes=listing.classes if has_labels else coco.classes,
            columns={**chosen.columns, OUTSIDE: outside},
            asked={**listing.asked, "boxes": self.path.name},
            left_out={**listing.left_out, **{name: count for name, count in left_out.items() if count}},
        )

    def load(self, sample: Sample) -> Item:
        """Load a sample from `source`, and return it with the boxes of its image."""
        item = self.source.load(sample)
        coco = _coco_of(self.path)
        name = coco.find(sample.path)
        if name is None:
            raise SampleError(sample.path, f"is no longer in {self.path}: put its entry back")
        found = coco.images[name]
        if found.fault:
            raise SampleError(sample.path, f"{found.fault}: correct it in {self.path}, or skip such images")
        return dataclasses.replace(item, fields={**item.fields, BOXES: found.boxes}, boxes_size=found.size)

    def _tell(
        self, coco: _Coco, names: Mapping[str, str], outside: npt.NDArray[np.int64], samples: Sequence[Sample]
    ) -> None:
        notes = [*coco.notes]
        if outside.any():
            notes.append(
                f"{outside.sum()} boxes of {(outside > 0).sum()} images reach beyond their image, for example of "
                f"{samples[int(outside.argmax())].path}: they are clipped, and counted in the column {OUTSIDE}"
            )
        if apart := [(path, name) for path, name in names.items() if _are_apart(path, name)]:
            notes.append(
                f"{len(apart)} images are found by file name alone, in another folder than in the JSON, such as "
                f"{apart[0][0]!r} for {apart[0][1]!r}. If these are other images, name the folder that the JSON is of"
            )
        if missing := len(coco.images) - len(samples):
            notes.append(f"the source does not have {missing} of the images that it lists")
        for text in notes:
            _log.warning("%s: %s", self.path, text)


def _are_apart(path: str, name: str) -> bool:
    """Return whether the paths of one file name differ in the folder that they name last, and each has a folder."""
    folder, other = (posixpath.basename(posixpath.dirname(each)) for each in (path, name))
    return bool(folder and other) and folder != other


@cached_until_changed(2)
def _coco_of(path: Path) -> _Coco:
    try:
        return _parsed(parse_json(read_file(path)))
    except KeyError as error:
        raise SourceError(f"{path} is not a COCO JSON file of boxes: there is no {error!s:.60}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise SourceError(f"{path} is not a COCO JSON file of boxes: {error!s:.200}") from error


def _parsed(content: Any) -> _Coco:
    for part in ("images", "categories"):  # boxes would go to another image or class
        if twice := repeated(item["id"] for item in content[part]):
            raise ValueError(f"the id {twice!r} is there twice among the {part}")
    if twice := repeated(str(item["file_name"]) for item in content["images"]):
        raise ValueError(f"it has two images with the same file name, {twice!r:.60}: give each a name of its own")
    categories = _category_names(content["categories"])
    numbers = {key: number for number, key in enumerate(categories)}
    images = {item["id"]: _Boxes([], _image_size(item)) for item in content["images"]}
    annotations, strays, turned, crowds = content["annotations"], list[str](), list[str](), 0
    for number, item in enumerate(annotations):
        name = f"annotation {item['id']!r:.60}" if "id" in item else f"the annotation at position {number}"
        key = item.get("image_id")
        if not isinstance(key, _ID) or key not in images:
            strays.append(f"{name} of image {key!r:.60}")
            continue
        try:
            if _is_crowd(item):
                crowds += 1
                continue
            images[key].rows.append(_row(item, numbers))
            turned += [name] if _is_turned(item) else []
        except ValueError as error:
            images[key].fault = images[key].fault or f"{name} {error}"
    if images and strays and len(strays) == len(annotations):
        raise ValueError(f"the file lists none of the images of its annotations, such as {strays[0]}")
    unread = {name: sum(bool(item.get(name)) for item in annotations) for name in _UNREAD}
    notes = [f"{crowds} boxes of crowds are left out"] if crowds else []
    if what := " and ".join(f"the {name} of {count} annotations" for name, count in unread.items() if count):
        notes.append(f"only boxes are read, and {what} are left out")
    if turned:
        notes.append(
            f"{len(turned)} boxes are rotated, such as that of {turned[0]}, and are read as they are without the "
            "rotation: write the upright box around each of them in bbox"
        )
    if strays:
        notes.append(
            f"{len(strays)} annotations of images that the file does not list are left out, such as {strays[0]}"
        )
    found = {str(item["file_name"]): images[item["id"]] for item in content["images"]}
    counts = Counter(map(posixpath.basename, found))
    plain = {posixpath.basename(name): name for name in found if counts[posixpath.basename(name)] == 1}
    return _Coco(found, tuple(categories.values()), plain, len(strays), notes)


def _category_names(categories: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """Return the name of each category by its id, in the order of ids. Equal names get their ids added."""
    counts = Counter(str(item["name"]) for item in categories)
    names = {item["id"]: str(item["name"]) for item in categories}
    return {key: name if counts[name] == 1 else f"{name} (id {key})" for key, name in sorted(names.items())}


def _is_turned(item: Mapping[str, Any]) -> bool:
    """Return whether an annotation has a rotation, in degrees, as CVAT writes it next to the box without rotation."""
    attributes = item.get("attributes")
    angle = attributes.get("rotation") if isinstance(attributes, dict) else None
    return isinstance(angle, (int, float)) and angle % 360 != 0


def _is_crowd(item: Mapping[str, Any]) -> bool:
    value = item.get("iscrowd")
    if value not in (None, 0, 1):
        raise ValueError(f"has the iscrowd {value!r:.60}, which is not 0 or 1")
    return bool(value)


def _row(item: Mapping[str, Any], numbers: Mapping[Any, int]) -> list[float]:
    category, box = item.get("category_id"), item.get("bbox")
    if not isinstance(category, _ID) or category not in numbers:
        raise ValueError(f"has the category {category!r:.60}, which the file does not list")
    if not box:
        raise ValueError("has no bbox")
    is_box = isinstance(box, list) and len(box) == 4 and all(map(_is_length, box)) and min(box[2:]) >= 0
    if not is_box:
        raise ValueError(
            f"has the box {box!r:.60}, which is not left, top, width, height in pixels, {_LARGEST:,} at most"
        )
    left, top, width, height = map(float, box)
    return [left, top, left + width, top + height, numbers[category]]


def _is_length(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # this excludes nan, too


def _image_size(item: Mapping[str, Any]) -> tuple[int, int] | None:
    sides = [item.get("width"), item.get("height")]
    sides = [to_number(side) if isinstance(side, str) else side for side in sides]  # some programs write text
    known = [int(side) for side in sides if isinstance(side, (int, float)) and 1 <= side <= _LARGEST]
    return (known[0], known[1]) if len(known) == 2 else None
