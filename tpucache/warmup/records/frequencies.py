"""Measures the quality of images that are decoded from their lowest frequencies only, for caches with bands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.geometry import lanczos
from tpucache.ondevice.decode import CoefficientDecoder, Resize
from tpucache.store.codecs.dct.coefficients import BLOCK, layout_of, pack, unpack
from tpucache.store.fields import Field
from tpucache.store.manifest import FrequencyStatistics

_MOST: Final = 99.0  # dB of images that are the same
_DECIMALS: Final = 1  # libraries of matrix multiplication differ in the last bits, and manifests must not


def measure_frequencies(field: Field, image: npt.NDArray[np.uint8]) -> list[list[float]]:
    """Return a list [PSNR in dB, variance of each channel] for each K from 1 to 8.

    The image is decoded at K/8 of its size from the lowest K frequencies. The PSNR compares this small image with the
    whole image, resized to the same size by Lanczos. The variances are those of the small image's pixels.
    """
    layout = layout_of(field.shape, field.quality or 0, field.chroma)
    packed = pack(image, layout)
    whole = unpack(packed, layout).astype(np.float64)
    found = []
    for count in range(1, BLOCK + 1):
        height, width = (max(1, round(side * count / BLOCK)) for side in field.shape[:2])
        decoder = CoefficientDecoder(layout, Resize(height, width, "stretch"), count)
        shown = decoder.decode_here(np.frombuffer(packed, np.uint8)[None])[0].astype(np.float64)
        rows, columns = lanczos(len(whole), 0, len(whole), height), lanczos(whole.shape[1], 0, whole.shape[1], width)
        expected = np.clip(np.rint(np.einsum("yh,hwc,xw->yxc", rows, whole, columns, optimize=True)), 0, 255)
        error = float(np.square(shown - expected).mean())
        psnr = min(_MOST, 10 * math.log10(255**2 / error)) if error else _MOST
        found.append([psnr, *shown.reshape(-1, shown.shape[2]).var(0).tolist()])
    return found


def summarise_frequencies(measured: Mapping[str, Sequence[Sequence[float]]]) -> tuple[FrequencyStatistics, ...]:
    """Return the statistics of each K over some samples: mean PSNR, and standard deviations relative to K = 8.

    `measured` has the results of `measure_frequencies` by sample number.
    """
    if not measured:
        return ()
    samples = np.array([measured[number] for number in sorted(measured, key=int)])  # (n, 8, 1 + channels)
    psnr, variances = samples[:, :, 0].mean(0), samples[:, :, 1:].mean(0)
    shares = np.sqrt(variances / np.where(variances[-1:] > 0, variances[-1:], 1))
    return tuple(
        FrequencyStatistics(round(float(mean), _DECIMALS), tuple(round(float(each), 1 + _DECIMALS) for each in share))
        for mean, share in zip(psnr, shares, strict=True)
    )
