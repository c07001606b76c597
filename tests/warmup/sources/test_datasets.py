"""The dataset source: what becomes of the items of a map-style dataset."""

from __future__ import annotations

import io
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.warmup.records.masks import decode_mask
from tpucache.warmup.sources import DatasetSource, Sample, open_source
from tpucache.warmup.sources.source import Item

IMAGE = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
NAME = "datasets_by_test:make"

_NUMBERS = itertools.count()

Make = Callable[..., DatasetSource]


class _Dataset:
    """Items as they are given; an exception is raised instead of returned."""

    def __init__(self, items: Sequence[Any], **attributes: Any) -> None:
        self._items = items
        self.__dict__ |= attributes

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> Any:
        if isinstance(self._items[number], Exception):
            raise self._items[number]
        return self._items[number]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An importable module. A process keeps what a function of it made, so that each has a name of its own."""
    module = types.ModuleType("datasets_by_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def make(module: types.ModuleType) -> Make:
    def make(*items: Any, **attributes: Any) -> DatasetSource:
        setattr(module, name := f"make{next(_NUMBERS)}", lambda: _Dataset(items, **attributes))
        return DatasetSource(f"{module.__name__}:{name}")

    return make


def _load(source: DatasetSource, number: int = 0) -> Item:
    return source.load(source.list().samples[number])


def _arrays(item: Item) -> dict[str, Any]:
    return {
        name: (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value
        for name, value in item.fields.items()
    }


def test_the_callable_is_called_once_a_process_and_only_when_needed(module: types.ModuleType) -> None:
    calls = []

    def create() -> _Dataset:
        calls.append(1)
        return _Dataset([IMAGE, IMAGE], classes=["a", "b"])

    module.counted = create  # type: ignore[attr-defined]
    source = open_source("datasets_by_test:counted")
    assert not calls
    copy = pickle.loads(pickle.dumps(source))
    assert not calls
    for sample in copy.list().samples:
        source.load(sample)
    assert len(calls) == 1
    assert len(pickle.dumps(source)) < 200


def test_paths_and_classes_of_the_dataset_are_used(make: Make) -> None:
    source = make((IMAGE, 0), (IMAGE, 1), (IMAGE, 2), paths=["a.jpg", Path("b.jpg"), "a.jpg"], classes=("x", "y", "z"))
    listing = source.list()
    assert [sample.path for sample in listing.samples] == ["a.jpg", "b.jpg", "a.jpg#2"]
    assert listing.classes == ("x", "y", "z")
    assert source.load(Sample(9, "a.jpg#2")).label == 2  # whatever number a cache gave it


@pytest.mark.parametrize("classes", [["a", "b", "a"], {"a": 0}, "ab", [1], [("a", "b")]], ids=str)
def test_classes_that_are_no_different_names_are_told_of(
    make: Make, classes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert make((IMAGE, 0), classes=classes).list().classes == ()
    assert "its attribute classes is no list of different texts" in caplog.text


@pytest.mark.parametrize(
    ("name", "created", "error", "reason"),
    [
        (NAME, lambda: {}[1], SourceError, f"{NAME}.*raised KeyError"),
        (NAME, lambda: 7, SourceError, f"{NAME}.*returned a int"),
        (NAME, lambda: {1}, SourceError, f"{NAME}.*a set"),
        (NAME, lambda: _Dataset([IMAGE, IMAGE], paths=["a"]), SourceError, f"{NAME}.*paths"),
        (NAME, lambda: _Dataset([IMAGE, IMAGE], paths=[1, 2]), SourceError, f"{NAME}.*paths"),
        (NAME, lambda: _Dataset([IMAGE], classes=["a", "b"], class_to_idx={"b": 0, "a": 1}), SourceError, "classes"),
        ("datasets_by_test:nothing", None, UsageError, "cannot be imported"),
        ("no_such_module_at_all:make", None, UsageError, "cannot be imported"),
    ],
)
def test_what_is_no_dataset_is_refused(
    module: types.ModuleType, name: str, created: Any, error: type[Exception], reason: str
) -> None:
    own = name.replace("make", f"make{next(_NUMBERS)}")
    if created:
        setattr(module, own.rpartition(":")[2], created)
    with pytest.raises(error, match=reason):
        open_source(own if created else name).list()


@pytest.mark.parametrize("image", [IMAGE, Image.fromarray(IMAGE)], ids=["array", "PIL"])
def test_an_image_alone_or_with_its_label_is_an_image(make: Make, image: Any) -> None:
    source = make(image, (image, 3), {"image": image, "label": 4})
    items = [_load(source, number) for number in range(3)]
    assert [item.label for item in items] == [None, 3, 4]
    for item in items:
        np.testing.assert_array_equal(item.fields["image"], IMAGE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "label"),
    [
        (3, 3),
        (True, 1),
        (np.int64(-1), -1),
        (np.array(5, np.uint8), 5),
        (0.5, (0.5,)),
        (np.float32(0.5), (0.5,)),
        (np.array(0.5), (0.5,)),
        (np.array([0.5, 1.0], np.float32), (0.5, 1.0)),
        (np.array([1, 0, 1]), (1.0, 0.0, 1.0)),
        ([1, 0], (1.0, 0.0)),
        (np.array([2]), 2),
        ([2], (2.0,)),
        (None, None),
    ],
    ids=repr,
)
def test_labels_are_class_numbers_or_vectors(make: Make, given: Any, label: Any) -> None:
    source = make(
        (IMAGE, given),
        {"image": IMAGE, "target": given},
        {"image": IMAGE, "labels": given},
        {"image": IMAGE, "targets": given},
    )
    for number in range(4):
        found = _load(source, number).label
        assert found == label
        assert type(found) is type(label)
        assert not isinstance(found, tuple) or {type(value) for value in found} == {float}


def test_a_dictionary_is_fields_and_columns_by_name(make: Make) -> None:
    item = _load(
        make(
            {
                "image": b"encoded",
                "boxes": [[0.0, 1.0, 2.0, 3.0]],
                "input_ids": [1, 2],
                "seen": np.array([True]),
                "wide": np.array([1, 2], ">i4"),
                "target": 7,
                "text": "t",
                "score": 0.5,
                "size": np.array(9),
                "fine": True,
                "a b": 1,
            }
        )
    )
    assert _arrays(item) == {
        "image": b"encoded",
        "boxes": ("<f8", [[0.0, 1.0, 2.0, 3.0]]),
        "input_ids": ("<i8", [1, 2]),
        "seen": ("|b1", [True]),
        "wide": ("<i4", [1, 2]),
    }
    assert item.label == 7
    assert item.columns == {"text": "t", "score": 0.5, "size": 9, "fine": 1, "a_b": 1}
    assert {name: type(value) for name, value in item.columns.items()} == {
        "text": str,
        "score": float,
        "size": int,
        "fine": int,
        "a_b": int,
    }


def test_the_first_name_of_a_label_counts_and_others_are_ordinary(make: Make) -> None:
    item = _load(make({"ids": [1, 2], "labels": [3, 4], "label": 1}))
    assert item.label == 1
    assert _arrays(item)["labels"] == ("<i8", [3, 4])


@pytest.mark.parametrize(
    ("item", "columns"),
    [
        ({"path": "p"}, {"id": "p"}),
        ({"id": "i"}, {"id": "i"}),
        ({"path": "p", "id": "i"}, {"path_": "p", "id": "i"}),
        ({"path": 3}, {"path_": 3}),
    ],
    ids=str,
)
def test_the_id_of_a_dictionary_is_its_id_or_path(make: Make, item: dict[str, Any], columns: Any) -> None:
    assert _load(make({"image": IMAGE, **item})).columns == columns


def test_tensors_are_arrays_of_their_own_dtype(make: Make) -> None:
    torch = pytest.importorskip("torch")
    tokens = {"ids": torch.tensor([1, 2]), "half": torch.ones(2, dtype=torch.float16), "n": torch.tensor(3)}
    item = _load(make((tokens, torch.tensor(1))))
    assert _arrays(item) == {"ids": ("<i8", [1, 2]), "half": ("<f2", [1.0, 1.0])}
    assert (item.label, item.columns) == (1, {"n": 3})


@pytest.mark.parametrize("mode", ["1", "P", "LA", "RGBA", "I;16"])
def test_pil_images_of_other_modes_come_as_they_are(make: Make, mode: str) -> None:
    image = Image.new("I;16", (3, 2), 700) if mode == "I;16" else Image.fromarray(IMAGE).convert(mode)
    image.getexif()[0x0112] = 6
    data = _load(make(image)).fields["image"]
    assert isinstance(data, bytes)
    with Image.open(io.BytesIO(data)) as read:
        assert (read.mode, read.tobytes(), dict(read.getexif())) == (mode, image.tobytes(), {})


def test_a_palette_mask_keeps_numbers_beyond_its_palette(make: Make) -> None:
    numbers = np.array([[0, 1, 255], [2, 20, 21]], np.uint8)
    mask = Image.fromarray(numbers).convert("L")
    indexed = Image.frombytes("P", mask.size, mask.tobytes())
    indexed.putpalette(bytes(range(9)))
    data = _load(make({"image": IMAGE, "mask": indexed})).fields["mask"]
    np.testing.assert_array_equal(decode_mask(data, "0"), numbers)


def test_an_image_that_is_decoded_late_and_broken_is_a_sample_error(make: Make) -> None:
    target = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(target, "PNG")
    with pytest.raises(SampleError, match="'image' does not decode"):
        _load(make(Image.open(io.BytesIO(target.getvalue()[:2000]))))


def test_an_exception_of_the_dataset_is_a_sample_error_with_its_type(make: Make) -> None:
    source = make(IMAGE, ZeroDivisionError("by zero"), paths=["a", "b"])
    _load(source, 0)
    with pytest.raises(SampleError, match=f"{NAME}.* raised ZeroDivisionError: by zero") as caught:
        _load(source, 1)
    assert caught.value.path == "b"


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"image": IMAGE, "x": None}, "'x' is a NoneType"),
        ({"image": IMAGE, "x": {"y": 1}}, "'x' is a dict"),
        ({"image": IMAGE, "x": b"bytes"}, "'x' is a bytes"),
        ({"image": IMAGE, "x": ["a"]}, "'x' is a list of dtype <U1"),
        ({"image": IMAGE, "x": [[1], [2, 3]]}, "'x' cannot be made an array: ValueError"),
        ({"image": IMAGE, "x": np.array([None])}, "'x' is a ndarray of dtype object"),
        ({"image": IMAGE, "x": 1j}, "'x' is a complex"),
        ({"image": IMAGE, 5: 1}, "key 5 is a int"),
        ({"id": "a", "n": 1}, "no image and no array among its keys id, n"),
        ((IMAGE, IMAGE), r"'label' has the shape \(2, 4, 3\)"),
        ((IMAGE, 1, 2), "a tuple of 3"),
        (
            {"image": IMAGE, "boxes": np.ones((2, 4)), "labels": np.array([3, 1])},
            "as many 'labels' as boxes: give the class of each box as the fifth number",
        ),
        ("path.jpg", "'image' is a str: give the image itself"),
        (("a fine film", 1), r"tokenise first, and give \{'input_ids'"),
        ({"text": "a fine film", "label": 1}, r"no array among its keys text, label: .*tokenise first"),
        (None, "'image' is a NoneType"),
        pytest.param(Image.new("HSV", (2, 2)), "'image' is a HSV image", id="HSV"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_a_sample_error_naming_key_and_type(make: Make, item: Any, reason: str) -> None:
    with pytest.raises(SampleError, match=reason) as caught:
        _load(make(item))
    assert caught.value.path == "0"
