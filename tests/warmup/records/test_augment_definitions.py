"""What `--augment` takes: files of albumentations.to_dict and callables; what is neither is refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml

from tpucache.errors import RecipeError, UsageError
from tpucache.warmup.plan import resolve
from tpucache.warmup.records.augment import augment

Pixels = npt.NDArray[np.uint8]

_SIDE = 24
_PLACES = [(seed, number, variant) for seed in (0, 1) for number in (0, 1, 2**40) for variant in (1, 2)]


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_yaml_and_json_mean_the_same(two_flips: Path, suffix: str) -> None:
    other = two_flips.with_suffix(f".{suffix}")
    other.write_text(yaml.safe_dump(json.loads(two_flips.read_text())))
    assert resolve(str(other), 8, 8) == resolve(str(two_flips), 8, 8)


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
    albumentations: Any, write_module: Callable[..., None], image: Pixels
) -> None:
    text = "import albumentations as A\npipeline = A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)])\n"
    write_module("pipeline_by_test", text)
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
        ("a.json", b"{", "is not a valid .json file"),
        ("a.json", b"\xff\xfe\x00", "cannot be read"),
        ("a.json", b"[1, 2]", "holds no augmentation"),
        ("a.json", b'{"transforms": []}', "holds no augmentation"),
        ("a.json", b'{"transform": {}, "callable": "os:_exit"}', "holds no augmentation"),
        ("a.json", b'{"transform": 3}', "cannot build"),
        ("a.json", b'{"transform": {"__class_fullname__": "NoSuchTransform", "p": 1.0}}', "NoSuchTransform"),
        ("a.yaml", b"a: [", "is not a valid .yaml file"),
        ("a.yaml", b"!!python/object/apply:os.getcwd []", "is not a valid .yaml file"),
        ("a.yml", b"", "holds no augmentation"),
        ("a.json", b'{"transform": 3, "transform": 4}', "the key 'transform' is there twice"),
        ("a.yaml", b"transform: 3\ntransform: 4\n", "the key 'transform' is there twice"),
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
def test_a_module_that_does_not_import_is_a_usage_error_naming_it(write_module: Callable[..., None], text: str) -> None:
    write_module("unimportable_by_test", text)
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
    write_module: Callable[..., None], expression: str, reason: str
) -> None:
    name = "unfit_" + hashlib.sha256(expression.encode()).hexdigest()[:8]
    write_module(name, f"def f(image, generator):\n    return {expression}\n")
    with pytest.raises(RecipeError, match=reason):
        resolve(f"{name}:f", 8, 8)


def test_a_pipeline_that_changes_the_size_is_refused_before_anything_is_built(
    albumentations: Any, tmp_path: Path
) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(albumentations.to_dict(albumentations.Compose([albumentations.Resize(6, 6)]))))
    with pytest.raises(RecipeError, match=r"\(8, 8, 3\), not uint8 \(6, 6, 3\)"):
        resolve(str(path), 8, 8)
