"""Decodes DICOM files by pydicom, if it is installed."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SampleError
from tpucache.native import Array
from tpucache.recipe import Recipe
from tpucache.warmup.records import refusal
from tpucache.warmup.records.numbers import SEVERAL, WHITE_16, Decoded, to_pixels

_MAGIC_AT: Final = 128
_PALETTE: Final = "PALETTE COLOR"
_MODALITY_LUT: Final = "ModalityLUTSequence"
#: Where an enhanced file has the rescaling and the window of its first frame, or of all frames.
_GROUPS: Final = ("PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence")
_MACROS: Final = ("PixelValueTransformationSequence", "FrameVOILUTSequence")
_ADVICE: Final = "state which number is white by --white-level, or use --mode keep"


def is_dicom(data: bytes) -> bool:
    """Return whether bytes have the signature of a DICOM file."""
    return data[_MAGIC_AT : _MAGIC_AT + 4] == b"DICM"


class DicomImage:
    """A DICOM file. `decode` decodes its pixels; if it has several frames, those of the first frame.

    In the mode keep, pixels are the stored numbers, or float32 if the file rescales them (slope and intercept). In the
    modes rgb and grey, the rescaled numbers become black to white by the first of these that exists: the recipe's white
    level, the file's VOI LUT, its first window (DICOM PS3.3, C.11.2), or, if it does not rescale, the range of its
    bits. In all modes, MONOCHROME1, whose low numbers are bright, is inverted, a modality LUT replaces the stored
    numbers, and a palette becomes RGB. Slope, intercept and window may be those of the first frame of an enhanced file.
    """

    def __init__(self, data: bytes) -> None:
        try:
            import pydicom
        except ImportError as error:
            raise refusal(f"is a DICOM file: `pip install pydicom` to read it ({error})") from error
        with _refusing():
            self._file: Any = pydicom.dcmread(io.BytesIO(data))
            self.size = (int(self._file.Columns), int(self._file.Rows))
            self.kind = "DICOM" + (SEVERAL if int(self._file.get("NumberOfFrames") or 1) > 1 else "")
            self._interpretation = str(self._file.PhotometricInterpretation)

    def decode(self, recipe: Recipe, least: tuple[int, int] | None) -> Decoded:
        with _refusing():
            numbers = self._numbers()
            if numbers.ndim == 2:
                numbers = self._kept(numbers) if recipe.mode == "keep" else self._shown(numbers, recipe.white_level)
        return Decoded(to_pixels(numbers, recipe.mode, None))

    def _numbers(self) -> Array:
        from pydicom import pixels

        file = self._file
        self._refuse_unusual()
        numbers: Array = np.asarray(pixels.pixel_array(file, index=0))  # pydicom converts YBR to RGB itself
        if numbers.shape[:2] != self.size[::-1]:
            raise ValueError(
                f"the file has {numbers.shape[1]} x {numbers.shape[0]} pixels, and its header says "
                f"{self.size[0]} x {self.size[1]}"
            )
        if self._interpretation == _PALETTE:
            numbers = np.asarray(pixels.apply_color_lut(numbers, file))
        elif _MODALITY_LUT in file:
            numbers = np.asarray(pixels.apply_modality_lut(numbers, file))
        return numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)

    def _refuse_unusual(self) -> None:
        stored, high = int(self._file.BitsStored), self._file.get("HighBit")
        if high is not None and int(high) != stored - 1:
            raise ValueError(
                f"its highest bit is {high}, and {stored - 1} fits its {stored} stored bits: save it with HighBit "
                f"{stored - 1}"
            )
        if self._interpretation == "MONOCHROME2" and self._file.get("PresentationLUTShape") == "INVERSE":
            raise ValueError(
                "MONOCHROME2 says that high numbers are bright, and PresentationLUTShape INVERSE that low ones are: "
                "correct one of them"
            )

    def _tag(self, name: str, default: Any = None) -> Any:
        """Return the first value of a tag of the file, or else of its first frame or of all its frames."""
        places = [self._file]
        for groups in _GROUPS:
            for group in (self._file.get(groups) or ())[:1]:
                places += [part for macro in _MACROS for part in (group.get(macro) or ())[:1]]
        values = (place.get(name) for place in places)
        value = next((value for value in values if value not in (None, "")), default)
        return value if isinstance(value, str) else np.ravel(value)[0]

    @property
    def _range(self) -> tuple[int, int]:
        """The least and the largest number that the bits can hold, after a modality LUT."""
        if _MODALITY_LUT in self._file:
            return 0, (1 << int(self._file.ModalityLUTSequence[0].LUTDescriptor[2])) - 1
        bits = int(self._file.BitsStored)
        return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if self._file.PixelRepresentation else (0, (1 << bits) - 1)

    @property
    def _rescaling(self) -> tuple[float, float]:
        return float(self._tag("RescaleSlope", 1)), float(self._tag("RescaleIntercept", 0))

    @property
    def _is_inverted(self) -> bool:
        return self._interpretation == "MONOCHROME1"

    def _kept(self, numbers: Array) -> Array:
        """Return numbers of which low ones are dark."""
        if self._is_inverted:
            numbers = (sum(self._range) - numbers.astype(np.int64)).astype(numbers.dtype)
        slope, intercept = self._rescaling
        if (slope, intercept) == (1, 0):
            return numbers
        return (numbers.astype(np.float64) * slope + intercept).astype(np.float32)

    def _shown(self, numbers: Array, white: int | None) -> npt.NDArray[np.uint8]:
        shares = self._shares(numbers, white)
        if self._is_inverted:
            shares = 1 - shares
        return np.asarray(np.rint(shares.clip(0, 1) * 255), np.uint8)

    def _shares(self, numbers: Array, white: int | None) -> npt.NDArray[np.float64]:
        """Return 0 for black and 1 for white, or numbers beyond them."""
        from pydicom import pixels

        slope, intercept = self._rescaling
        file, values = self._file, numbers.astype(np.float64) * slope + intercept
        if white is not None:
            return values / white
        if "VOILUTSequence" in file:
            bits = int(file.VOILUTSequence[0].LUTDescriptor[2])
            looked_up = pixels.apply_voi_lut(np.rint(values).astype(np.int64), file, prefer_lut=True)
            return np.asarray(looked_up, np.float64) / ((1 << bits) - 1)
        centre, width = self._tag("WindowCenter"), self._tag("WindowWidth")
        if width is not None and centre is not None:
            return _window(values, float(centre), float(width), self._tag("VOILUTFunction", "LINEAR").upper())
        if (slope, intercept) != (1, 0):
            raise ValueError(f"the file has no window: {_ADVICE}")
        low, high = self._range
        if high - low >= WHITE_16 and 0 < (largest := np.abs(values).max()) < (high - low + 1) / 4:
            raise ValueError(f"its numbers are at most {largest:g}, far less than its bits can hold: {_ADVICE}")
        return (values - low) / (high - low)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except SampleError:
        raise
    except Exception as error:  # pydicom's decoders may raise any error
        raise refusal(f"does not decode as DICOM: {type(error).__name__}: {error}") from error


def _window(values: npt.NDArray[np.float64], centre: float, width: float, function: str) -> npt.NDArray[np.float64]:
    if width <= 0:
        raise ValueError(f"the window's width is {width:g}: {_ADVICE}")
    if function == "SIGMOID":
        return np.asarray(1 / (1 + np.exp(-4 * (values - centre) / width)))
    if function == "LINEAR":
        centre, width = centre - 0.5, max(width - 1, 1e-6)
    return np.asarray((values - centre) / width + 0.5)
