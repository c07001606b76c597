"""findings: what the samples table knows of images and classes, and nothing where it knows nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from photographs import build_pictures, edited, picture
from PIL import Image

from tpucache import CachedDataset
from tpucache.insight import confirm_copies, find_leak, findings, hashes, pairs


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of eight pictures, of which some are blank, tiny, long, turned, or of another type than they say."""
    folder = tmp_path_factory.mktemp("odd")
    turned = Image.Exif()
    turned[0x0112] = 6
    (folder / "a").mkdir()
    Image.fromarray(picture(5)[:, :80]).save(folder / "a" / "turned.jpg", exif=turned)
    Image.fromarray(picture(6)).save(folder / "a" / "lies.png", "JPEG")
    pixels = {"a/plain.png": picture(1), "a/blank.png": np.full((96, 96, 3), (9, 200, 30))}
    pixels |= {"a/tiny.png": picture(2)[:20, :90], "a/long.png": np.tile(picture(3), (5, 1, 1))}
    return build_pictures(folder, {**pixels, "b/=cmd.png": picture(4)})


def test_each_finding_names_its_samples(odd: Path) -> None:
    found = findings(odd)
    named = {name: [found.paths[at] for at in positions] for name, positions in found.images.items()}
    assert named == {
        "blank": ["a/blank.png"],
        "tiny": ["a/tiny.png"],
        "long": ["a/long.png", "a/tiny.png"],
        "suffix": ["a/lies.png"],
        "turned": ["a/turned.jpg"],
    }
    assert found.paths[found.extremes["faintest"][0]] == "a/blank.png"
    assert any("2 classes with fewer" in line or "1 classes with fewer" in line for line in found.lines())


def test_the_facts_are_columns_that_can_be_asked_for(odd: Path) -> None:
    dataset = CachedDataset(odd)
    place = dataset.paths.index("a/turned.jpg")
    table = dataset.table
    assert (table["image_width"][place], table["image_height"][place]) == (96, 80)
    assert (table["image_type"][place], table["image_turned"][place]) == ("jpeg", 1)
    assert dataset.where("image_height > 400").paths == ["a/long.png"]
    pixels = np.asarray(dataset[0][0]).astype(np.float64)
    assert table["image_mean"][0] == pytest.approx(pixels.mean())
    assert table["image_std"][0] == pytest.approx(np.sqrt(pixels.var((1, 2)).mean()))


def test_leaks_are_found_by_records_and_by_hashes_once_these_are_kept(tmp_path: Path) -> None:
    pixels = {f"{number}.png": picture(number) for number in range(6)}
    pixels |= {"1.png": picture(0), "3.png": edited(picture(2), 2)}
    dataset = CachedDataset(build_pictures(tmp_path / "leaky", pixels))
    train, valid = dataset.select([0, 2, 4]), dataset.select([5, 3, 1])
    leak = find_leak(train, valid)
    assert (leak.samples, leak.compared, leak.path) == (1, "records", "1.png")
    hashes(dataset)
    leak = find_leak(train, valid)
    assert (leak.samples, leak.compared) == (2, "hashes")
    assert find_leak(train, dataset.select([5])).samples == 0


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of five pictures: 1 looks like 0, and has other details; 3 is a brighter 0, and 4 is 2 mirrored."""
    coarse = np.random.default_rng(0).uniform(50, 200, (12, 12, 3)).astype(np.uint8)
    smooth = np.array(Image.fromarray(coarse).resize((96, 96), Image.Resampling.BICUBIC)).astype(int)
    first, second = (
        np.clip(smooth + np.kron(np.random.default_rng(seed).integers(-9, 10, (32, 32, 1)), np.ones((3, 3, 1))), 0, 255)
        for seed in (1, 2)
    )
    pictures = [first, second, picture(7), first * 1.2, picture(7)[:, ::-1]]
    return build_pictures(tmp_path_factory.mktemp("alike"), {f"{at}.png": pixels for at, pixels in enumerate(pictures)})


def test_pictures_that_look_alike_are_no_copies_unless_their_details_agree(alike: Path) -> None:
    dataset = CachedDataset(alike)
    found = pairs(hashes(dataset))
    expected = {(0, 1): False, (0, 3): True, (1, 3): False, (2, 4): True}
    for given in (dataset, alike):
        is_copy = confirm_copies(found, given).tolist()
        assert (
            dict(zip(zip(found.first.tolist(), found.second.tolist(), strict=True), is_copy, strict=True)) == expected
        )
    assert found.is_mirrored.sum() == 1
    leak = find_leak(dataset.select([0]), dataset.select([2, 1]))
    assert (leak.samples, leak.path) == (0, "")
    leak = find_leak(dataset.select([2, 0]), dataset.select([1, 4, 3]))
    assert (leak.samples, leak.path) == (2, "4.png")
