"""Augmentation: a pure function of (image, seed, sample, variant), from presets, files and callables."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml

from tpucache.errors import RecipeError, UsageError
from tpucache.store.codec import Field
from tpucache.warmup.augment import PRESETS, augment, augment_fields, resolve

Pixels = npt.NDArray[np.uint8]

_SIDE = 24
_PLACES = [(seed, number, variant) for seed in (0, 1) for number in (0, 1, 2**40) for variant in (1, 2)]

# Run in a process of its own. It refuses the network and notes who asks for it, then augments in reverse order.
_PROBE = """
import hashlib, json, socket, sys
asked = []
def refuse(name):
    def call(*arguments, **options):
        asked.append(f"{name} {arguments!r}")
        raise OSError("no network here")
    return call
socket.socket.connect = refuse("connect")
socket.socket.connect_ex = refuse("connect_ex")
socket.getaddrinfo = refuse("getaddrinfo")
import numpy as np
from tpucache.warmup import augment
torch_after = {"import": "torch" in sys.modules}
definition = augment.resolve("strong", SIDE, SIDE)
torch_after["resolve"] = "torch" in sys.modules
image = np.random.default_rng(7).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
digests = {
    repr(place): hashlib.sha256(augment.augment(image, definition, *place)).hexdigest() for place in reversed(PLACES)
}
print(json.dumps({"asked": asked, "torch": torch_after, "digests": digests}))
"""


@pytest.fixture(scope="module")
def image() -> Pixels:
    return np.random.default_rng(7).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)


@pytest.fixture(scope="module")
def albumentations() -> Any:
    """Import albumentations the way tpucache does, so that it asks nobody for a newer version."""
    resolve("flip", 8, 8)
    return importlib.import_module("albumentations")


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if "ALBUMENTATIONS" not in name}
    script = f"SIDE = {_SIDE}\nPLACES = {_PLACES!r}\n{_PROBE}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_another_process_and_another_order_give_the_same_pixels(probe: dict[str, Any], image: Pixels) -> None:
    definition = resolve("strong", _SIDE, _SIDE)
    here = {repr(p): hashlib.sha256(augment(image, definition, *p)).hexdigest() for p in _PLACES}
    assert probe["digests"] == here


def test_nothing_asks_the_network(probe: dict[str, Any]) -> None:
    assert probe["asked"] == []


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("step", ["import", "resolve"])
def test_torch_stays_unloaded(probe: dict[str, Any], step: str) -> None:
    assert probe["torch"][step] is False


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_arguments_give_the_same_image_whatever_came_before(preset: str, image: Pixels) -> None:
    definition = resolve(preset, _SIDE, _SIDE)
    first = [augment(image, definition, *place) for place in _PLACES]
    again = [augment(image, definition, *place) for place in reversed(_PLACES)][::-1]
    np.testing.assert_array_equal(first, again)


def test_another_seed_sample_or_variant_gives_another_image(image: Pixels) -> None:
    definition = resolve("strong", _SIDE, _SIDE)
    images = {augment(image, definition, *place).tobytes() for place in _PLACES}
    assert len(images) == len(_PLACES)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("shape", [(24, 24), (17, 40)], ids=str)
def test_every_preset_keeps_shape_and_dtype_and_changes_something(preset: str, shape: tuple[int, int]) -> None:
    image = np.random.default_rng(3).integers(0, 256, (*shape, 3), np.uint8)
    definition = resolve(preset, *shape)
    results = [augment(image, definition, 0, number, 1) for number in range(8)]
    assert all(result.shape == image.shape and result.dtype == np.uint8 for result in results)
    assert all(result.flags.c_contiguous for result in results)
    assert any((result != image).any() for result in results)


def test_the_given_image_is_left_as_it_was(image: Pixels) -> None:
    before = image.copy()
    for number in range(8):
        augment(image, resolve("strong", _SIDE, _SIDE), 0, number, 1)
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_definition_survives_json(preset: str) -> None:
    """It is compared with the one in plan.json and in the manifest when a run is resumed."""
    definition = resolve(preset, _SIDE, _SIDE)
    assert json.loads(json.dumps(definition)) == definition


@pytest.fixture
def two_flips(albumentations: Any, tmp_path: Path) -> Path:
    pipeline = albumentations.Compose([albumentations.HorizontalFlip(p=0.5), albumentations.VerticalFlip(p=0.5)])
    path = tmp_path / "flips.json"
    path.write_text(json.dumps(albumentations.to_dict(pipeline)))
    return path


def test_two_flips_at_half_occur_independently(two_flips: Path, image: Pixels) -> None:
    definition = resolve(str(two_flips), _SIDE, _SIDE)
    outcomes = {
        image[:: -1 if vertical else 1, :: -1 if horizontal else 1].tobytes(): (horizontal, vertical)
        for horizontal, vertical in itertools.product((False, True), repeat=2)
    }
    counts = Counter(outcomes[augment(image, definition, 0, number, 1).tobytes()] for number in range(400))
    assert len(counts) == 4
    assert all(60 <= count <= 140 for count in counts.values()), counts


def test_flips_of_two_variants_of_a_sample_occur_independently(two_flips: Path, image: Pixels) -> None:
    definition = resolve(str(two_flips), _SIDE, _SIDE)
    equal = sum(
        augment(image, definition, 0, number, 1).tobytes() == augment(image, definition, 0, number, 2).tobytes()
        for number in range(400)
    )
    assert 60 <= equal <= 140


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_yaml_and_json_mean_the_same(two_flips: Path, suffix: str) -> None:
    other = two_flips.with_suffix(f".{suffix}")
    other.write_text(yaml.safe_dump(json.loads(two_flips.read_text())))
    assert resolve(str(other), 8, 8) == resolve(str(two_flips), 8, 8)


def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_callable_gets_the_image_and_a_generator_of_its_own(image: Pixels, jitter: str) -> None:
    definition = resolve(jitter, _SIDE, _SIDE)
    first = augment(image, definition, 0, 5, 1)
    np.testing.assert_array_equal(augment(image, definition, 0, 5, 1), first)
    assert first.dtype == np.uint8
    assert np.abs(first.astype(int) - image).max() <= 9
    images = {augment(image, definition, *place).tobytes() for place in _PLACES}
    assert len(images) == len(_PLACES)


def test_a_changed_callable_is_another_definition(tmp_path: Path, jitter: str) -> None:
    before = resolve(jitter, 8, 8)
    path = tmp_path / "modules" / "jitter_by_test.py"
    path.write_text(path.read_text() + "# changed\n")
    assert resolve(jitter, 8, 8) != before


def test_a_pipeline_object_of_a_module_is_seeded_as_a_preset_is(
    albumentations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: Pixels
) -> None:
    text = "import albumentations as A\npipeline = A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)])\n"
    _module(tmp_path, monkeypatch, "pipeline_by_test", text)
    definition = resolve("pipeline_by_test:pipeline", _SIDE, _SIDE)
    first = [augment(image, definition, 0, number, 1) for number in range(40)]
    again = [augment(image, definition, 0, number, 1) for number in reversed(range(40))][::-1]
    np.testing.assert_array_equal(first, again)
    assert len({result.tobytes() for result in first}) == 4


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    with pytest.raises(RecipeError, match=r"no augmentation 'flipp'.*flip, affine, standard, strong.*module:name"):
        resolve("flipp", 8, 8)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b"{", "is no json"),
        ("a.json", b"\xff\xfe\x00", "cannot be read"),
        ("a.json", b"[1, 2]", "holds no augmentation"),
        ("a.json", b'{"transforms": []}', "holds no augmentation"),
        ("a.json", b'{"transform": 3}', "cannot build"),
        ("a.json", b'{"transform": {"__class_fullname__": "NoSuchTransform", "p": 1.0}}', "NoSuchTransform"),
        ("a.yaml", b"a: [", "is no yaml"),
        ("a.yaml", b"!!python/object/apply:os.getcwd []", "is no yaml"),
        ("a.yml", b"", "holds no augmentation"),
    ],
)
def test_a_broken_file_is_refused_by_its_name(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError, match=reason):
        resolve(str(tmp_path / name), 8, 8)


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"missing\.yaml cannot be read"):
        resolve(str(tmp_path / "missing.yaml"), 8, 8)


@pytest.mark.parametrize("name", ["no_such_module:f", "json:no_such_name", "json:__name__", ":f", "json:"])
def test_a_callable_that_is_none_is_a_usage_error_naming_it(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        resolve(name, 8, 8)


@pytest.mark.parametrize("text", ["def f(:\n", "raise RuntimeError('at import')\n"], ids=["syntax", "raises"])
def test_a_module_that_does_not_import_is_a_usage_error_naming_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    _module(tmp_path, monkeypatch, "unimportable_by_test", text)
    with pytest.raises((UsageError, RecipeError), match="unimportable_by_test"):
        resolve("unimportable_by_test:f", 8, 8)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("image[:-1]", r"must return uint8 \(8, 8, 3\), not uint8 \(7, 8, 3\)"),
        ("image[..., 0]", r"not uint8 \(8, 8\)"),
        ("image / 255", r"not float64 \(8, 8, 3\)"),
        ("image.tolist()", "not list"),
        ("None", "not NoneType"),
        ("1 / 0", r"fails on sample 0, variant 1: ZeroDivisionError"),
    ],
)
def test_a_callable_that_does_not_keep_the_image_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str, reason: str
) -> None:
    name = "unfit_" + hashlib.sha256(expression.encode()).hexdigest()[:8]
    _module(tmp_path, monkeypatch, name, f"def f(image, generator):\n    return {expression}\n")
    with pytest.raises(RecipeError, match=reason):
        resolve(f"{name}:f", 8, 8)


def test_a_pipeline_that_changes_the_size_is_refused_before_anything_is_built(
    albumentations: Any, tmp_path: Path
) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(albumentations.to_dict(albumentations.Compose([albumentations.Resize(6, 6)]))))
    with pytest.raises(RecipeError, match=r"\(8, 8, 3\), not uint8 \(6, 6, 3\)"):
        resolve(str(path), 8, 8)


def _fields(record: dict[str, Any]) -> list[Field]:
    return [Field(name, "raw", array.dtype.str, array.shape) for name, array in record.items()]


def _decided(albumentations: Any, tmp_path: Path, *transforms: Any) -> dict[str, Any]:
    """Return the definition of a pipeline of transforms, read from a file as a user's is."""
    path = tmp_path / "decided.json"
    path.write_text(json.dumps(albumentations.to_dict(albumentations.Compose(list(transforms)))))
    return resolve(str(path), 40, 56)


@pytest.fixture
def record() -> dict[str, Any]:
    """One record with all that an image can have, and a field more."""
    rng = np.random.default_rng(5)
    boxes = np.full((4, 5), -1, np.float32)
    boxes[:3] = [[2, 3, 20, 18, 0], [30, 10, 56, 40, 1], [26, 22, 29, 25, 2]]
    return {
        "image": rng.integers(0, 256, (40, 56, 3), np.uint8),
        "mask": rng.integers(0, 5, (40, 56, 1), np.uint8),
        "boxes": boxes,
        "keypoints": np.array([[2.5, 3.5, 1], [50, 30, 1], [70, -4, 0]], np.float32),
        "tokens": np.arange(7),
    }


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("names", [["mask"], ["boxes"], ["keypoints"], ["mask", "boxes", "keypoints"]], ids="-".join)
def test_an_image_is_augmented_the_same_whatever_comes_with_it(
    preset: str, names: list[str], record: dict[str, Any]
) -> None:
    definition = resolve(preset, 40, 56)
    given = {name: record[name] for name in ("image", *names)}
    for number in range(12):
        result = augment_fields(given, definition, 0, number, 1)
        np.testing.assert_array_equal(result["image"], augment(record["image"], definition, 0, number, 1))
        assert list(result) == list(given)
        for name, array in given.items():
            assert (result[name].dtype, result[name].shape) == (array.dtype, array.shape)
            assert result[name].flags.c_contiguous


def test_flips_of_given_samples_stay_what_they_are(two_flips: Path, image: Pixels) -> None:
    """The caches that stand were made with this stream of random numbers."""
    definition = resolve(str(two_flips), _SIDE, _SIDE)
    found = ""
    for number in range(12):
        result = augment(image, definition, 3, number, 1)
        found += next(
            name
            for name, step in {"-": (1, 1), "h": (1, -1), "v": (-1, 1), "b": (-1, -1)}.items()
            if (result == image[:: step[0], :: step[1]]).all()
        )
    assert found == "vhvhvhhhh-bv"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_mask_follows_its_image_and_is_never_mixed(preset: str, record: dict[str, Any]) -> None:
    """The image is drawn from the mask; colours may change, but what is dark and what is light stays."""
    numbers = np.kron(np.random.default_rng(1).integers(0, 2, (5, 7)), np.ones((8, 8), int)).astype(np.uint8) * 3
    given = {"image": np.repeat(numbers[..., None] * 50 + 50, 3, axis=2), "mask": numbers[..., None]}
    definition = resolve(preset, 40, 56)
    for number in range(12):
        result = augment_fields(given, definition, 0, number, 1)
        mask = result["mask"][..., 0]
        assert set(np.unique(mask)) <= {0, 3}
        grey = result["image"].mean(axis=2)
        erased = grey < 15  # by `strong`, whose holes are black
        light = grey > (grey[~erased].min() + grey.max()) / 2
        assert np.mean((mask > 0)[~erased] == light[~erased]) > 0.9


@pytest.mark.parametrize("flip", ["HorizontalFlip", "VerticalFlip", "Transpose", "RandomRotate90"])
def test_a_point_and_a_box_stay_on_their_pixel_when_it_is_flipped(
    flip: str, albumentations: Any, tmp_path: Path
) -> None:
    pipeline = albumentations.Compose([getattr(albumentations, flip)(p=1)])
    path = tmp_path / "flip.json"
    path.write_text(json.dumps(albumentations.to_dict(pipeline)))
    mask = np.zeros((24, 24, 1), np.uint8)
    mask[3, 7] = 1
    given = {
        "image": np.repeat(mask, 3, axis=2),
        "mask": mask,
        "boxes": np.array([[7, 3, 8, 4, 5], [-1] * 5], np.float32),
        "keypoints": np.array([[7.5, 3.5, 1]], np.float32),
    }
    for number in range(4):
        result = augment_fields(given, resolve(str(path), 24, 24), 0, number, 1)
        ((row, column),) = np.argwhere(result["mask"][..., 0])
        np.testing.assert_allclose(result["boxes"][0], [column, row, column + 1, row + 1, 5], atol=1e-4)
        np.testing.assert_array_equal(result["boxes"][1], [-1] * 5)
        np.testing.assert_allclose(result["keypoints"], [[column + 0.5, row + 0.5, 1]], atol=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_boxes_and_points_lie_on_what_they_mark(preset: str) -> None:
    """Two squares of a mask, well inside so that no border is in play, against their boxes and middles."""
    mask = np.zeros((80, 96, 1), np.uint8)
    squares = {1: (34, 26, 46, 40), 2: (52, 40, 62, 54)}
    for value, (left, top, right, bottom) in squares.items():
        mask[top:bottom, left:right] = value
    boxes = np.array([[*square, value] for value, square in squares.items()], np.float32)
    middles = np.array([[(s[0] + s[2]) / 2, (s[1] + s[3]) / 2, 1] for s in squares.values()], np.float32)
    given = {"image": np.repeat(mask, 3, axis=2), "mask": mask, "boxes": boxes, "keypoints": middles}
    definition = resolve(preset, 80, 96)
    offsets = []
    for number in range(40):
        result = augment_fields(given, definition, 0, number, 1)
        for index, value in enumerate(squares):
            rows, columns = np.nonzero(result["mask"][..., 0] == value)
            whole = rows.size and rows.min() > 0 and rows.max() < 79 and columns.min() > 0 and columns.max() < 95
            box = result["boxes"][result["boxes"][:, 4] == value]
            if not whole or not len(box):
                continue
            found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            if preset != "strong":  # whose holes take a part of a box away, not of the mask
                np.testing.assert_allclose(box[0, :4], found, atol=1.1)
            middle = [columns.mean() + 0.5, rows.mean() + 0.5]
            offsets.append(result["keypoints"][index, :2] - middle)
            assert result["keypoints"][index, 2] == 1
    assert len(offsets) >= 40
    assert np.abs(offsets).max() < 1.2  # a small square of nearest pixels is a rough measure of its middle
    np.testing.assert_allclose(np.mean(offsets, axis=0), 0, atol=0.3)


def test_boxes_that_leave_the_view_are_left_out_and_points_lose_sight(
    albumentations: Any, tmp_path: Path, record: dict[str, Any]
) -> None:
    A = albumentations
    definition = _decided(A, tmp_path, A.Crop(28, 0, 56, 40), A.Resize(40, 56))
    result = augment_fields(record, definition, 0, 0, 1)
    expected = [[4, 10, 56, 40, 1], [0, 22, 2, 25, 2], [-1] * 5, [-1] * 5]
    np.testing.assert_allclose(result["boxes"], expected, atol=1e-3)
    np.testing.assert_array_equal(result["keypoints"][:, 2], [0, 1, 0])


def test_a_point_that_comes_into_view_stays_unseen(albumentations: Any, tmp_path: Path, record: dict[str, Any]) -> None:
    shrink = albumentations.Affine(scale=(0.3, 0.3), p=1)
    points = augment_fields(record, _decided(albumentations, tmp_path, shrink), 0, 0, 1)["keypoints"]
    assert (points[2, :2] > 0).all()
    assert (points[2, :2] < (56, 40)).all()
    np.testing.assert_array_equal(points[:, 2], [1, 1, 0])


def test_a_border_that_reflects_makes_no_more_boxes_and_points(
    albumentations: Any, tmp_path: Path, record: dict[str, Any]
) -> None:
    shrink = albumentations.Affine(scale=(0.4, 0.4), border_mode=4, p=1)
    result = augment_fields(record, _decided(albumentations, tmp_path, shrink), 0, 0, 1)
    np.testing.assert_array_equal(result["boxes"][:, 4], [0, 1, 2, -1])
    np.testing.assert_array_equal(result["keypoints"][:, 2], [1, 1, 0])


def test_what_a_pipeline_says_of_its_boxes_holds(albumentations: Any, tmp_path: Path, record: dict[str, Any]) -> None:
    A = albumentations
    params = A.BboxParams("coco", label_fields=["anything"], min_area=50)
    path = tmp_path / "limits.json"
    path.write_text(json.dumps(A.to_dict(A.Compose([A.HorizontalFlip(p=1)], bbox_params=params))))
    definition = resolve(str(path), 40, 56, _fields(record))
    np.testing.assert_array_equal(augment_fields(record, definition, 0, 0, 1)["boxes"][:, 4], [0, 1, -1, -1])


def test_a_transform_alone_takes_fields_too(albumentations: Any, tmp_path: Path, record: dict[str, Any]) -> None:
    path = tmp_path / "alone.json"
    path.write_text(json.dumps(albumentations.to_dict(albumentations.VerticalFlip(p=1))))
    result = augment_fields(record, resolve(str(path), 40, 56), 0, 0, 1)
    np.testing.assert_array_equal(result["mask"], record["mask"][::-1])


def test_the_given_arrays_are_left_as_they_were(record: dict[str, Any]) -> None:
    before = {name: array.copy() for name, array in record.items()}
    for number in range(8):
        augment_fields(record, resolve("strong", 40, 56), 0, number, 1)
    for name, array in before.items():
        np.testing.assert_array_equal(record[name], array)


def test_other_fields_are_passed_through(record: dict[str, Any]) -> None:
    result = augment_fields(record, resolve("strong", 40, 56), 0, 0, 1)
    assert result["tokens"] is record["tokens"]
    assert list(result) == list(record)


def test_without_an_image_nothing_changes() -> None:
    record = {"mask": np.zeros((3, 3)), "tokens": np.arange(4)}
    result = augment_fields(record, resolve("flip", 8, 8), 0, 0, 1)
    assert all(result[name] is array for name, array in record.items())


def test_a_record_without_a_single_box_is_augmented(record: dict[str, Any]) -> None:
    record["boxes"][:] = -1
    for preset in PRESETS:
        result = augment_fields(record, resolve(preset, 40, 56), 0, 1, 1)
        np.testing.assert_array_equal(result["boxes"], record["boxes"])


_FLIP_ALL = """
def flip(parts, generator):
    parts["image"] = parts["image"][:, ::-1]
    parts["mask"] = parts["mask"][:, ::-1]
    parts["keypoints"][:, 0] = parts["image"].shape[1] - parts["keypoints"][:, 0]
    return parts
"""


def test_a_callable_of_more_than_an_image_gets_and_returns_a_dictionary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]
) -> None:
    _module(tmp_path, monkeypatch, "flip_all_by_test", _FLIP_ALL)
    del record["boxes"]
    definition = resolve("flip_all_by_test:flip", 40, 56, _fields(record))
    result = augment_fields(record, definition, 0, 0, 1)
    np.testing.assert_array_equal(result["mask"], record["mask"][:, ::-1])
    np.testing.assert_allclose(result["keypoints"][:, 0], 56 - record["keypoints"][:, 0])
    assert result["tokens"] is record["tokens"]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("parts['image']", "must return a dictionary of image, mask, boxes, keypoints, not ndarray"),
        ("{'image': parts['image']}", "not one of image"),
        ("{**parts, 'more': 1}", "not one of image, mask, boxes, keypoints, more"),
        ("{**parts, 'mask': parts['mask'][..., 0]}", r"must return mask uint8 \(40, 56, 1\), not uint8 \(40, 56\)"),
        ("{**parts, 'boxes': parts['boxes'].astype(float)}", r"must return boxes float32 \(4, 5\), not float64"),
        ("{**parts, 'keypoints': None}", "must return keypoints .* not NoneType"),
    ],
)
def test_a_callable_that_does_not_keep_a_field_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str, reason: str, record: dict[str, Any]
) -> None:
    name = "unfit_parts_" + hashlib.sha256(expression.encode()).hexdigest()[:8]
    _module(tmp_path, monkeypatch, name, f"def f(parts, generator):\n    return {expression}\n")
    with pytest.raises(RecipeError, match=reason):
        resolve(f"{name}:f", 40, 56, _fields(record))
