"""dct-zstd and dct-lz4 in their form of format versions 3 and 4: read, checked, and added to in that form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tpucache import CachedDataset, FormatError, Recipe, build_cache, verify_cache
from tpucache.store.codecs.dct.codec import DctCodec
from tpucache.store.fields import Field, check_field

CODECS = ["dct-zstd", "dct-lz4"]


def images_of(cache: Path, variant: int = 0) -> list[np.ndarray]:
    data = CachedDataset(cache, variant=variant)
    return [np.asarray(data[at][0]) for at in range(len(data))]


@pytest.mark.parametrize("codec", CODECS)
def test_a_cache_of_the_older_form_is_read_and_added_to(
    photos: Path, tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(size=24, codec=codec)
    with monkeypatch.context() as older:
        older.setattr(DctCodec, "packing", None)
        build_cache(photos, tmp_path / "older", recipe, jobs=1)
    build_cache(photos, tmp_path / "newer", recipe, jobs=1)
    for name, version, packing in (("older", 3, None), ("newer", 5, "sparse")):
        manifest = CachedDataset(tmp_path / name).manifest
        assert (manifest.version, manifest.fields[0].packing) == (version, packing)
    more = Recipe(size=24, codec=codec, variants=1, augment="flip")
    for name in ("older", "newer"):
        build_cache(photos, tmp_path / name, more, jobs=1)
        assert not verify_cache(tmp_path / name)
    assert CachedDataset(tmp_path / "older").manifest.version == 3
    for variant in (0, 1):
        older_images, newer_images = (images_of(tmp_path / name, variant) for name in ("older", "newer"))
        assert all((one == other).all() for one, other in zip(older_images, newer_images, strict=True))


@pytest.mark.parametrize("codec", CODECS)
def test_another_packing_is_refused(codec: str) -> None:
    with pytest.raises(FormatError, match="no packing 'dense'"):
        check_field(Field("image", codec, "|u1", (8, 8, 3), 90, "420", "dense"))
