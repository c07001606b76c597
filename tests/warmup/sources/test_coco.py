"""Boxes of a COCO JSON file come to their images, and follow them."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import build_here
from PIL import Image

from scripts.checks.sources import Listed, random_coco
from tpucache.errors import SampleError, SourceError
from tpucache.loading.dataset import CachedDataset
from tpucache.recipe import Recipe
from tpucache.store.manifest import Manifest
from tpucache.warmup.repair import repair_cache
from tpucache.warmup.sources import Source, box_source, open_source

IMAGES = {"a.png": (40, 20), "b.png": (20, 20), "c.png": (20, 20)}


def coco(**changes: Any) -> dict[str, Any]:
    content = {
        "images": [
            {"id": 7, "file_name": "a.png", "width": 40, "height": 20},
            {"id": 9, "file_name": "train/b.png", "width": 20, "height": 20},
        ],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 18, "bbox": [10, 5, 20, 10], "iscrowd": 0},
            {"id": 2, "image_id": 7, "category_id": 3, "bbox": [-4, 0, 20, 10]},
        ],
        "categories": [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}],
    }
    return {**content, **changes}


def boxed(**changes: Any) -> dict[str, Any]:
    return coco(annotations=[{"id": 4, "image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4], **changes}])


def write(folder: Path, content: Any) -> Path:
    (folder / "images").mkdir(exist_ok=True)
    for name, size in IMAGES.items():
        Image.new("RGB", size).save(folder / "images" / name)
    path = folder / "boxes.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def source_of(folder: Path) -> Source:
    return box_source(open_source(folder / "images"), folder / "boxes.json")


def build(folder: Path, content: Any, **options: Any) -> Manifest:
    write(folder, content)
    return build_here(source_of(folder), folder / "cache", Recipe(size=20, max_boxes=3, **options))


def test_boxes_follow_the_image_and_classes_are_the_categories_by_id(tmp_path: Path) -> None:
    manifest = build(tmp_path, coco(), variants=1, augment="flip")
    assert manifest.classes == ("car", "dog")
    assert manifest.source["left_out"] == {"(not in the JSON)": 1}
    dataset = CachedDataset(tmp_path / "cache")
    assert dataset.paths == ["a.png", "b.png"]
    # The middle 20 of 40 columns are kept.
    np.testing.assert_allclose(dataset[0]["boxes"][:2], [[0, 5, 20, 15, 1], [0, 0, 6, 10, 0]])
    assert (dataset[0]["boxes"][2] == -1).all()
    assert (dataset[1]["boxes"] == -1).all()
    variant = CachedDataset(tmp_path / "cache", variant=1)[0]["boxes"][1].tolist()
    assert variant in ([0, 0, 6, 10, 0], [14, 0, 20, 10, 0])


def test_boxes_that_leave_the_image_are_reported_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = coco()
    content["annotations"][0]["bbox"] = [25, 5, 20, 10]
    build(tmp_path, content)
    assert "2 boxes of 1 images reach beyond their image, for example of a.png" in caplog.text
    assert np.asarray(CachedDataset(tmp_path / "cache").table["boxes_outside"]).tolist() == [2, 0]


def test_what_is_left_out_besides_boxes_is_said_and_so_are_boxes_that_are_rotated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = coco()["annotations"]
    plain = {"keypoints": [], "segmentation": [], "attributes": {"rotation": 0.0, "kind": "x"}}
    build(tmp_path, coco(annotations=[first | plain, second | {"attributes": {"rotation": "left"}}]))
    assert "only boxes are read" not in caplog.text
    assert "rotated" not in caplog.text
    first |= {"keypoints": [12, 7, 2], "segmentation": [[10, 5, 30, 5, 30, 15]]}
    second |= {"segmentation": {"counts": [3, 5], "size": [20, 40]}, "attributes": {"rotation": 30.5}}
    write(tmp_path, coco(annotations=[first, second, first | {"iscrowd": 1}]))
    source_of(tmp_path).list()
    assert "1 boxes of crowds are left out" in caplog.text
    assert (
        "only boxes are read, and the keypoints of 2 annotations and the segmentation of 3 annotations are left out"
        in (caplog.text)
    )
    assert "1 boxes are rotated, such as that of annotation 2, and are read as they are without" in caplog.text


@pytest.mark.parametrize(
    ("width", "fails"), [(40, False), (39, False), (20, True), (0, False), (None, False), ("20", True)]
)
def test_boxes_of_an_image_of_another_size_are_refused(width: Any, fails: bool, tmp_path: Path) -> None:
    content = coco()
    content["images"][0]["width"] = width
    refused = pytest.raises(SampleError, match=r"a\.png.*boxes refer to 20 x 20 pixels")
    with refused if fails else contextlib.nullcontext():
        build(tmp_path, content)


def test_a_cache_with_boxes_is_repaired_with_them(tmp_path: Path) -> None:
    manifest = build(tmp_path, coco())
    shard = tmp_path / "cache" / manifest.shards[0].name
    before = shard.read_bytes()
    shard.write_bytes(before[:-100])
    repair_cache(source_of(tmp_path), tmp_path / "cache", jobs=1)
    assert shard.read_bytes() == before


def test_boxes_belong_to_a_cache_as_long_as_it_exists(tmp_path: Path) -> None:
    boxes = write(tmp_path, coco())
    plain = open_source(tmp_path / "images")
    build(tmp_path, coco())
    with pytest.raises(SourceError, match=r"cache was made with --boxes boxes\.json: give --boxes again"):
        build_here(plain, tmp_path / "cache", Recipe(size=20, max_boxes=3))
    build_here(plain, tmp_path / "plain", Recipe(size=20))
    with pytest.raises(SourceError, match="plain was made without --boxes"):
        build_here(box_source(plain, boxes), tmp_path / "plain", Recipe(size=20))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is not a COCO JSON"),
        ("[]", "is not a COCO JSON"),
        ('{"images": [', "is not a COCO JSON"),
        ("[" * 100_000, "is not a COCO JSON"),
        ({"images": []}, "there is no 'categories'"),
        (json.dumps(coco()).replace('"id": 7', '"id": 8, "id": 7'), "the key 'id' is there twice"),
        (boxed(image_id=1), "annotation 4 of image 1"),
        (coco(annotations=[{"image_id": 1, "category_id": 3, "bbox": [1, 2, 3, 4]}]), "at position 0 of image 1"),
        (boxed(category_id=5), "annotation 4 has the category"),
        (boxed(category_id=[3]), "has the category"),
        *(
            (boxed(bbox=box), r"annotation 4 has the box .* not left, top, width, height")
            for box in (
                *([number, 2, 3, 4] for number in (1e300, -1e300, 10**400, 2**32, float("inf"), "1", True, None, {})),
                *([1, 2, 3], [1, 2, -3, 4], [1, 2, float("nan"), 4], [1, 2, 1e300, 4], [1, 2, 3, 4, 5]),
                *([*range(10_000)], "abcd", dict.fromkeys("abcd", 1)),
            )
        ),
        *((boxed(bbox=box), "annotation 4 has no bbox: correct it in") for box in (None, [])),
        (boxed(iscrowd="0"), "annotation 4 has the iscrowd '0', which is not 0 or 1"),
        (coco(images=[{"id": 7, "file_name": "k" * 100_000}], annotations=[]), "lists none of the samples"),
        (
            coco(images=[{"id": n, "file_name": "a.png"} for n in (7, 9)], annotations=[]),
            "two of the images have the file_name 'a.png'",
        ),
        (coco(images=[{"id": n, "file_name": f"{n}/a.png"} for n in (7, 9)]), "lists none of the samples"),
        (coco(images=[{"id": 0, "file_name": f"{n}.png"} for n in "ab"]), "two of the images have the id 0"),
        (coco(categories=[{"id": 3, "name": n} for n in "ab"]), "two of the categories have the id 3"),
    ],
)
def test_what_is_no_coco_file_of_the_images_is_refused(content: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=reason) as caught:
        build(tmp_path, content)
    message = str(caught.value).replace(str(tmp_path), "")
    assert " at 0x" not in message
    assert len(message) < 500


def test_a_fault_of_one_image_is_skipped_with_it_and_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = coco()
    content["annotations"] += [
        {"id": 5, "image_id": 9, "category_id": 4, "bbox": [1, 2, 3, 4]},
        {"id": 6, "image_id": 8, "category_id": 3, "bbox": [1, 2, 3, 4]},
    ]
    write(tmp_path, content)
    manifest = build_here(source_of(tmp_path), tmp_path / "cache", Recipe(size=20, max_boxes=3), on_error="skip")
    (skipped,) = manifest.skipped
    assert skipped.path == "b.png"
    assert "annotation 5 has the category 4, which the file does not list" in skipped.reason
    assert "1 annotations of images that the file does not list are left out, such as annotation 6" in caplog.text
    assert manifest.samples == 1


def test_categories_of_one_name_are_classes_of_their_own(tmp_path: Path) -> None:
    categories = [{"id": 18, "name": "dog"}, {"id": 3, "name": "dog"}, {"id": 0, "name": "ant"}]
    assert build(tmp_path, coco(categories=categories)).classes == ("ant", "dog (id 3)", "dog (id 18)")


def test_boxes_of_images_with_classes_of_their_own_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    boxes = write(tmp_path, coco())
    for name, folder in (("a.png", "day"), ("b.png", "night")):
        (tmp_path / "batches" / folder).mkdir(parents=True)
        (tmp_path / "images" / name).rename(tmp_path / "batches" / folder / name)
    listing = box_source(open_source(tmp_path / "batches"), boxes).list()
    assert listing.classes == ("day", "night")
    assert (
        "those of the images, 'day', 'night'; boxes have the positions of their categories, 'car', 'dog'" in caplog.text
    )
    assert "1 images are found by file name alone, in another folder than in the JSON" in caplog.text
    assert "such as 'night/b.png' for 'train/b.png'" in caplog.text
    Image.new("RGB", (9, 9)).save(tmp_path / "batches" / "day" / "b.png")
    with pytest.raises(SourceError, match=r"'day/b\.png', 'night/b\.png' match the same 'train/b\.png' in the JSON"):
        box_source(open_source(tmp_path / "batches"), boxes).list()


def plainly(content: dict[str, Any]) -> dict[str, list[list[float]] | None]:
    """Return the boxes of each image by the format's description; None for an image with one that has no meaning."""
    order = sorted(category["id"] for category in content["categories"])
    found: dict[str, list[list[float]] | None] = {}
    for image in content["images"]:
        boxes: list[list[float]] | None = []
        for item in content["annotations"]:
            if item["image_id"] != image["id"] or item.get("iscrowd"):
                continue
            if item["category_id"] not in order or not item.get("bbox"):
                boxes = None
                break
            x, y, width, height = item["bbox"]
            boxes.append([x, y, x + width, y + height, order.index(item["category_id"])])
        found[image["file_name"]] = boxes
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_file_of_any_order_ids_and_faults_is_read_as_described(seed: int, tmp_path: Path) -> None:
    content = random_coco(random.Random(seed))
    path = tmp_path / "boxes.json"
    path.write_text(json.dumps(content))
    source = box_source(Listed(content), path)
    samples = {sample.path: sample for sample in source.list().samples}
    expected = plainly(content)
    assert [*samples] == [*expected]
    for name, boxes in expected.items():
        if boxes is None:
            with pytest.raises(SampleError, match="annotation"):
                source.load(samples[name])
        else:
            np.testing.assert_array_equal(
                source.load(samples[name]).fields["boxes"], np.array(boxes, np.float64).reshape(-1, 5)
            )
