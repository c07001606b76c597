"""Damaged pictures: those that a fresh Pillow refuses are refused, and those that it decodes are accepted."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from made import build_here
from PIL import Image, TiffImagePlugin, TiffTags

from scripts.checks.sources import (
    ENCODINGS,
    Encoded,
    damaged,
    differences,
    is_decoded_by_pillow,
)
from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.warmup.records.masks import decode_mask
from tpucache.warmup.records.pillow import opened
from tpucache.warmup.records.pillow_modes import decode
from tpucache.warmup.records.presize import presize
from tpucache.warmup.trial import dry_run

_XMP: Final = 700


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_damaged_picture_is_accepted_or_refused_as_by_a_fresh_pillow(encoding: str) -> None:
    try:
        ENCODINGS[encoding]()
    except (KeyError, OSError):
        pytest.skip(f"this Pillow has no {encoding.partition(' ')[0]}")
    found = differences(encoding, times=12, seed=1)
    assert found["refused by Pillow"] > 0, "no damage of these is one: the test tests nothing"
    assert [what for what in found if "ACCEPTED" in what or "REFUSED" in what] == []


@pytest.mark.slow
@pytest.mark.parametrize("field", ["image", "mask"])
def test_a_dry_run_and_a_build_leave_out_the_pictures_that_pillow_refuses(field: str, tmp_path: Path) -> None:
    whole = ENCODINGS["PNG palette"]()
    files = [whole, *damaged(whole, 20, random.Random(3))]
    refused = {str(number) for number, data in enumerate(files) if not is_decoded_by_pillow(data)}
    assert 3 <= len(refused) < len(files)
    source, recipe = Encoded(files, field), Recipe(size=16, mask_values="keep")
    tried = dry_run(source, tmp_path / "cache", recipe, jobs=1)
    assert {each.path for each in tried.failed} == refused
    manifest = build_here(source, tmp_path / "cache", recipe, on_error="skip")
    assert {each.path for each in manifest.skipped} == refused


def test_a_tiff_that_pillow_refuses_for_its_metadata_is_refused_although_they_were_asked_for_before() -> None:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags.tagtype[_XMP] = TiffTags.ASCII
    tags[_XMP] = "text, where Pillow expects bytes"
    target = io.BytesIO()
    Image.new("L", (8, 8)).save(target, "TIFF", tiffinfo=tags)
    data = target.getvalue()
    assert not is_decoded_by_pillow(data)
    with pytest.raises(SampleError, match="does not decode"):
        presize(data, Recipe(size=4), "a")
    with pytest.raises(SampleError, match="does not decode"):
        decode_mask(data, "a")


def test_a_heif_is_decoded_itself_and_not_its_thumbnail() -> None:
    pillow_heif = pytest.importorskip("pillow_heif", reason="needs pillow-heif")
    pillow_heif.register_heif_opener()
    target = io.BytesIO()
    Image.fromarray(np.full((128, 128, 3), 90, np.uint8)).save(target, "HEIF", thumbnails=[64])
    with opened(target.getvalue()) as file:
        pixels, scale = decode(file, Recipe(), (32, 32))
    assert (pixels.shape[:2], scale) == ((128, 128), 1.0)


@pytest.mark.parametrize(
    "header",
    [
        "(" * 3000,
        "'" * 3001,
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 1000000, 3), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999999999, 3, 3), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 40, 3), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (40, 40, 3), }",
        "__import__('os').abort()",
    ],
    ids=lambda header: header[:60],
)
def test_a_hostile_header_of_an_array_is_an_error_of_its_sample(header: str) -> None:
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(4800)
    with pytest.raises(SampleError, match=r"a\.npy': does not decode as \.npy: ."):
        presize(data, Recipe(mode="keep"), "a.npy")
