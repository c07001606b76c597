"""The constant matrices with which a device turns planes into pixels: numpy, shared by torch and JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.store.codecs.dct.coefficients import BLOCK, Plane, basis

Matrix = npt.NDArray[np.float32]


class PlaneMatrices(NamedTuple):
    """The pixels (height, width) of a plane's matrix C are `rows @ (C * quantisers) @ columns`.

    `rows` is (height, C's rows) and `columns` (C's columns, width). Both cut the padding off and interpolate chroma.
    """

    rows: Matrix
    columns: Matrix
    quantisers: Matrix


def coefficient_matrices(plane: Plane, height: int, width: int) -> PlaneMatrices:
    """Return the matrices for a plane of coefficients, as `store.codecs.dct.coefficients` lays them out."""
    rows = _inverse_transform(plane.block_rows)
    columns = _inverse_transform(plane.block_columns)
    if plane.step == 2:
        rows, columns = doubling(len(rows)) @ rows, doubling(len(columns)) @ columns
    quantisers = np.repeat(np.repeat(plane.table, plane.block_rows, 0), plane.block_columns, 1)
    return PlaneMatrices(_float32(rows[:height]), _float32(columns[:width].T), _float32(quantisers))


def sample_matrices(rows: int, columns: int, height: int, width: int) -> PlaneMatrices:
    """Return the matrices that double a plane of samples (rows, columns) and cut it to (height, width)."""
    return PlaneMatrices(
        _float32(doubling(rows)[:height]), _float32(doubling(columns)[:width].T), np.ones((1, 1), np.float32)
    )


def doubling(size: int) -> npt.NDArray[Any]:
    """Return (2 * size, size): linear interpolation between the centres of samples, the edges repeated."""
    near, far = np.eye(size), np.zeros((2 * size, size))
    far[0::2] = near[np.maximum(np.arange(size) - 1, 0)]
    far[1::2] = near[np.minimum(np.arange(size) + 1, size - 1)]
    return np.asarray(0.75 * np.repeat(near, 2, 0) + 0.25 * far)


def to_bfloat16(matrix: Matrix) -> Matrix:
    """Return float32 numbers rounded to those that bfloat16 holds, halves to even. The numbers are finite."""
    bits = matrix.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _inverse_transform(blocks: int) -> npt.NDArray[Any]:
    """Return (8 * blocks, 8 * blocks): pixel y of block i from the coefficient in row (u, i)."""
    whole: npt.NDArray[Any] = np.einsum("uy,ij->iyuj", basis(), np.eye(blocks))
    return whole.reshape(BLOCK * blocks, BLOCK * blocks)


def _float32(matrix: npt.NDArray[Any]) -> Matrix:
    return np.ascontiguousarray(matrix, np.float32)
