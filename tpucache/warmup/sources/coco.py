"""Adds the boxes of a COCO JSON file to the images of any source."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from posixpath import basename
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
    taken,
)

#: The column of the samples table that counts the boxes which reach beyond a sample's image.
OUTSIDE: Final = "boxes_outside"
_ID: Final = (int, float, str)  # the types of ids in JSON
_LARGEST: Final = 1 << 31  # more pixels than the side of any image

_log: Final = logging.getLogger("tpucache")


class _Coco:
    """The content of a COCO JSON file, by the file names of images, and the names of the classes.

    `sizes` has each image's (width, height), None if not stated; `boxes` its boxes without those of crowds, each as
    left, top, right, bottom, class; `faults` says why an annotation of an image cannot be used. `strays` are the
    annotations whose images are not listed. `notes` say what is left out, or read otherwise than it may be meant, each
    with the annotations that it is about: `{0}` is their number, and `{1}` the first.
    """

    def __init__(self, content: Any) -> None:
        for part, key in (("images", "id"), ("images", "file_name"), ("categories", "id")):
            if (twice := repeated(item[key] for item in content[part])) is not None:
                raise ValueError(f"two of the {part} have the {key} {twice!r:.60}: give each its own")
        names = {item["id"]: item["file_name"] for item in content["images"]}
        self.sizes = {item["file_name"]: _size(item) for item in content["images"]}
        self.boxes = {name: list[list[float]]() for name in self.sizes}
        self.faults, self.strays = dict[str, str](), list[str]()
        counts = Counter(map(basename, self.sizes))
        self._plain = {basename(name): name for name in self.sizes if counts[basename(name)] == 1}
        classes = dict(sorted((item["id"], str(item["name"])) for item in content["categories"]))
        counts = Counter(classes.values())
        self.classes = tuple(name if counts[name] == 1 else f"{name} (id {key})" for key, name in classes.items())
        self._read(content["annotations"], names, {key: number for number, key in enumerate(classes)})

    def _read(self, annotations: Sequence[Any], images: Mapping[Any, str], classes: Mapping[Any, int]) -> None:
        crowds, turned = list[str](), list[str]()
        for at, item in enumerate(annotations):
            name = f"annotation {item['id']!r:.60}" if "id" in item else f"the annotation at position {at}"
            key = item.get("image_id")
            if not isinstance(key, _ID) or key not in images:
                self.strays.append(f"{name} of image {key!r:.60}")
            elif item.get("iscrowd") == 1:
                crowds.append(name)
            else:
                try:
                    self.boxes[images[key]].append(_box(item, classes))
                    turned += [name] if _is_turned(item) else []
                except ValueError as error:
                    self.faults.setdefault(images[key], f"{name} {error}")
        if images and self.strays and len(self.strays) == len(annotations):
            raise ValueError(f"the file lists none of the images of its annotations, such as {self.strays[0]}")
        unread = Counter(part for part in ("keypoints", "segmentation") for item in annotations if item.get(part))
        what = " and ".join(f"the {part} of {count} annotations" for part, count in unread.items())
        self.notes = {
            "{0} boxes of crowds are left out": crowds,
            f"only boxes are read, and {what} are left out": [*unread],
            "{0} boxes are rotated, such as that of {1}, and are read as they are without the rotation: write the "
            "upright box around each of them in bbox": turned,
            "{0} annotations of images that the file does not list are left out, such as {1}": self.strays,
        }

    def find(self, path: str) -> str | None:
        """Return the file name of the sample with this path, by the path or by a file name that is unique, or None."""
        return path if path in self.sizes else self._plain.get(basename(path))

    def array(self, name: str) -> npt.NDArray[np.float64]:
        return np.array(self.boxes[name], np.float64).reshape(-1, 5)

    def outside(self, name: str) -> int:
        """Return how many boxes reach more than a pixel beyond the image; 0 if the image's size is unknown."""
        if (size := self.sizes[name]) is None:
            return 0
        return sum(min(box[:2]) < -1 or box[2] > size[0] + 1 or box[3] > size[1] + 1 for box in self.boxes[name])


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
            both = name_some([path for path, name in names.items() if name == twice])
            raise SourceError(
                f"{both} match the same {twice!r} in the JSON: list each by its path in the JSON, or remove one from "
                "the source"
            )
        if not names:
            raise SourceError(
                f"{self.path} lists none of the samples of {self}: their paths are such as "
                f"{listing.samples[0].path!r}, the names in the file such as {next(iter(coco.sizes), '')!r:.200}"
            )
        chosen = taken(listing, [at for at, sample in enumerate(listing.samples) if sample.path in names])
        outside = np.array([coco.outside(name) for name in names.values()], np.int64)
        notes = coco.notes | {
            f"{outside.sum()} boxes of {{0}} images reach beyond their image, for example of {{1}}: they are clipped, "
            f"and counted in the column {OUTSIDE}": [path for path, count in zip(names, outside, strict=True) if count],
            "{0} images are found by file name alone, in another folder than in the JSON, such as {1}. If these are "
            "other images, name the folder that the JSON is of": [
                f"{path!r} for {name!r}" for path, name in names.items() if _are_apart(path, name)
            ],
            "the source does not have {0} of the images that it lists": [*coco.sizes.keys() - names.values()],
        }
        for text, examples in notes.items():
            if examples:
                _log.warning("%s: %s", self.path, text.format(len(examples), examples[0]))
        has_labels = any(sample.label is not None for sample in listing.samples)
        classes = listing.classes if has_labels else coco.classes
        if classes and classes != coco.classes:
            _log.warning(
                "%s: the classes of the cache are those of the images, %s; boxes have the positions of their "
                "categories, %s. If the images' classes are only folders, put all images into one folder",
                self.path, name_some(classes), name_some(coco.classes),
            )  # fmt: skip
        left_out = {
            "(not in the JSON)": len(listing.samples) - len(names),
            "(annotation of an image that is not in the JSON)": len(coco.strays),
        }
        return dataclasses.replace(
            chosen,
            samples=[
                dataclasses.replace(sample, bytes=sample.bytes + coco.array(name).nbytes)
                for sample, name in zip(chosen.samples, names.values(), strict=True)
            ],
            classes=classes,
            columns={**chosen.columns, OUTSIDE: outside},
            asked={**listing.asked, "boxes": self.path.name},
            left_out=Counter(listing.left_out) + Counter(left_out),
        )

    def load(self, sample: Sample) -> Item:
        """Load a sample from `source`, and return it with the boxes of its image."""
        item, coco = self.source.load(sample), _coco_of(self.path)
        name = coco.find(sample.path)
        if name is None:
            raise SampleError(sample.path, f"is no longer in {self.path}: put its entry back")
        if name in coco.faults:
            raise SampleError(sample.path, f"{coco.faults[name]}: correct it in {self.path}, or skip such images")
        return dataclasses.replace(item, fields={**item.fields, BOXES: coco.array(name)}, boxes_size=coco.sizes[name])


def _are_apart(path: str, name: str) -> bool:
    """Return whether the paths of one file name differ in the folder that they name last, and each has a folder."""
    folder, other = PurePosixPath(path).parent.name, PurePosixPath(name).parent.name
    return bool(folder and other) and folder != other


@cached_until_changed(2)
def _coco_of(path: Path) -> _Coco:
    try:
        return _Coco(parse_json(read_file(path)))
    except KeyError as error:
        raise SourceError(f"{path} is not a COCO JSON file of boxes: there is no {error!s:.60}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise SourceError(f"{path} is not a COCO JSON file of boxes: {error!s:.200}") from error


def _is_turned(item: Any) -> bool:
    """Return whether an annotation has a rotation, in degrees, as CVAT writes it next to the box without rotation."""
    attributes = item.get("attributes")
    angle = attributes.get("rotation") if isinstance(attributes, dict) else None
    return isinstance(angle, (int, float)) and angle % 360 != 0


def _box(item: Any, numbers: Mapping[Any, int]) -> list[float]:
    crowd, category, box = item.get("iscrowd"), item.get("category_id"), item.get("bbox")
    if crowd not in (None, 0):
        raise ValueError(f"has the iscrowd {crowd!r:.60}, which is not 0 or 1")
    if not isinstance(category, _ID) or category not in numbers:
        raise ValueError(f"has the category {category!r:.60}, which the file does not list")
    if not box:
        raise ValueError("has no bbox")
    is_box = isinstance(box, list) and len(box) == 4
    # The comparison excludes nan, too.
    if not (is_box and all(type(side) in (int, float) and abs(side) <= _LARGEST for side in box) and min(box[2:]) >= 0):
        raise ValueError(
            f"has the box {box!r:.60}, which is not left, top, width, height in pixels, {_LARGEST:,} at most"
        )
    left, top, width, height = box
    return [left, top, left + width, top + height, numbers[category]]


def _size(item: Any) -> tuple[int, int] | None:
    width, height = (to_number(str(item.get(side))) or 0 for side in ("width", "height"))  # some programs write text
    is_known = 1 <= width <= _LARGEST and 1 <= height <= _LARGEST
    return (int(width), int(height)) if is_known else None
