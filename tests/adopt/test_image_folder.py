"""ImageFolder gives what torchvision's gives, builds its cache once, and makes it anew once a picture changes."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from thorough import thorough
from torch.utils.data import DataLoader, Subset, random_split
from writing import BUILDS, changing, write_picture

from tpucache import (
    BuildError,
    CachedDataset,
    CachedLoader,
    ImageFolder,
    Recipe,
    SampleError,
    SourceError,
    UsageError,
    build_cache,
)

SIZE = 8


def opened(root: Path, **options: Any) -> ImageFolder:
    return ImageFolder(root, size=SIZE, jobs=1, **options)


def pixels(dataset: ImageFolder) -> list[list[int]]:
    return [dataset[index][0].flatten().tolist() for index in range(len(dataset))]


def states(kept: Path) -> list[str]:
    (place,) = kept.iterdir()
    return sorted(each.name for each in place.iterdir() if each.is_dir())


def test_attributes_are_those_of_torchvision(root: Path) -> None:
    dataset = opened(root)
    names = ["10/a.png", "10/c.png", "9/a.png", "9/b.png", "cat/x.png", "cat/y.png"]
    assert dataset.classes == ["10", "9", "cat"]
    assert dataset.class_to_idx == {"10": 0, "9": 1, "cat": 2}
    assert dataset.samples == [(str(root / name), number // 2) for number, name in enumerate(names)]
    assert dataset.imgs is dataset.samples
    assert dataset.targets == [0, 0, 1, 1, 2, 2]
    assert (dataset.root, dataset.transform, dataset.target_transform) == (str(root), None, None)
    assert len(dataset) == 6


def test_paths_begin_as_the_root_was_given(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    assert ImageFolder("photos/", size=SIZE, jobs=1).samples[0][0] == "photos/10/a.png"
    monkeypatch.setenv("HOME", str(root.parent))
    assert ImageFolder("~/photos", size=SIZE, jobs=1).samples[0][0] == str(root / "10" / "a.png")


def test_pictures_are_those_of_a_cache_of_the_folder(root: Path, tmp_path: Path) -> None:
    dataset = opened(root)
    build_cache(root, tmp_path / "cache", Recipe(size=SIZE), jobs=1)
    by_path = {
        path: image
        for path, (image, _) in zip(
            CachedDataset(tmp_path / "cache").paths, CachedDataset(tmp_path / "cache"), strict=True
        )
    }
    for (path, label), (image, found) in zip(dataset.samples, dataset, strict=True):
        assert torch.equal(image, by_path[os.path.relpath(path, root)])
        assert (image.dtype, image.shape) == (torch.uint8, (3, SIZE, SIZE))
        assert found == label
        assert type(found) is int


def test_a_transform_is_given_a_pil_image_and_a_target_transform_the_label(root: Path) -> None:
    plain = opened(root)
    dataset = opened(root, transform=lambda image: (image.mode, image.size, np.asarray(image)), target_transform=str)
    (mode, size, array), label = dataset[-1]
    assert (mode, size, label) == ("RGB", (SIZE, SIZE), "2")
    assert np.array_equal(array, plain[5][0].permute(1, 2, 0))


def test_grey_and_transparent_pictures_are_rgb_and_others_are_asked_for(root: Path) -> None:
    assert ImageFolder(root, transform=str, recipe=Recipe(size=8, mode="keep"), jobs=1)[0][0].startswith("<PIL.Image")
    write_picture(root / "9" / "grey.png", 7, "L")
    write_picture(root / "9" / "clear.png", 8, "RGBA")
    for asked, mode in (("rgb", "RGB"), ("grey", "L")):
        dataset = ImageFolder(root, transform=lambda image: image, recipe=Recipe(size=SIZE, mode=asked), jobs=1)
        assert {image.mode for image, _ in dataset} == {mode}
    assert ImageFolder(root, recipe=Recipe(size=SIZE, mode="grey"), jobs=1)[0][0].shape == (1, SIZE, SIZE)


def test_the_second_use_builds_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = pixels(opened(root))
    assert pixels(opened(root)) == before
    (root.parent / "link").symlink_to(root)
    assert len(opened(root.parent / "link")) == 6
    assert capsys.readouterr().err.count(BUILDS) == 1


def test_a_picture_of_equal_size_and_date_is_noticed_and_the_cache_of_before_removed(
    root: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, path = opened(root), root / "9" / "a.png"
    before, status = pixels(dataset), path.stat()
    first = states(kept)
    del dataset
    # Another picture, without compression and so of the same size.
    Image.new("RGB", (12, 10), "red").save(path, "bmp")
    size = path.stat().st_size
    opened(root)
    middle = states(kept)
    Image.new("RGB", (12, 10), "blue").save(path, "bmp")
    assert path.stat().st_size == size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = pixels(opened(root))
    assert after[2] == [0] * 2 * SIZE * SIZE + [255] * SIZE * SIZE
    assert after[:2] + after[3:] == before[:2] + before[3:]
    assert not {*first} & {*middle}
    assert len(states(kept)) == 1
    assert "photos has changed since its cache was made" in capsys.readouterr().err


def test_a_cache_that_is_read_is_not_removed(root: Path, kept: Path) -> None:
    dataset = opened(root)
    before = pixels(dataset)
    write_picture(root / "9" / "new.png", 9)
    assert len(opened(root)) == 7
    assert len(states(kept)) == 2
    assert pixels(pickle.loads(pickle.dumps(dataset))) == before
    copy = pickle.loads(pickle.dumps(dataset))
    del dataset
    write_picture(root / "9" / "newer.png", 10)
    opened(root)
    assert len(states(kept)) == 3 - 1  # what nothing refers to any more is gone, the copy's is not
    assert pixels(copy) == before


def test_of_two_that_come_at_once_one_builds_and_the_other_waits(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(opened, [root] * 2)
    assert pixels(first) == pixels(second)
    assert capsys.readouterr().err.count("later runs with the same pictures will use this cache") == 1


def test_a_picture_that_changes_while_the_cache_is_made_ends_it(root: Path, kept: Path) -> None:
    with changing([root / "9" / "a.png"]), pytest.raises(SourceError, match="pictures of photos were changed while"):
        opened(root)
    assert states(kept) == []


def test_samples_may_be_shortened_ordered_anew_and_relabelled(root: Path) -> None:
    dataset, whole = opened(root), opened(root)
    dataset.samples = [(path, 1 - label) for path, label in reversed(dataset.samples[:4])]
    assert len(dataset) == 4
    assert [label for _, label in dataset] == [0, 0, 1, 1]
    assert all(torch.equal(dataset[at][0], whole[3 - at][0]) for at in range(4))
    with pytest.raises(UsageError, match="labels of this ImageFolder were changed"):
        CachedLoader(dataset, 2)
    dataset.samples = whole.samples[:1:-1]
    images, labels = next(iter(CachedLoader(dataset, 4)))
    assert labels.tolist() == [2, 2, 1, 1]
    assert torch.equal(images[0], whole[5][0])
    dataset.samples.append((str(root / "9" / "later.png"), 1))
    with pytest.raises(UsageError, match=r"later.png is not one of the pictures that"):
        dataset[-1]


class WithPath(ImageFolder):
    """As users have it in torchvision."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), self.samples[index][0])


def test_a_subclass_gives_its_own_items_also_in_batches(root: Path) -> None:
    dataset = WithPath(root, size=SIZE, jobs=1)
    _, labels, paths = next(iter(DataLoader(dataset, 6)))
    assert list(zip(paths, labels.tolist(), strict=True)) == dataset.samples


def own(base: type, name: str) -> Any:
    """Return a kind of data set with a method of its own."""
    return type("Own", (base,), {name: lambda *_, **__: 2})


class Wrapped:
    """Changes the items of a data set, and has all of its attributes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index][0], 7


def test_kinds_that_choose_change_or_list_samples_themselves_are_refused(root: Path) -> None:
    for name in "__len__", "__getitem__", "__getitems__":
        with pytest.raises(UsageError, match=f"Own has a {name} of its own"):
            CachedLoader(own(ImageFolder, name)(root, size=SIZE, jobs=1), 2)
    for name in "find_classes", "make_dataset":
        with pytest.raises(UsageError, match=f"Own has a {name} of its own, which is not called here"):
            own(ImageFolder, name)(root, size=SIZE, jobs=1)
    parts = [own(Subset, name)(opened(root), range(4)) for name in ("__len__", "__getitems__")]
    for other in (*parts, Wrapped(opened(root))):
        with pytest.raises(UsageError, match=f"not {type(other).__name__}: use DataLoader"):
            CachedLoader(other, 2)
    for name in ("transform", "target_transform"):
        with pytest.raises(UsageError, match=f"ImageFolder has a {name}, which changes samples one by one"):
            CachedLoader(Subset(opened(root, **{name: str}), [0]), 1)


def test_a_cached_loader_takes_it_and_parts_of_it(root: Path) -> None:
    dataset = opened(root)
    for part in (dataset, Subset(dataset, [4, 1]), *random_split(dataset, [2, 4])):
        images, labels = next(iter(CachedLoader(part, len(part))))
        assert torch.equal(images, torch.stack([image for image, _ in part]))
        assert labels.tolist() == [label for _, label in part]


def test_a_picture_that_cannot_be_decoded_is_an_error_or_is_left_out(root: Path) -> None:
    (root / "9" / "broken.png").write_bytes(b"no picture")
    with pytest.raises(SampleError, match=r"'9/broken.png': "):
        opened(root)
    dataset = opened(root, on_error="skip")
    assert [Path(path).name for path, _ in dataset.samples] == [
        "a.png",
        "c.png",
        "a.png",
        "b.png",
        "x.png",
        "y.png",
    ]
    with pytest.raises(SampleError, match=r"'9/broken.png'.*on_error='skip'"):
        opened(root)


def test_an_empty_class_is_an_error_or_a_class(root: Path) -> None:
    (root / "aaa").mkdir()
    with pytest.raises(SourceError, match="without a picture: 'aaa'"):
        opened(root)
    dataset = opened(root, allow_empty=True)
    assert dataset.classes == ["10", "9", "aaa", "cat"]
    assert dataset.targets == [0, 0, 1, 1, 3, 3]


def test_a_cache_is_kept_where_the_caller_says(root: Path, tmp_path: Path, kept: Path) -> None:
    dataset = opened(root, cache=tmp_path / "mine")
    assert dataset.directory.parts[: len(tmp_path.parts) + 2] == (tmp_path / "mine" / "datasets").parts
    assert not kept.exists()


def test_a_finished_cache_is_read_where_nothing_can_be_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pixels(opened(root))
    open_file = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise PermissionError(13, "read only", str(path))
        return open_file(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert pixels(opened(root)) == before


def test_what_cannot_be_meant_or_done_is_refused(root: Path, tmp_path: Path, kept: Path) -> None:
    (tmp_path / "file").touch()
    for options, error, words in (
        ({"transform": 224}, UsageError, "transform is called with each picture.*size="),
        ({"recipe": Recipe(size=8, variants=2)}, UsageError, "only CachedDataset reads augmented variants"),
        ({"cache": root / "cache"}, UsageError, r"inside of .*photos, whose folders are classes"),
        (
            {"cache": tmp_path / "file"},
            BuildError,
            r"the cache of photos cannot be kept in .*file.*cache=, or set TPUCACHE_DIR",
        ),
    ):
        with pytest.raises(error, match=words):
            ImageFolder(root, jobs=1, **options)  # type: ignore[arg-type]  # as it is given
    opened(root)
    (place,) = kept.iterdir()
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")
    with pytest.raises(Exception, match="is a link, or belongs to another user"):
        opened(root)


WORKERS = """
import sys
from torch.utils.data import DataLoader
from tpucache import ImageFolder

if __name__ == "__main__":
    dataset = ImageFolder(sys.argv[1], size=8, jobs=1)
    loader = DataLoader(dataset, 3, num_workers=1, multiprocessing_context=sys.argv[2])
    print([[image.sum().item() for image in images] for images, _ in loader])
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", *thorough("spawn")])
def test_workers_of_any_kind_read_it(root: Path, run_forking: Any, context: str) -> None:
    sums = [image.sum().item() for image, _ in opened(root)]
    assert run_forking(WORKERS, root, context) == f"{[sums[:3], sums[3:]]}\n"
