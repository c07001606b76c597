"""Random crops out of packed images are Pillow's crops of the decoded ones, resized without aliasing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from augmenting import dataset_of, rounded_products, scene
from PIL import Image

from tpucache.errors import UsageError
from tpucache.ondevice import AugmentSettings, decoder, draw
from tpucache.ondevice.draws import COLUMNS_REVERSED, CROPPED
from tpucache.store.codecs import coefficients, yuv420
from tpucache.store.codecs.coefficients import layout_of
from tpucache.store.fields import Field

Array = np.ndarray[Any, Any]

FIELDS = [
    Field("image", "dct-zstd", "|u1", (96, 96, 3), 90, "420"),
    Field("image", "dct-lz4", "|u1", (90, 101, 3), 95, "444"),
    Field("image", "dct-zstd", "|u1", (61, 72, 1), 90, "420"),
    Field("image", "yuv420", "|u1", (63, 80, 3)),
    Field("image", "raw", "|u1", (64, 64, 3)),
    Field("image", "jpeg", "|u1", (50, 64, 1)),
]


def pictures(field: Field, count: int) -> tuple[torch.Tensor, list[Array]]:
    """Return images as a loader gives them, and as they are when they are decoded."""
    height, width, channels = field.shape
    whole = scene(height + count, width, channels)
    images = [whole[at : at + height] for at in range(count)]
    if field.codec.startswith("dct"):
        layout = layout_of(field.shape, field.quality or 0, field.chroma)
        packed = [coefficients.pack(image, layout) for image in images]
        images = [coefficients.unpack(item, layout) for item in packed]
    elif field.codec == "yuv420":
        packed = [yuv420.pack(image) for image in images]
        images = [yuv420.unpack(item, height, width) for item in packed]
    else:
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), images
    return torch.from_numpy(np.stack([np.frombuffer(item, np.uint8) for item in packed])), images


def cropped(image: Array, draws: Array, size: tuple[int, int]) -> Array:
    """Return what Pillow makes of one sample: (channels, height, width)."""
    top, height, left, width = draws[CROPPED].astype(int)
    part = image[top : top + height, left : left + width]
    picture = Image.fromarray(part[..., 0] if part.shape[2] == 1 else part)
    found = np.asarray(picture.resize(size[::-1], Image.Resampling.LANCZOS)).reshape(*size, -1)
    found = found[:, ::-1] if draws[COLUMNS_REVERSED] else found
    return found.transpose(2, 0, 1)


def module_of(field: Field, size: Any) -> torch.nn.Module:
    return decoder(dataset_of(field), size, crop=True)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"{field.codec} {field.shape}")
@pytest.mark.parametrize("size", [(32, 32), (48, 40), None])
def test_a_crop_is_the_one_that_pillow_makes_of_the_decoded_image(field: Field, size: tuple[int, int] | None) -> None:
    batch, images = pictures(field, 12)
    draws = draw(AugmentSettings(crop=True, flip=True), 3, 5, len(images), field.shape[:2])
    assert {*draws[:, COLUMNS_REVERSED].tolist()} == {0, 1}
    found = module_of(field, size)(batch, torch.from_numpy(draws))
    assert found.dtype == torch.uint8
    for image, row, one in zip(images, draws, found.numpy(), strict=True):
        expected = cropped(image, row, size or field.shape[:2])
        assert one.shape == expected.shape
        error = one.astype(float) - expected
        assert 10 * np.log10(255**2 / max(np.mean(error**2), 1e-3)) > 45
        assert field.codec not in ("raw", "jpeg") or abs(error).max() <= 1


@pytest.mark.parametrize("field", FIELDS[:4], ids=lambda field: f"{field.codec} {field.shape}")
def test_products_of_rounded_numbers_change_no_pixel_by_more_than_a_level(field: Field) -> None:
    batch, images = pictures(field, 6)
    draws = torch.from_numpy(draw(AugmentSettings(crop=True), 1, 2, len(images), field.shape[:2]))
    module = module_of(field, 40)
    expected = module(batch, draws)
    with rounded_products():
        assert (module(batch, draws).int() - expected.int()).abs().max() <= 1


def test_a_size_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(UsageError, match="twice their own"):
        module_of(FIELDS[0], 400)
