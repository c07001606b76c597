"""A flipped bit of a record is found by verify, and no reader dies of it, whatever unpacks the record.

Readers refuse all of them in bands, of which each is compared with its checksum when it is first read.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from thorough import thorough

from tpucache import CachedDataset, CachedLoader, DamageError, Recipe, build_cache, verify_cache
from tpucache.store.cache import Cache
from tpucache.warmup.sources.source import Item, Listing, Sample

_SAMPLES = 64
_ROUNDS = 3  # of 63 flips: more than five hundred for the codecs, and nearly four hundred for those in bands


class Gradients:
    """Small pictures, smooth with a little noise, so that compressed records have all kinds of parts."""

    def list(self) -> Listing:
        return Listing([Sample(number, f"{number}.png", number % 2) for number in range(_SAMPLES)], ("a", "b"))

    def load(self, sample: Sample) -> Item:
        rng = np.random.default_rng(sample.number)
        ramp = np.linspace(0, 255, 24 * 20 * 3).reshape(24, 20, 3)
        return Item({"image": np.clip(ramp + rng.normal(0, 30, ramp.shape), 0, 255).astype(np.uint8)})


@pytest.fixture(
    scope="module",
    params=[*thorough("dct-zstd"), "dct-lz4", "yuv420", *thorough("dct-zstd in bands", "dct-lz4 in bands")],
)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of one shard, or of one of each band."""
    codec, _, bands = request.param.partition(" ")
    cache = tmp_path_factory.mktemp("sound") / "cache"
    recipe = Recipe(size=(24, 20), codec=codec, bands=(2, 4, 8) if bands else None)
    assert len(build_cache(Gradients(), cache, recipe, jobs=1).shards) == (3 if bands else 1)
    return cache


def flip_bits(cache: Path, chance: np.random.Generator, first_band: int = 0) -> list[int]:
    """Flip a bit of one band, from the first one on, of each record but the first, which readers compare with its
    checksum; return the samples' numbers."""
    opened = Cache.open(cache)
    names = [entry.name for entry in opened.manifest.shards]
    files = {name: bytearray((cache / name).read_bytes()) for name in names}
    of_bands = opened.index.read_all().reshape(-1, _SAMPLES)
    for number in range(1, _SAMPLES):
        row = of_bands[int(chance.integers(first_band, len(of_bands)))][number]
        bit = int(chance.integers(8 * int(row["length"])))
        files[names[int(row["shard"])]][int(row["offset"]) + bit // 8] ^= 1 << bit % 8
    for name, data in files.items():
        (cache / name).write_bytes(data)
    return list(range(1, _SAMPLES))


@pytest.mark.slow
def test_every_flipped_bit_is_found_by_verify_and_kills_no_reader(sound: Path, tmp_path: Path) -> None:
    chance = np.random.default_rng(15)
    cache = tmp_path / "cache"
    images = torch.stack([image for image, _ in CachedDataset(sound)])
    for _ in range(_ROUNDS):
        shutil.copytree(sound, cache)
        flipped = flip_bits(cache, chance)
        assert sorted(number for damage in verify_cache(cache) for number in damage.samples) == flipped
        data = CachedDataset(cache)
        assert torch.equal(data[0][0], images[0])
        refused = []
        for number in flipped:
            try:
                image = data[number][0]
            except DamageError:
                refused.append(number)
                continue
            assert (image.dtype, image.shape) == (torch.uint8, images[0].shape)
        if len(data.manifest.layouts) > 1:
            assert refused == flipped
        for finish in ("host", "device"):
            for at in range(0, _SAMPLES, 8):
                try:
                    list(CachedLoader(data.select(range(at, at + 8)), 8, finish=finish))
                except DamageError:
                    continue
        shutil.rmtree(cache)


def test_the_first_record_that_is_read_of_a_damaged_shard_is_refused(sound: Path, tmp_path: Path) -> None:
    cache = Path(shutil.copytree(sound, tmp_path / "cache"))
    flip_bits(cache, np.random.default_rng(0), first_band=len(Cache.open(cache).manifest.layouts) - 1)
    with pytest.raises(DamageError, match="holds other records than the index lists"):
        CachedDataset(cache)[1]


@pytest.mark.parametrize("sound", ["dct-zstd in bands", *thorough("dct-lz4 in bands")], indirect=True)
def test_a_damaged_band_is_refused_with_its_shard_and_its_sample(sound: Path, tmp_path: Path) -> None:
    cache = Path(shutil.copytree(sound, tmp_path / "cache"))
    flip_bits(cache, np.random.default_rng(0), first_band=2)
    (shard,) = (entry.name for entry in Cache.open(cache).manifest.shards if entry.band == 2)
    data = CachedDataset(cache)
    assert data[0][0].dtype == torch.uint8  # of each shard, a sound record was read
    for _ in range(2):
        with pytest.raises(DamageError, match=rf"Shard {shard} in .*, the record of '7\.png' in variant 0: its bytes"):
            data[7]
    with pytest.raises(DamageError, match=r"the record of '1\.png'"):
        list(CachedLoader(data.select([0, 1]), 2, finish="device"))


@pytest.mark.parametrize("sound", ["dct-zstd in bands", *thorough("dct-lz4 in bands")], indirect=True)
def test_images_of_half_the_size_do_not_depend_on_damage_in_the_highest_band(sound: Path, tmp_path: Path) -> None:
    cache = Path(shutil.copytree(sound, tmp_path / "cache"))
    flip_bits(cache, np.random.default_rng(0), first_band=2)
    half = (12, 10)
    shown, expected = (
        torch.stack([image for image, _ in CachedDataset(each, resolution=half)]) for each in (cache, sound)
    )
    assert torch.equal(shown, expected)
