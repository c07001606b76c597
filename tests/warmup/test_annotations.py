"""Boxes, keypoints and masks that a crop or an augmentation puts out of view are counted, however a cache is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import Made, build_here, failing_rename, jpeg
from PIL import Image
from signed import signed

from tpucache import Recipe
from tpucache.cli import main
from tpucache.errors import UnfinishedError
from tpucache.loading.dataset import CachedDataset
from tpucache.report.inspect import describe, describe_lines
from tpucache.store.manifest import Manifest
from tpucache.warmup import blocks
from tpucache.warmup.sources.source import Item

COUNT = 12


def wide(number: int) -> Item:
    mask = np.zeros((20, 40), np.uint8)
    mask[:, :10] = 255 if number % 2 else 0  # all of it is cut off
    mask[5:9, 18:20] = number % 4 == 3
    boxes = [[0, 0, 9, 9], [5, 5, 15, 15], [12, 2, 18, 6], [33, 3, 39, 9], [25, 0, 25, 9]][: number % 6]
    points = [[2.0, 2.0], [20.0, 3.0], [20.0, 21.0], [39.0, 19.0]]
    image = np.zeros((20, 40, 3), np.uint8)
    return Item({"image": image, "mask": mask, "boxes": np.array(boxes, float), "keypoints": np.array(points)})


def wide_source(count: int = COUNT, **options: Any) -> Made:
    return Made(count, wide, name="{:02}", **options)


def shown(cache: Path) -> dict[str, dict[str, Any]]:
    places: dict[str, dict[str, Any]] = {}
    manifest = Manifest.load(cache)
    items = [wide(number).fields for number in range(COUNT)]
    source = {
        "boxes": sum(len(item["boxes"]) for item in items),
        "keypoints": 3 * COUNT,  # the third is out of the source's image, too
        "mask": sum(bool(np.asarray(item["mask"]).any()) for item in items),
    }
    for name, given in source.items():
        held = []
        for variant in manifest.variants:
            arrays = [np.asarray(sample[name]) for sample in CachedDataset(cache, variant=variant)]
            column = {"boxes": 4, "keypoints": 2}.get(name)
            held.append(
                sum(int(a.any() if column is None else (a[:, column] > -(name == "boxes")).sum()) for a in arrays)
            )
        places[name] = {"source": given, "clean": held[0], "variants": held[1:]}
    return places


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MIN_BLOCK_SAMPLES", 5)


@pytest.fixture
def shift(write_module: Any) -> str:
    write_module(
        "shift_by_test",
        "import numpy as np\n"
        "def shift(given, generator):\n"
        "    by = int(generator.integers(0, 20))\n"
        "    result = {name: np.roll(given[name], -by, 1) for name in ('image', 'mask')}\n"
        "    result['mask'][:, 20 - by:] = 0\n"
        "    boxes, points = given['boxes'], given['keypoints']\n"
        "    moved = [[max(0, b[0] - by), b[1], b[2] - by, *b[3:]] for b in boxes if b[2] > by]\n"
        "    boxes = np.array([*moved, *[[-1] * 5] * (len(boxes) - len(moved))], np.float32)\n"
        "    points = [[x - by, y, seen and x > by] for x, y, seen in points]\n"
        "    return {**result, 'boxes': boxes, 'keypoints': np.array(points, np.float32)}\n",
    )
    return "shift_by_test:shift"


@pytest.mark.slow
def test_what_is_out_of_view_is_counted_the_same_whatever_way_a_cache_is_built(shift: str, tmp_path: Path) -> None:
    one, three = (Recipe(size=20, max_boxes=5, variants=k, augment=shift) for k in (1, 3))
    whole = build_here(wide_source(), tmp_path / "whole", three)
    found = describe(whole)["annotations"]
    assert found == shown(tmp_path / "whole")
    assert found["boxes"]["source"] > found["boxes"]["clean"] > max(found["boxes"]["variants"]) > 0
    assert found["mask"] == {"source": 6, "clean": 3, "variants": found["mask"]["variants"]}
    assert found["keypoints"]["clean"] == COUNT
    build_here(wide_source(7), tmp_path / "grown", one)
    build_here(wide_source(7), tmp_path / "grown", three)
    assert describe(build_here(wide_source(), tmp_path / "grown", three))["annotations"] == found
    build_here(wide_source(broken=range(0, COUNT, 3)), tmp_path / "retried", three, on_error="skip")
    assert describe(build_here(wide_source(), tmp_path / "retried", three, retry=True))["annotations"] == found


@pytest.mark.slow
def test_a_killed_build_counts_nothing_twice(tmp_path: Path) -> None:
    recipe = Recipe(size=20, max_boxes=5)
    with pytest.raises(UnfinishedError):
        build_here(wide_source(), tmp_path, recipe, time_limit=0)
    for name, after in (("shard-*.npz", 1), ("manifest.json", 0)):
        with failing_rename(name, KeyboardInterrupt(), after), pytest.raises(KeyboardInterrupt):
            build_here(wide_source(), tmp_path, recipe)
    assert describe(build_here(wide_source(), tmp_path, recipe))["annotations"] == shown(tmp_path)


def test_a_user_is_told_in_the_summary_and_by_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 20)).save(tmp_path / "images" / "a.png")
    box = {"image_id": 1, "category_id": 1}
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 40, "height": 20}],
        "annotations": [{**box, "bbox": [0, 0, 5, 5]}, {**box, "bbox": [15, 5, 9, 9]}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    words = ["warmup", str(tmp_path / "images"), str(tmp_path / "cache"), "--size", "20", "--jobs", "1"]
    assert main([*words, "--boxes", str(tmp_path / "boxes.json")]) == 0
    line = "2 in the source, 1 of them out of view in the clean images"
    assert f"boxes        {line}\n" in capsys.readouterr().out
    manifest = Manifest.load(tmp_path / "cache")
    assert f"boxes        {line}" in describe_lines(manifest)
    assert main(["inspect", str(tmp_path / "cache"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["annotations"] == {"boxes": {"source": 2, "clean": 1, "variants": []}}


@pytest.mark.parametrize("saved", [7, {"boxes": 7}, {"boxes": {"source": "x", "0": -1}}, {"boxes": {"1": True}}])
def test_counts_that_are_none_are_not_shown(saved: Any, tmp_path: Path) -> None:
    manifest = build_here(wide_source(2), tmp_path, Recipe(size=20, max_boxes=5, mask_values="keep"))
    content = {**json.loads(manifest.to_json()), "source": {**manifest.source, "annotations": saved}}
    assert not any("view" in line for line in describe_lines(Manifest.from_json(signed(content))))


def test_masks_that_lost_their_numbers_as_jpeg_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mask = Image.fromarray(np.kron(np.eye(5, dtype=np.uint8) * 255, np.ones((4, 8), np.uint8)))
    source = Made(2, lambda _: Item({"image": jpeg(Image.new("RGB", (40, 20))), "mask": jpeg(mask)}))
    build_here(source, tmp_path / "scaled", Recipe(size=8, mask_values="scale"))
    assert "JPEG" not in caplog.text
    build_here(source, tmp_path / "kept")
    assert "the first mask is a JPEG, which changes class numbers" in caplog.text
