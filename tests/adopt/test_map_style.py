"""`cached` gives what a data set gives, and no cache of it is used once the set gives anything else."""

from __future__ import annotations

import gc
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from thorough import thorough
from writing import BUILDS

import tpucache
from tpucache import CachedLoader, PictureDataset, Recipe, SampleError, UsageError
from tpucache.adopt.states import MapStyleSource

SIZE, COUNT = 8, 40
#: A picture that is not among the few that are compared where an identity is given.
UNSEEN = next(n for n in range(COUNT) if n not in {number * COUNT // 32 for number in range(32)} | {COUNT - 1})


class Pictures:
    """`COUNT` pictures, each of its number's colour; `changed` are those that have another one."""

    def __init__(self, changed: tuple[int, ...] = (), count: int = COUNT) -> None:
        self.changed, self.count = changed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        colour = (number, 255 * (number in self.changed), 9)
        return Image.new("RGB", (12, 10), colour), number % 3


class Named(Pictures):
    classes = ("ant", "bee", "cat")


class Items:
    """Items as given."""

    def __init__(self, *items: Any, **attributes: Any) -> None:
        self.items = items
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


def opened(dataset: Any, **options: Any) -> PictureDataset:
    return tpucache.cached(dataset, SIZE, jobs=1, **options)


def colours(dataset: PictureDataset) -> list[list[int]]:
    return [image[:, 0, 0].tolist() for image, _ in dataset]


def test_pictures_labels_and_classes_are_those_of_the_set() -> None:
    dataset = opened(Named())
    assert colours(dataset) == [[number, 0, 9] for number in range(COUNT)]
    assert [label for _, label in dataset] == dataset.targets == [number % 3 for number in range(COUNT)]
    assert dataset.classes == ["ant", "bee", "cat"]
    image, label = opened(Named(), transform=np.asarray, target_transform=str)[-1]
    assert (image.shape, label) == ((SIZE, SIZE, 3), "0")
    images, _ = next(iter(CachedLoader(dataset, COUNT)))
    assert torch.equal(images, torch.stack([image for image, _ in dataset]))
    dataset.targets.pop()
    with pytest.raises(UsageError, match="labels of this PictureDataset were changed"):
        dataset.to_cached()


@pytest.mark.parametrize(
    ("label", "expected"), [("cat", 0), (0.5, 0.5), ((0.0, 1.5), [0.0, 1.5]), (np.int64(2), 2), (torch.tensor(1), 1)]
)
def test_labels_of_any_kind_are_pythons(label: Any, expected: Any) -> None:
    dataset = opened(Items(*[(Image.new("RGB", (9, 9)), label)] * 3))
    assert [label for _, label in dataset] == [expected] * 3
    assert type(dataset[0][1]) is type(expected)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, np.ndarray.tolist])
def test_floats_from_0_to_1_are_pictures_of_8_bits(kind: Any) -> None:
    levels = np.linspace(0, 1, 3 * SIZE * SIZE).reshape(3, SIZE, SIZE)
    dataset = opened(Items((kind(levels.astype(np.float32)), 0)))
    assert np.array_equal(dataset[0][0], np.rint(levels * 255))


@pytest.mark.parametrize("options", [{}, {"identity": "birds"}])
def test_the_second_use_builds_nothing(options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert len(opened(Pictures(), **options)) == COUNT
    assert len(opened(Pictures((UNSEEN,)), **options)) == COUNT
    # An identity stands for the pictures that are not compared.
    assert capsys.readouterr().err.count(BUILDS) == (1 if options else 2)


@pytest.mark.parametrize("changed", thorough(0, COUNT - 1))
def test_without_an_identity_a_change_of_the_few_is_noticed(changed: int) -> None:
    opened(Pictures())
    assert colours(opened(Pictures((changed,))))[changed] == [changed, 255, 9]


def test_without_an_identity_each_change_is_noticed_and_the_cache_of_before_removed(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(Pictures())
    dataset = opened(Pictures((UNSEEN,)))
    assert colours(dataset)[UNSEEN] == [UNSEEN, 255, 9]
    (place,) = kept.iterdir()
    assert [each for each in place.iterdir() if each.is_dir()] == [dataset.directory]
    said = capsys.readouterr().err
    assert "Pictures: comparing all 40 pictures with its cache. To compare only a few, pass an identity=" in said
    assert "Pictures has changed since its cache was made" in said


def test_a_changed_label_is_noticed() -> None:
    image = Image.new("RGB", (9, 9))
    opened(Items((image, 0), (image, 1), (image, 0)))
    assert opened(Items((image, 0), (image, 1), (image, 1))).targets == [0, 1, 1]


@pytest.mark.parametrize("other", [Pictures((COUNT - 1,)), *thorough(Pictures(count=COUNT - 1))])
def test_with_an_identity_another_set_is_noticed(other: Pictures, kept: Path) -> None:
    opened(Pictures(), identity="birds")
    assert colours(opened(other, identity="birds")) == colours(opened(other))
    assert len([*kept.glob("birds-*/*/manifest.json")]) == 1


@pytest.mark.parametrize("changed", [(), (UNSEEN,)])
def test_an_unfinished_build_of_a_set_without_identity_is_begun_anew(changed: tuple[int, ...]) -> None:
    begun = opened(Pictures()).directory
    gc.collect()
    (begun / "manifest.json").unlink()
    (begun / ".warmup").mkdir()
    dataset = opened(Pictures(changed))
    assert colours(dataset)[UNSEEN] == [UNSEEN, 255 * bool(changed), 9]
    assert begun.exists() == (dataset.directory == begun) == (not changed)


class Flipped(Pictures):
    def __getitem__(self, number: int) -> Any:
        image, label = super().__getitem__(number)
        image.putpixel((0, 0), (random.randrange(256), random.randrange(256), 0))
        return image, label


@pytest.mark.parametrize(
    ("dataset", "error", "text"),
    [
        (Flipped(), UsageError, "differs each time it is read.*pass them as transform="),
        (Items(), UsageError, "the Items has no samples"),
        (iter([1]), UsageError, "has no length, or no numbered items"),
        (
            Items({"image": np.zeros((4, 4, 3), np.uint8)}),
            SampleError,
            "is a dict, not a picture and its label",
        ),
        (Items((1, 2, 3)), SampleError, "is a tuple, not a picture and its label"),
        (Items(([1, 2], 0)), SampleError, "has input_ids instead of only a picture"),
        (Items((np.full((4, 4, 3), -1.5), 0)), SampleError, "pixels are -1.5"),
    ],
)
def test_what_cannot_be_kept_is_refused(dataset: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(Exception, match=text) as raised:
        opened(dataset)
    assert isinstance(raised.value, error | tpucache.SourceError)


class Late(Pictures):
    """A picture that is not among the few is another one from the second time on that it is read."""

    reads = 0

    def __getitem__(self, number: int) -> Any:
        image, label = super().__getitem__(number)
        self.reads += number == UNSEEN
        image.putpixel((0, 0), (0, 0, min(self.reads, 2) if number == UNSEEN else 0))
        return image, label


def test_a_picture_that_is_another_one_when_the_cache_is_made_is_found(kept: Path) -> None:
    with pytest.raises(UsageError, match=f"item {UNSEEN} of the Late differs each time it is read"):
        opened(Late())
    assert not [*kept.rglob("manifest.json")]


@pytest.mark.parametrize("options", [{}, {"identity": "birds"}])
def test_other_names_of_classes_make_another_cache(options: Any) -> None:
    items = [(Image.new("RGB", (9, 9)), number) for number in range(3)]
    for names in (["ant", "bee", "cat"], ["cat", "bee", "ant"]):
        assert opened(Items(*items, classes=names), **options).classes == names


def test_class_to_idx_numbers_the_classes() -> None:
    image = Image.new("RGB", (9, 9))
    items = Items((image, "ant"), (image, "cat"), (image, "bee"), class_to_idx={"cat": 0, "bee": 1, "ant": 2})
    dataset = opened(items)
    assert (dataset.targets, dataset.classes) == ([2, 0, 1], ["cat", "bee", "ant"])
    directory = dataset.directory.parent / "warmup"
    tpucache.build_cache(items, directory, Recipe(size=8), jobs=1)  # type: ignore[arg-type]
    assert tpucache.CachedDataset(directory).classes == ("cat", "bee", "ant")
    vars(items)["classes"] = np.array(["ant", "bee", "cat"])
    with pytest.raises(tpucache.SourceError, match="class 0 is 'ant' in the attribute classes and 'cat' in class_to_"):
        opened(items)


def test_parts_of_a_set_have_its_classes() -> None:
    image = Image.new("RGB", (9, 9))
    items = Items((image, "ant"), (image, "cat"), (image, "bee"), classes=["ant", "bee", "cat"])
    part: Any = torch.utils.data.Subset(items, [1, 2])  # type: ignore[arg-type]
    both: Any = torch.utils.data.ConcatDataset([part, part])
    for dataset, targets in (part, [2, 1]), (both, [2, 1, 2, 1]):
        found = opened(dataset)
        assert (found.targets, found.classes) == (targets, ["ant", "bee", "cat"])


def test_a_sample_that_was_left_out_stays_so_until_it_is_usable() -> None:
    pictures: list[Any] = [(Image.new("RGB", (9, 9)), number % 3) for number in range(COUNT)]
    for broken in "no picture", np.full((4, 4, 3), -1.5):  # does not load, does not become a record
        items = Items(*pictures[:UNSEEN], (broken, 0), *pictures[UNSEEN + 1 :])
        for _ in range(2):
            assert opened(items, on_error="skip").targets == [n % 3 for n in range(COUNT) if n != UNSEEN]
        with pytest.raises(SampleError, match=f"'{UNSEEN}': .*on_error='skip'"):
            opened(items)
        assert len(opened(Items(*pictures), on_error="skip")) == COUNT


def test_workers_read_the_set_from_a_file_that_goes_with_it() -> None:
    source = MapStyleSource(Items(*[(Image.new("RGB", (9, 9)), lambda: 0)] * 3))  # plain pickle takes no lambda
    copy = pickle.loads(pickle.dumps(source))
    path = Path(source.__getstate__()["_file"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(copy) == 3
    assert len(pickle.dumps(source)) < 500
    del source
    assert not path.exists()


def test_a_recipe_says_what_is_kept() -> None:
    dataset = tpucache.cached(Pictures(), recipe=Recipe(size=(8, 12), codec="png"), jobs=1)
    assert dataset[0][0].shape == (3, 8, 12)
