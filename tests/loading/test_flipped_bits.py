"""A flipped bit of a record is found by verify, and no reader dies of it, whatever unpacks the record."""

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
_ROUNDS = 3  # of 63 flips


class Gradients:
    """Small pictures, smooth with a little noise, so that compressed records have all kinds of parts."""

    def list(self) -> Listing:
        return Listing([Sample(number, f"{number}.png", number % 2) for number in range(_SAMPLES)], ("a", "b"))

    def load(self, sample: Sample) -> Item:
        rng = np.random.default_rng(sample.number)
        ramp = np.linspace(0, 255, 24 * 20 * 3).reshape(24, 20, 3)
        return Item({"image": np.clip(ramp + rng.normal(0, 30, ramp.shape), 0, 255).astype(np.uint8)})


@pytest.fixture(scope="module", params=[*thorough("dct-zstd", "zstd"), "dct-lz4", "yuv420"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("sound") / "cache"
    build_cache(Gradients(), cache, Recipe(size=(24, 20), codec=request.param), jobs=1)
    return cache


def flip_bits(cache: Path, chance: np.random.Generator) -> list[int]:
    """Flip a bit of each record but the first, which readers compare with its checksum; return the samples' numbers."""
    opened = Cache.open(cache)
    names = [entry.name for entry in opened.manifest.shards]
    files = {name: bytearray((cache / name).read_bytes()) for name in names}
    for row in opened.index.read_all()[1:]:
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
        for number in flipped:
            try:
                image = data[number][0]
            except DamageError:
                continue
            assert (image.dtype, image.shape) == (torch.uint8, images[0].shape)
        for finish in ("host", "device"):
            for at in range(0, _SAMPLES, 8):
                try:
                    list(CachedLoader(data.select(range(at, at + 8)), 8, finish=finish))
                except DamageError:
                    continue
        shutil.rmtree(cache)


def test_the_first_record_that_is_read_of_a_damaged_shard_is_refused(sound: Path, tmp_path: Path) -> None:
    cache = Path(shutil.copytree(sound, tmp_path / "cache"))
    flip_bits(cache, np.random.default_rng(0))
    with pytest.raises(DamageError, match="holds other records than the index lists"):
        CachedDataset(cache)[1]
