"""Decoders on the device: the host's pixels within one level, also where a matrix product rounds to bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from augmenting import rounded_products

from tpucache.ondevice.decode import CoefficientDecoder, PackedDecoder, Yuv420Decoder, to_bfloat16
from tpucache.ondevice.modules import Decoder
from tpucache.store.codecs import coefficients, yuv420
from tpucache.store.codecs.coefficients import CoefficientLayout


def noisy_images(height: int, width: int, channels: int) -> np.ndarray[Any, Any]:
    """Return noise, saturated squares, and gradients: (6, height, width, channels)."""
    rng = np.random.default_rng(1)
    squares = rng.choice(np.array([0, 255], np.uint8), (2, -(-height // 8), -(-width // 8), channels))
    rows, columns = np.mgrid[:height, :width]
    ramps = [(rows * a + columns * b) % 256 for a, b in ((1, 2), (3, 1))]
    return np.concatenate(
        [
            rng.integers(0, 256, (2, height, width, channels), np.uint8),
            squares.repeat(8, 1).repeat(8, 2)[:, :height, :width],
            np.stack(ramps).astype(np.uint8)[..., None].repeat(channels, -1),
        ]
    )


def difference(decoder: PackedDecoder, packed: list[bytes], expected: list[np.ndarray[Any, Any]]) -> int:
    """Return the largest difference, also by rounded products."""
    batch = torch.from_numpy(np.stack([np.frombuffer(item, np.uint8) for item in packed]))
    with rounded_products():
        decoded = [Decoder(decoder)(batch)]
    decoded.append(Decoder(decoder)(batch))
    assert all(each.dtype == torch.uint8 for each in decoded)
    return int(
        (torch.stack(decoded).int() - torch.from_numpy(np.stack(expected)).permute(0, 3, 1, 2).int()).abs().max()
    )


@pytest.mark.parametrize("quality", [1, 50, 90, 95, 100])
@pytest.mark.parametrize(
    ("height", "width", "channels", "chroma"),
    [
        (32, 48, 3, "420"),
        (32, 48, 3, "444"),
        (21, 17, 3, "420"),
        (21, 17, 1, "420"),
        (3, 5, 3, "444"),
        (1, 1, 3, "420"),
    ],
)
def test_coefficients_become_the_hosts_pixels(
    height: int, width: int, channels: int, chroma: Any, quality: int
) -> None:
    layout = CoefficientLayout(height, width, channels, quality, chroma)
    packed = [coefficients.pack(image, layout) for image in noisy_images(height, width, channels)]
    expected = [coefficients.unpack(item, layout) for item in packed]
    assert difference(CoefficientDecoder(layout), packed, expected) <= 1


@pytest.mark.parametrize(("height", "width"), [(16, 24), (15, 7), (1, 1)])
def test_planes_become_the_hosts_pixels(height: int, width: int) -> None:
    packed = [yuv420.pack(image) for image in noisy_images(height, width, 3)]
    expected = [yuv420.unpack(item, height, width) for item in packed]
    assert difference(Yuv420Decoder(height, width), packed, expected) <= 1


def test_no_number_is_rounded_under_autocast() -> None:
    layout = CoefficientLayout(16, 16, 3, 90)
    packed = [coefficients.pack(image, layout) for image in noisy_images(16, 16, 3)]
    expected = [coefficients.unpack(item, layout) for item in packed]
    with torch.autocast("cpu", torch.bfloat16):
        assert difference(CoefficientDecoder(layout), packed, expected) <= 1


def test_no_tensor_ends_in_eight() -> None:
    """A TPU works on tiles of 8x128 numbers: a last dimension of 8 would waste most of each."""
    layout = CoefficientLayout(64, 160, 3, 90)
    shapes: list[tuple[int, ...]] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            shapes.extend(tuple(item.shape) for item in [result] if isinstance(item, torch.Tensor))
            return result

    with Recorder():
        Decoder(CoefficientDecoder(layout))(torch.zeros(2, layout.nbytes, dtype=torch.uint8))
    assert len(shapes) > 20
    assert min(shape[-1] for shape in shapes if shape) > 8


def test_numbers_are_rounded_to_bfloat16_as_torch_rounds_them() -> None:
    numbers = np.random.default_rng(0).normal(0, 100, 4096).astype(np.float32)
    halves = (np.arange(4096, dtype=np.uint32) << 15 | 0x3F800000).view(np.float32)  # between two numbers, and on one
    for values in (numbers, -numbers, halves):
        assert np.array_equal(to_bfloat16(values), torch.from_numpy(values).bfloat16().float().numpy())
