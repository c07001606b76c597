"""dct-zstd and dct-lz4 in the forms of every format version: read, checked, and added to in their own form."""

from __future__ import annotations

from pathlib import Path

import lz4.block
import numpy as np
import pytest

from tpucache import CachedDataset, FormatError, Recipe, build_cache, verify_cache
from tpucache.store.codecs import encode
from tpucache.store.codecs.dct import coefficients, sparse
from tpucache.store.codecs.dct.codec import DctCodec, DctLz4, DctZstd
from tpucache.store.codecs.dct.coefficients import layout_of
from tpucache.store.fields import Field, check_field

CODECS: dict[str, type[DctCodec]] = {"dct-zstd": DctZstd, "dct-lz4": DctLz4}
VERSIONS = {None: 3, "sparse": 5, "nibbles": 6}
NEWEST = {"dct-zstd": "sparse", "dct-lz4": "nibbles"}


def images_of(cache: Path, variant: int) -> list[np.ndarray]:
    data = CachedDataset(cache, variant=variant)
    return [np.asarray(data[at][0]) for at in range(len(data))]


def form_of(cache: Path) -> tuple[int, str | None]:
    manifest = CachedDataset(cache).manifest
    return manifest.version, manifest.fields[0].packing


@pytest.mark.parametrize(("codec", "packing"), [("dct-zstd", None), ("dct-lz4", None), ("dct-lz4", "sparse")])
def test_a_cache_of_another_form_is_read_and_added_to(
    photos: Path, tmp_path: Path, codec: str, packing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(size=24, codec=codec)
    with monkeypatch.context() as other:
        other.setattr(CODECS[codec], "packing", packing)
        build_cache(photos, tmp_path / "other", recipe, jobs=1)
    build_cache(photos, tmp_path / "newest", recipe, jobs=1)
    more = Recipe(size=24, codec=codec, variants=1, augment="flip")
    for name, expected in (("other", packing), ("newest", NEWEST[codec])):
        assert form_of(tmp_path / name) == (VERSIONS[expected], expected)
        build_cache(photos, tmp_path / name, more, jobs=1)
        assert form_of(tmp_path / name) == (VERSIONS[expected], expected)
        assert not verify_cache(tmp_path / name)
    for variant in (0, 1):
        other_images, newest_images = (images_of(tmp_path / name, variant) for name in ("other", "newest"))
        assert all((one == another).all() for one, another in zip(other_images, newest_images, strict=True))


@pytest.mark.parametrize("packing", VERSIONS)
def test_records_of_a_form_keep_their_bytes(packing: str | None) -> None:
    """A repair makes the very bytes that the manifest has the SHA-256 of: LZ4 compresses each form in its own way."""
    image = np.random.default_rng(0).normal(128, 30, (64, 64, 3)).clip(0, 255).astype(np.uint8)
    field = Field("image", "dct-lz4", "|u1", image.shape, 90, "420", packing)
    packed = coefficients.pack(image, layout_of(image.shape, 90, "420"))
    form = packed if packing is None else b"".join(sparse.squeeze(packed, packing))
    options = {} if packing == "nibbles" else {"mode": "high_compression", "compression": 10}
    assert encode(field, image) == lz4.block.compress(form, store_size=False, **options)


@pytest.mark.parametrize("codec", CODECS)
def test_another_packing_is_refused(codec: str) -> None:
    with pytest.raises(FormatError, match=f"{codec} has no packing 'dense'"):
        check_field(Field("image", codec, "|u1", (8, 8, 3), 90, "420", "dense"))


@pytest.mark.parametrize("codec", ["raw", "jpeg", "yuv420"])
@pytest.mark.parametrize("packing", ["sparse", "dense", ""])
def test_codecs_of_one_form_refuse_every_packing(codec: str, packing: str) -> None:
    with pytest.raises(FormatError, match=f"{codec} has no packing '{packing}'"):
        check_field(Field("image", codec, "|u1", (8, 8, 3), packing=packing))
