"""DICOM files that pydicom writes are shown through their window, or kept as numbers."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from made import build_here
from numpy.testing import assert_array_equal

from tpucache.errors import SampleError
from tpucache.loading.dataset import CachedDataset
from tpucache.recipe import Recipe
from tpucache.warmup.records import dicom
from tpucache.warmup.records.presize import presize

pydicom = pytest.importorskip("pydicom")
from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402  # only where pydicom is installed
from pydicom.sequence import Sequence  # noqa: E402
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid  # noqa: E402

SIDE = 8
NUMBERS = np.random.default_rng(0).integers(0, 4096, (SIDE, SIDE)).astype(np.uint16)
KEEP, GREY = Recipe(size=SIDE, mode="keep"), Recipe(size=SIDE, mode="grey")


def encoded(numbers: npt.NDArray[Any] = NUMBERS, bits: int = 12, **tags: Any) -> bytes:
    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = file.SOPClassUID = CTImageStorage
    file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID = generate_uid()
    file.Rows, file.Columns = numbers.shape[:2]
    file.SamplesPerPixel = 3 if numbers.ndim == 3 else 1
    file.PhotometricInterpretation = "RGB" if numbers.ndim == 3 else "MONOCHROME2"
    if numbers.ndim == 3:
        file.PlanarConfiguration = 0
    file.BitsAllocated, file.BitsStored, file.HighBit = numbers.itemsize * 8, bits, bits - 1
    file.PixelRepresentation = int(numbers.dtype.kind == "i")
    file.PixelData = numbers.tobytes()
    for name, value in tags.items():
        setattr(file, name, value)
    target = io.BytesIO()
    pydicom.dcmwrite(target, file, enforce_file_format=True)
    return target.getvalue()


def shown(data: bytes, recipe: Recipe = GREY) -> npt.NDArray[Any]:
    return presize(data, recipe, "a.dcm")[..., 0]


@pytest.mark.parametrize("width", [1500, 600, 3])
@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_the_window_is_pydicoms(function: str, width: int) -> None:
    numbers = NUMBERS if width > 3 else NUMBERS % 5 + 960  # so that the window of 3 has some in it
    tags = {"WindowCenter": 900, "WindowWidth": width, "VOILUTFunction": function}
    tags |= {"RescaleSlope": 2, "RescaleIntercept": -1024}
    data = encoded(numbers, **tags)
    file = pydicom.dcmread(io.BytesIO(data))
    window = pydicom.pixels.apply_voi_lut(pydicom.pixels.apply_modality_lut(file.pixel_array, file), file)
    low, high = -1024, 2 * 4095 - 1024  # of the output
    assert np.abs(shown(data) - (window - low) / (high - low) * 255).max() <= 0.51


def test_the_first_of_several_windows_counts() -> None:
    both = encoded(WindowCenter=[900, 100], WindowWidth=[1500, 10])
    assert_array_equal(shown(both), shown(encoded(WindowCenter=900, WindowWidth=1500)))


def test_a_table_of_values_comes_before_a_window() -> None:
    table = Dataset()
    table.LUTDescriptor = [4096, 0, 12]
    table.add_new("LUTData", "US", [4095 - number for number in range(4096)])
    data = encoded(VOILUTSequence=Sequence([table]), WindowCenter=1, WindowWidth=2)
    assert_array_equal(shown(data), np.rint((4095 - NUMBERS) / 4095 * 255))


def test_without_a_window_the_stored_bits_are_shown() -> None:
    assert_array_equal(shown(encoded()), np.rint(NUMBERS / 4095 * 255))
    assert_array_equal(
        shown(encoded(), Recipe(size=SIDE, mode="grey", white_level=5000)), np.rint(NUMBERS / 5000 * 255)
    )
    with pytest.raises(SampleError, match="the file has no window: state which number is white by --white-level"):
        shown(encoded(RescaleIntercept=-1024, RescaleSlope=1))


def test_monochrome1_is_inverted() -> None:
    data = encoded(PhotometricInterpretation="MONOCHROME1")
    assert_array_equal(shown(data), np.rint((1 - NUMBERS / 4095) * 255))
    assert_array_equal(shown(data, KEEP), 4095 - NUMBERS)


def test_numbers_are_kept_or_rescaled() -> None:
    kept = presize(encoded(), KEEP, "a")
    assert_array_equal(kept[..., 0], NUMBERS)
    assert kept.dtype == np.uint16
    signed = NUMBERS.astype(np.int16) - 2000
    assert_array_equal(presize(encoded(signed, 16), KEEP, "a")[..., 0], signed)
    rescaled = presize(encoded(RescaleSlope=0.5, RescaleIntercept=-1024), KEEP, "a")
    assert rescaled.dtype == np.float32
    assert_array_equal(rescaled[..., 0], NUMBERS * 0.5 - 1024)


def test_colours_are_colours() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    assert_array_equal(presize(encoded(pixels, 8), Recipe(size=SIDE), "a"), pixels)


def test_colours_stored_as_ybr_are_converted_once() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    stored = pydicom.pixels.convert_color_space(pixels, "RGB", "YBR_FULL")
    found = presize(encoded(stored, 8, PhotometricInterpretation="YBR_FULL"), Recipe(size=SIDE), "a")
    assert np.abs(found.astype(int) - pixels).max() <= 2


@pytest.mark.parametrize("mode", ["rgb", "keep"])
def test_a_palette_becomes_its_colours(mode: Any) -> None:
    rng = np.random.default_rng(2)
    indices, colours = rng.integers(0, 256, (SIDE, SIDE), np.uint8), rng.integers(0, 256, (256, 3), np.uint8)
    tags: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for channel, name in enumerate(("Red", "Green", "Blue")):
        tags[f"{name}PaletteColorLookupTableDescriptor"] = [256, 0, 8]
        tags[f"{name}PaletteColorLookupTableData"] = colours[:, channel].tobytes()
    found = presize(encoded(indices, 8, **tags), Recipe(size=SIDE, mode=mode), "a")
    assert_array_equal(found, colours[indices])


def test_a_modality_table_replaces_the_stored_numbers() -> None:
    table = Dataset()
    table.LUTDescriptor, table.ModalityLUTType = [4096, 0, 16], "US"
    table.add_new("LUTData", "US", [(4095 - number) * 16 for number in range(4096)])
    data = encoded(ModalityLUTSequence=Sequence([table]))
    assert_array_equal(shown(data), np.rint((4095 - NUMBERS) * 16 / 65535 * 255))
    assert_array_equal(shown(data, KEEP), (4095 - NUMBERS) * 16)


@pytest.mark.parametrize("groups", ["PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence"])
def test_an_enhanced_file_has_its_window_and_rescaling_in_its_frames(groups: str) -> None:
    transformation, window, group = Dataset(), Dataset(), Dataset()
    transformation.RescaleSlope, transformation.RescaleIntercept = 2, -1024
    window.WindowCenter, window.WindowWidth = 900, 1500
    group.PixelValueTransformationSequence, group.FrameVOILUTSequence = Sequence([transformation]), Sequence([window])
    enhanced = encoded(NumberOfFrames=1, **{groups: Sequence([group])})
    plain = encoded(RescaleSlope=2, RescaleIntercept=-1024, WindowCenter=900, WindowWidth=1500)
    assert_array_equal(shown(enhanced), shown(plain))
    assert_array_equal(shown(enhanced, KEEP), shown(plain, KEEP))


@pytest.mark.parametrize("numbers", [NUMBERS, NUMBERS.astype(np.int16) - 1024])
def test_few_of_16_stored_bits_do_not_turn_black_or_grey(numbers: npt.NDArray[Any]) -> None:
    with pytest.raises(SampleError, match=r"at most .*, far less than its bits can hold: .*--white-level"):
        shown(encoded(numbers, 16))
    assert shown(encoded(np.zeros_like(NUMBERS), 16)).max() == 0


@pytest.mark.parametrize("width", [0, -400])
def test_a_window_without_a_width_is_refused(width: int) -> None:
    with pytest.raises(SampleError, match=f"the window's width is {width}: "):
        shown(encoded(WindowCenter=40, WindowWidth=width))


def test_the_first_frame_is_taken() -> None:
    frames = np.stack([NUMBERS, NUMBERS // 2])
    data = encoded(NUMBERS, NumberOfFrames=2, PixelData=frames.tobytes())
    assert_array_equal(shown(data, KEEP), NUMBERS)


def test_a_file_cut_anywhere_or_without_pixels_is_refused() -> None:
    data = encoded(WindowCenter=900, WindowWidth=1500)
    for cut in range(132, len(data), 61):
        with pytest.raises(SampleError, match="DICOM"):
            shown(data[:cut])
    with pytest.raises(SampleError, match="does not decode as DICOM"):
        shown(encoded(BitsAllocated=32))
    with pytest.raises(SampleError, match="more than --max-pixels 63"):
        shown(data, Recipe(size=SIDE, max_pixels=63))


def test_without_pydicom_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded()
    monkeypatch.setitem(sys.modules, "pydicom", None)
    assert dicom.is_dicom(data)
    with pytest.raises(SampleError, match="is a DICOM file: `pip install pydicom`"):
        shown(data)


def test_a_folder_of_them_becomes_a_cache(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for number in range(3):
        (tmp_path / "source" / f"{number}.dcm").write_bytes(encoded(NUMBERS // (number + 1)))
    build_here(tmp_path / "source", tmp_path / "cache", KEEP)
    image, _ = CachedDataset(tmp_path / "cache")[1]
    assert_array_equal(image.numpy()[0], NUMBERS // 2)


@pytest.mark.parametrize("recipe", [GREY, KEEP])
def test_bits_at_another_place_and_tags_that_disagree_are_refused(recipe: Recipe) -> None:
    with pytest.raises(SampleError, match="its highest bit is 15, and 11 fits its 12 stored bits"):
        shown(encoded(NUMBERS << 4, HighBit=15), recipe)
    with pytest.raises(SampleError, match="PresentationLUTShape INVERSE that low ones are"):
        shown(encoded(PresentationLUTShape="INVERSE"), recipe)
    inverse = encoded(PhotometricInterpretation="MONOCHROME1", PresentationLUTShape="INVERSE")
    assert_array_equal(shown(inverse, recipe), shown(encoded(PhotometricInterpretation="MONOCHROME1"), recipe))
