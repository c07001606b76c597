"""Decoders for packed batches, as modules of plain torch operators.

They are written for a TPU. It works on tiles of 8x128 numbers, so no tensor ends in a dimension of 8 and nothing is
transposed or shuffled. Its matrix product rounds operands to bfloat16, so each operand is sent as two numbers that
bfloat16 holds nearly exactly; sums are float32 there. The result is within one level of float32's on any device.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from tpucache.ondevice.matrices import PlaneMatrices, coefficient_matrices, sample_matrices
from tpucache.store.codecs.coefficients import CoefficientLayout, Plane
from tpucache.store.codecs.yuv420 import plane_shapes

# Numbers are split into a multiple of these, which takes 8 bits and a sign, and a rest. Dequantised coefficients are
# whole and within 2048, so both parts are exact; after one of the two products numbers are within 1024.
_OF_COEFFICIENTS: Final = 8.0
_OF_HALF_DONE: Final = 4.0


class CoefficientDecoder(nn.Module):
    """Packed coefficients, uint8 (B, N), -> uint8 (B, channels, height, width). Static shapes, no parameters."""

    def __init__(self, layout: CoefficientLayout) -> None:
        super().__init__()
        self.layout = layout
        self.transforms = nn.ModuleList(
            _Transform(coefficient_matrices(plane, layout.height, layout.width)) for plane in layout.planes
        )
        self.sums = nn.ModuleList(_RunningSum(plane.block_columns) for plane in layout.planes)

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the images of a batch."""
        with torch.autocast(packed.device.type, enabled=False):
            values = packed.float()
            low, high = values[:, : self.layout.low], values[:, self.layout.low :]
            low = _signed(low, 256)
            second = torch.floor(high / 16)
            nibbles = _signed(torch.cat([high - 16 * second, second], 1), 16)
            planes, at, place = [], 0, 0
            for plane, transform, running in zip(self.layout.planes, self.transforms, self.sums, strict=True):
                matrix = low[:, at : at + plane.size].reshape(-1, *plane.shape)
                upper = _spread(nibbles[:, place : place + plane.wide], plane)
                planes.append(transform(running(matrix, upper, plane.block_rows)))
                at, place = at + plane.size, place + plane.wide
            return _to_colours(planes)


class Yuv420Decoder(nn.Module):
    """Raw 4:2:0 planes, uint8 (B, N), -> uint8 (B, 3, height, width). Static shapes, no parameters."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.luma, chroma = plane_shapes(height, width)
        self.chroma = chroma
        self.transform = _Transform(sample_matrices(*chroma, height, width))

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the images of a batch."""
        with torch.autocast(packed.device.type, enabled=False):
            values = packed.float() - 128
            first = self.luma[0] * self.luma[1]
            second = first + self.chroma[0] * self.chroma[1]
            blue, red = values[:, first:second], values[:, second:]
            return _to_colours(
                [
                    values[:, :first].reshape(-1, *self.luma),
                    *(self.transform(plane.reshape(-1, *self.chroma)) for plane in (blue, red)),
                ]
            )


class _Transform(nn.Module):
    """`rows @ (matrix * quantisers) @ columns`, each operand in two parts."""

    def __init__(self, matrices: PlaneMatrices) -> None:
        super().__init__()
        rows, columns = torch.from_numpy(matrices.rows), torch.from_numpy(matrices.columns)
        coarse_rows, coarse_columns = rows.bfloat16().float(), columns.bfloat16().float()
        constants = {
            "quantisers": torch.from_numpy(matrices.quantisers),
            "rows": torch.cat([coarse_rows, coarse_rows, rows - coarse_rows], 1),
            "columns": torch.cat([coarse_columns, coarse_columns, columns - coarse_columns], 0),
        }
        for name, constant in constants.items():
            self.register_buffer(name, constant, persistent=False)

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        values = matrix * self.get_buffer("quantisers")
        half = torch.matmul(torch.cat(_parts(values, _OF_COEFFICIENTS), 2), self.get_buffer("columns"))
        return torch.matmul(self.get_buffer("rows"), torch.cat(_parts(half, _OF_HALF_DONE), 1))


class _RunningSum(nn.Module):
    """Coefficients from low and high bits, and the mean of each block from differences along its row of blocks."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.register_buffer("ones", torch.ones(columns, columns).triu(), persistent=False)

    def forward(self, low: torch.Tensor, high: torch.Tensor, rows: int) -> torch.Tensor:
        # Apart, either part is a whole number that bfloat16 holds exactly.
        parts = low[:, :rows, : self.columns], high[:, :rows, : self.columns]
        first, second = (torch.matmul(part, self.get_buffer("ones")) for part in parts)
        matrix = low + 256 * high
        top = torch.cat([first + 256 * second, matrix[:, :rows, self.columns :]], 2)
        return torch.cat([top, matrix[:, rows:]], 1)


def _signed(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return numbers from 0 to size - 1 as the two's complement numbers that their bits are."""
    return values - size * (values >= size // 2).float()


def _spread(nibbles: torch.Tensor, plane: Plane) -> torch.Tensor:
    """Return high bits at the places of their coefficients, 0 elsewhere: (B, *plane.shape)."""
    rows, columns, at = plane.block_rows, plane.block_columns, 0
    parts = []
    for width in plane.widths:
        count = rows * width * columns
        part = nibbles[:, at : at + count].reshape(len(nibbles), rows, width * columns) if width else None
        at += count
        rest = plane.shape[1] - width * columns
        empty = nibbles.new_zeros(len(nibbles), rows, rest)
        parts.append(empty if part is None else torch.cat([part, empty], 2) if rest else part)
    return torch.cat(parts, 1)


def _parts(values: torch.Tensor, unit: float) -> list[torch.Tensor]:
    """Return multiples of `unit`, the rest, and the first again: for the constant's coarse, coarse and fine part."""
    # Rounded by arithmetic, as XLA may leave out a conversion to bfloat16 and back.
    coarse = torch.round(values / unit) * unit
    return [coarse, values - coarse, coarse]


def _to_colours(planes: list[torch.Tensor]) -> torch.Tensor:
    """Return planes (B, height, width) centred at 0 as uint8 (B, channels, height, width), by JFIF's matrix."""
    luma = planes[0] + 128
    if len(planes) == 1:
        colours = luma[:, None]
    else:
        blue, red = planes[1:]
        green = luma - 0.344136 * blue - 0.714136 * red
        colours = torch.stack([luma + 1.402 * red, green, luma + 1.772 * blue], 1)
    return torch.round(colours.clamp(0, 255)).to(torch.uint8)
