"""A dataset shows another size than is stored: images by their low frequencies, and what lies on them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tpucache import CachedDataset, CachedLoader, Recipe, UsageError, build_cache
from tpucache.ondevice import decoder
from tpucache.store.codecs.coefficients import layout_of

SIDE = 64


def smooth(seed: int, height: int, width: int) -> np.ndarray[Any, Any]:
    rows, columns = np.mgrid[:height, :width] / 9
    waves = [np.sin(rows * (1 + c / 3) + seed) + np.cos(columns * (1 + c / 5) - seed) for c in range(3)]
    return np.asarray(127 + 60 * np.stack(waves, -1)).astype(np.uint8)


def items(count: int) -> list[dict[str, Any]]:
    """Return images with a mask, boxes and keypoints."""
    found = []
    for seed in range(count):
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[8:32, 16:48] = 1 + seed % 2
        found.append(
            {
                "image": smooth(seed, SIDE, SIDE),
                "mask": mask,
                "boxes": np.array([[16, 8, 48, 32, 1]], np.float32),
                "keypoints": np.array([[20, 10], [63, 63]], np.float32),
                "label": seed % 2,
            }
        )
    return found


@pytest.fixture(scope="module", params=["dct-zstd", "dct-lz4"])
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 64x64 with all that may lie on them."""
    folder = tmp_path_factory.mktemp("sized") / "cache"
    build_cache(items(20), folder, Recipe(size=SIDE, codec=request.param, max_boxes=3, variants=1), jobs=1)
    return folder


def psnr(image: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float(10 * np.log10(255**2 / max(np.mean((image.astype(float) - other) ** 2), 1e-3)))


def resized(image: torch.Tensor, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    return np.asarray(picture.resize(size[::-1], Image.Resampling.LANCZOS)).transpose(2, 0, 1)


@pytest.mark.parametrize(
    ("resolution", "frequencies", "least"), [(32, None, 40), (48, None, 40), (16, 8, 45), (64, 8, 50)]
)
def test_an_image_is_the_stored_one_made_smaller(
    cache: Path, resolution: int, frequencies: int | None, least: float
) -> None:
    whole, shown = CachedDataset(cache), CachedDataset(cache, resolution=resolution, frequencies=frequencies)
    for number in (0, 7):
        image = shown[number]["image"]
        assert image.shape == (3, resolution, resolution)
        assert psnr(image.numpy(), resized(whole[number]["image"], (resolution, resolution))) > least
    assert shown.manifest.fields[0].shape == (resolution, resolution, 3)


@pytest.fixture(scope="module")
def grained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images of 256x256 whose frequencies fall as those of photographs do, by the power 1.3."""
    sides = np.fft.fftfreq(256)
    fall = np.maximum(np.hypot(sides[:, None], sides[None]), 1 / 256) ** 1.3
    made = []
    for seed in range(2):
        noise = np.random.default_rng(seed).standard_normal((256, 256))
        grey = np.real(np.fft.ifft2(np.fft.fft2(noise) / fall))
        grey = 128 + 45 * (grey - grey.mean()) / grey.std()
        made.append({"image": np.clip(grey, 0, 255).astype(np.uint8)[..., None].repeat(3, 2)})
    folder = tmp_path_factory.mktemp("grained") / "cache"
    build_cache(made, folder, Recipe(size=256, codec="dct-lz4", quality=95), jobs=1)
    return folder


@pytest.mark.parametrize(
    ("resolution", "frequencies"),
    [
        (16, 2), (32, 2), (36, 3), (48, 3), (63, 3), (64, 3), (65, 4), (72, 4), (80, 4), (96, 4), (104, 4), (112, 4),
        (120, 4), (124, 5), (127, 5), (128, 4), (130, 5), (144, 5), (160, 5), (192, 6), (224, 7), (250, 8),
    ],
)  # fmt: skip
def test_the_frequencies_taken_by_default_are_enough_for_each_size(
    grained: Path, resolution: int, frequencies: int
) -> None:
    whole, shown = CachedDataset(grained), CachedDataset(grained, resolution=resolution)
    view = shown.manifest.fields[0].view
    assert view is not None
    assert view.frequencies == frequencies
    for number in range(2):
        expected = resized(whole[number][0], (resolution, resolution))
        assert psnr(shown[number][0].numpy(), expected) > 40


def test_what_lies_on_an_image_goes_with_it(cache: Path) -> None:
    item = CachedDataset(cache, resolution=32)[0]
    assert item["mask"].shape == (32, 32, 1)
    inside = np.zeros((32, 32), bool)
    inside[4:16, 8:24] = True
    assert np.array_equal(item["mask"][..., 0].numpy() > 0, inside)
    assert item["boxes"].tolist() == [[8, 4, 24, 16, 1], [-1] * 5, [-1] * 5]
    assert item["keypoints"].tolist() == [[10, 5, 1], [31.5, 31.5, 1]]
    assert item["label"] == 0


def test_every_way_of_reading_gives_the_same(cache: Path) -> None:
    dataset = CachedDataset(cache, resolution=(24, 40), in_memory=False)
    expected = torch.stack([dataset[number]["image"] for number in range(20)])
    for other in (
        dataset,
        pickle.loads(pickle.dumps(dataset)),
        CachedDataset(cache, resolution=(24, 40), in_memory=True),
    ):
        for _ in range(2):
            batches = [batch["image"] for batch in CachedLoader(other, 8)]
            assert torch.equal(torch.cat(batches), expected)
    assert np.array_equal(np.concatenate([*dataset.field_batches("image")]), expected.permute(0, 2, 3, 1).numpy())
    assert torch.equal(dataset.select([3, 1])[1]["image"], expected[1])
    assert dataset.in_variant(1).manifest.fields == dataset.manifest.fields


def test_a_device_is_given_the_low_frequencies_and_makes_the_same_image(cache: Path) -> None:
    dataset = CachedDataset(cache, resolution=32)
    finish = decoder(dataset)
    field = CachedDataset(cache).manifest.fields[0]
    low = layout_of(field.shape, field.quality or 0, field.chroma, 4).nbytes
    for host, packed in zip(CachedLoader(dataset, 8), CachedLoader(dataset, 8, finish="device"), strict=True):
        assert packed["image"].shape == (len(host["image"]), low)
        made = finish(packed["image"])
        assert (made.int() - host["image"].int()).abs().max() <= 1
        assert torch.equal(packed["mask"], host["mask"])


def test_digests_of_resolutions_differ(cache: Path) -> None:
    digests = {
        CachedDataset(cache, resolution=resolution, frequencies=frequencies).digest
        for resolution, frequencies in ((None, None), (32, None), (32, 5), (48, None))
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"resolution": 7}, "from 8 pixels to twice their own"),
        ({"resolution": 200}, "not 200x200"),
        ({"frequencies": 4}, "give resolution="),
        ({"resolution": 32, "frequencies": 9}, "from 1 to 8, not 9"),
        ({"resolution": "32"}, "not '32'"),
    ],
)
def test_what_cannot_be_shown_is_refused(cache: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CachedDataset(cache, **options)


def test_images_of_other_codecs_are_left_to_the_device(tmp_path: Path) -> None:
    build_cache([{"image": smooth(1, 16, 16)}], tmp_path / "raw", Recipe(size=16), jobs=1)
    with pytest.raises(UsageError, match=r"ondevice.decoder\(dataset, size\)"):
        CachedDataset(tmp_path / "raw", resolution=8)
