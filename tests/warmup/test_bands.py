"""Caches whose images' frequencies are stored apart: the same pixels, fewer bytes for smaller images, all promises."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stops import Stopped, stop_after
from thorough import thorough

from tpucache import CachedDataset, CachedLoader, Recipe, build_cache, ondevice, verify_cache
from tpucache.cli import main
from tpucache.errors import DamageError, FormatError, RecipeError, StoreError, UsageError
from tpucache.loading.reading.views import bands_for
from tpucache.report.records import Records
from tpucache.store.cache import Cache
from tpucache.store.copying import stage_cache
from tpucache.store.format import BANDED_VERSION, INDEX_NAME, VERSION
from tpucache.store.manifest import Manifest
from tpucache.warmup import repair_cache

BANDS = (2, 4, 8)
CODECS = ["dct-lz4", "dct-zstd"]
EACH = pytest.mark.parametrize("codec", [CODECS[0], *thorough(*CODECS[1:])])


def recipe(codec: str, **options: object) -> Recipe:
    return Recipe(**{"size": (48, 40), "codec": codec, "variants": 1, "augment": "flip", **options})


@pytest.fixture(scope="module")
def photos(write_photos: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 photographs, in two blocks."""
    return Path(write_photos(tmp_path_factory.mktemp("photos") / "train", 70))


@pytest.fixture(scope="module")
def caches(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of caches by codec, with bands and without, of the same recipe. Not to be written to."""
    folder = tmp_path_factory.mktemp("bands")
    for codec in CODECS:
        build_cache(photos, folder / codec, recipe(codec), jobs=1)
        build_cache(photos, folder / f"{codec}-banded", recipe(codec, bands=BANDS), jobs=1)
    return folder


def pixels(cache: Path, **options: object) -> torch.Tensor:
    return torch.cat([images for images, _ in CachedLoader(CachedDataset(cache, **options), 7, shuffle=False)])


def files(cache: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(cache.iterdir())}


@EACH
@pytest.mark.parametrize("in_memory", [True, *thorough(False)])
def test_images_are_those_of_a_cache_without_bands(caches: Path, codec: str, in_memory: bool) -> None:
    plain, banded = caches / codec, caches / f"{codec}-banded"
    for variant in (0, 1):
        assert torch.equal(
            pixels(banded, variant=variant, in_memory=in_memory), pixels(plain, variant=variant, in_memory=in_memory)
        )
    single = CachedDataset(banded)[3][0]
    assert torch.equal(single, CachedDataset(plain)[3][0])
    assert np.array_equal(Records(banded).read(3, 1)["image"], Records(plain).read(3, 1)["image"])
    (images,) = CachedDataset(banded).field_batches("image")
    assert np.array_equal(images, next(CachedDataset(plain).field_batches("image")))


@EACH
@pytest.mark.parametrize(("size", "frequencies"), [((24, 20), 4), ((12, 10), 4), ((48, 40), 8), ((60, 50), 8)])
def test_other_sizes_read_the_bands_that_they_need(
    caches: Path, codec: str, size: tuple[int, int], frequencies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, banded = caches / codec, CachedDataset(caches / f"{codec}-banded", resolution=size, in_memory=False)
    shards = banded.cache.manifest.shards
    opened: set[str] = set()
    real = type(banded.cache.reader)._open_shard
    monkeypatch.setattr(
        type(banded.cache.reader),
        "_open_shard",
        lambda reader, shard: opened.add(reader.shards[shard].name) or real(reader, shard),
    )
    images = torch.cat([images for images, _ in CachedLoader(banded, 7, shuffle=False)])
    assert torch.equal(images, pixels(plain, resolution=size, frequencies=frequencies))
    bands = BANDS.index(frequencies) + 1
    assert opened == {entry.name for entry in shards if entry.band < bands and not entry.variant}
    packed = CachedLoader(banded.packed(), 7, shuffle=False)
    decode = ondevice.decoder(banded.packed())
    decoded = torch.cat([decode(images) for images, _ in packed])
    assert (decoded.int() - images.int()).abs().max() <= 1


def test_frequencies_between_two_bands_are_those_of_the_higher_one(caches: Path) -> None:
    banded = caches / "dct-lz4-banded"
    assert torch.equal(
        pixels(banded, resolution=(18, 15)), pixels(caches / "dct-lz4", resolution=(18, 15), frequencies=4)
    )


def test_records_take_fewer_bytes_and_so_do_files(photos: Path, tmp_path: Path) -> None:
    build_cache(photos, tmp_path / "plain", Recipe(size=256, codec="dct-lz4"), jobs=1)
    build_cache(photos, tmp_path / "banded", Recipe(size=256, codec="dct-lz4", bands=BANDS), jobs=1)
    plain, banded = (Cache.open(tmp_path / name) for name in ("plain", "banded"))
    lengths = banded.index.read_all()["length"].astype(int).reshape(3, -1).sum(1)
    whole = int(plain.index.read_all()["length"].astype(int).sum())
    assert lengths.sum() < 1.02 * whole
    assert lengths[0] < 0.5 * whole
    assert banded.manifest.total_bytes < 1.02 * plain.manifest.total_bytes


@pytest.mark.thorough
@EACH
def test_a_cache_is_the_same_however_it_was_built(caches: Path, photos: Path, tmp_path: Path, codec: str) -> None:
    whole = caches / f"{codec}-banded"
    cut = tmp_path / "cut"
    for kept in (0, 20, 40, 60):
        with pytest.raises(Stopped):
            build_cache(photos, cut, recipe(codec, bands=BANDS), jobs=1, on_progress=stop_after(kept))
    build_cache(photos, cut, recipe(codec, bands=BANDS), jobs=1)
    build_cache(photos, tmp_path / "grown", recipe(codec, bands=BANDS, variants=0), jobs=1)
    build_cache(photos, tmp_path / "grown", recipe(codec, bands=BANDS), jobs=2 if codec == CODECS[0] else 1)
    assert files(cut) == files(whole)
    shards = {name: digest for name, digest in files(whole).items() if name.endswith(".lmdb")}
    assert {name: digest for name, digest in files(tmp_path / "grown").items() if name.endswith(".lmdb")} == shards
    assert not verify_cache(tmp_path / "grown")
    manifest = Manifest.load(whole)
    assert manifest.version == BANDED_VERSION
    assert Manifest.load(caches / codec).version == VERSION
    assert {entry.name for entry in manifest.shards} >= {"v00-00000.lmdb", "v00-00000-1.lmdb", "v01-00000-2.lmdb"}


@pytest.mark.parametrize("broken", ["v00-00000.lmdb", "v01-00000-2.lmdb", INDEX_NAME, "samples.npz"])
def test_what_is_damaged_is_found_and_repaired_to_the_same_bytes(
    caches: Path, photos: Path, tmp_path: Path, broken: str
) -> None:
    cache = shutil.copytree(caches / "dct-lz4-banded", tmp_path / "cache")
    before = files(cache)
    data = bytearray((cache / broken).read_bytes())
    data[-len(data) // 3] ^= 1
    (cache / broken).write_bytes(data)
    assert {damage.name for damage in repair_cache(photos, cache, jobs=1)} == {broken}
    assert files(cache) == before


@pytest.mark.slow
@EACH
def test_every_flipped_bit_of_a_record_is_found_and_damages_no_other_batch(
    caches: Path, tmp_path: Path, codec: str
) -> None:
    """`verify` names the sample; reading gives an error, or, where a byte code has no checksum, what it can hold."""
    cache = shutil.copytree(caches / f"{codec}-banded", tmp_path / "cache")
    opened = Cache.open(cache)
    rows, shards, numbers = opened.index.read_all(), opened.manifest.shards, opened.samples.numbers
    chance = random.Random(3)
    for at in chance.sample(range(len(rows)), 12):
        row, path = rows[at], cache / shards[int(rows[at]["shard"])].name
        data = path.read_bytes()
        place = int(row["offset"]) + chance.randrange(int(row["length"]))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :])
        damages = verify_cache(cache)
        assert {damage.name for damage in damages} == {path.name}
        position = at % opened.rows_a_band % opened.manifest.samples
        assert int(numbers[position]) in damages[-1].samples
        path.write_bytes(data)
    assert not verify_cache(cache)


@pytest.mark.parametrize("band", [0, 1, 2])
def test_a_shard_of_another_band_or_cache_is_refused_before_it_is_used(caches: Path, tmp_path: Path, band: int) -> None:
    cache = shutil.copytree(caches / "dct-lz4-banded", tmp_path / "cache")
    names = ["v00-00000.lmdb", "v00-00000-1.lmdb", "v00-00000-2.lmdb"]
    other = (cache / names[band - 1]).read_bytes()
    size = (cache / names[band]).stat().st_size
    (cache / names[band]).write_bytes(other[:size].ljust(size, b"\0"))
    with pytest.raises(DamageError):
        pixels(cache)
    (cache / names[band]).unlink()
    with pytest.raises(DamageError, match="cannot be opened"):
        pixels(cache)


def test_a_copy_takes_the_bands_that_a_size_needs(caches: Path, photos: Path, tmp_path: Path) -> None:
    cache, size = caches / "dct-lz4-banded", (24, 20)
    main(["fetch", str(cache), str(tmp_path / "fetched"), "--resolution", "24x20"])
    main(["push", str(cache), f"file://{tmp_path / 'pushed'}", "--resolution", "24x20"])
    staged = stage_cache(cache, tmp_path / "staged", bands=bands_for(Manifest.load(cache), size))
    names = {name for name in files(cache) if not name.endswith("-2.lmdb")}
    whole = CachedDataset(cache, resolution=size)
    for copy in (tmp_path / "fetched", tmp_path / "pushed", staged):
        assert set(files(copy)) == names
        assert not verify_cache(copy)
        assert torch.equal(pixels(copy, resolution=size), pixels(cache, resolution=size))
        assert CachedDataset(copy, resolution=size).digest == whole.digest
        with pytest.raises(UsageError, match="the lowest 4 of 8 frequencies: give resolution=, such as 20"):
            CachedDataset(copy)
        with pytest.raises(UsageError, match="need 6 of 8 frequencies"):
            CachedDataset(copy, resolution=(36, 30))
    before = files(staged)
    (staged / "v00-00000-1.lmdb").write_bytes(b"")
    (staged / INDEX_NAME).unlink()
    repair_cache(photos, staged, jobs=1)
    assert files(staged) == before
    assert main(["fetch", str(cache), str(tmp_path / "fetched")]) == 2  # the whole cache is another one


def test_the_manifest_says_what_each_size_is_worth(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Manifest.load(caches / "dct-zstd-banded")
    known = manifest.statistics.frequencies
    assert [each.psnr for each in known] == sorted(each.psnr for each in known)
    assert known[-1].psnr == 99
    assert all(0 < share <= 1.05 for each in known for share in each.std)
    small = CachedDataset(caches / "dct-zstd-banded", resolution=(24, 20))
    found = pixels(caches / "dct-zstd-banded", resolution=(24, 20)).float().std((0, 2, 3)).tolist()
    assert small.manifest.statistics.std == pytest.approx(found, rel=0.1)
    assert small.manifest.statistics.mean == manifest.statistics.mean
    main(["inspect", str(caches / "dct-zstd-banded")])
    assert "; 24x20 from " in capsys.readouterr().out
    assert "frequencies" not in Manifest.load(caches / "dct-zstd").statistics.to_dict()


def test_a_cache_without_bands_is_copied_whole_and_says_so(
    caches: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    main(["fetch", str(caches / "dct-lz4"), str(tmp_path / "fetched"), "--resolution", "24x20"])
    assert files(tmp_path / "fetched") == files(caches / "dct-lz4")
    assert "has no bands of frequencies" in caplog.text


@pytest.mark.thorough
def test_a_run_trains_and_predicts_in_another_size(caches: Path, tmp_path: Path) -> None:
    cache, run = str(caches / "dct-lz4-banded"), str(tmp_path / "run")
    options = ["--backend", "torch", "--resolution", "24x20"]
    small = ["--model", "cnn", "--epochs", "1", "--batch-size", "8"]
    places = ["--valid", cache, "--stage", str(tmp_path / "staged")]
    assert main(["train", cache, "--run", run, *small, *places, *options]) == 0
    assert main(["predict", run, cache, "-o", str(tmp_path / "found.csv"), *options]) == 0
    assert main(["report", run, "-o", str(tmp_path / "page.html")]) == 0
    assert "were validated on" not in (tmp_path / "page.html").read_text()
    (staged,) = (tmp_path / "staged").iterdir()
    assert not (staged / "v00-00000-2.lmdb").exists()


def test_what_bands_cannot_be_is_refused(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for bands in [(), (2, 4), (4, 2, 8), (0, 8), (2, 9), ("2", 8), 8, (2, 2, 8)]:
        with pytest.raises(RecipeError, match="bands"):
            recipe("dct-lz4", bands=bands)
    with pytest.raises(RecipeError, match="the codec jpeg cannot store frequency bands"):
        recipe("jpeg", bands=BANDS)
    assert main(["warmup", str(photos), str(tmp_path / "c"), "--codec", "dct-lz4", "--bands", "2,4"]) == 1
    assert "bands" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


CHANGES: list[dict[str, Any]] = [
    {"version": VERSION},
    {"fields": lambda field: dataclasses.replace(field, bands=None)},
    {"fields": lambda field: dataclasses.replace(field, bands=(2, 8))},
    {"fields": lambda field: dataclasses.replace(field, bands=(2, 4, 6, 8))},
    {"fields": lambda field: dataclasses.replace(field, bands=(4, 2, 8))},
    {"fields": lambda field: dataclasses.replace(field, bands=(2, 4, 9))},
    {"shards": lambda entry: dataclasses.replace(entry, band=0)},
    {"shards": lambda entry: dataclasses.replace(entry, band=7, name=entry.name.replace("-1.", "-7."))},
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_whose_bands_do_not_fit_is_refused(caches: Path, change: dict[str, Any]) -> None:
    manifest = Manifest.load(caches / "dct-lz4-banded")
    made = {
        name: tuple(map(value, getattr(manifest, name))) if callable(value) else value for name, value in change.items()
    }
    with pytest.raises(FormatError):
        Manifest.from_json(dataclasses.replace(manifest, **made).text)


def test_a_recipe_like_that_of_a_cache_has_its_bands(caches: Path) -> None:
    cache = caches / "dct-lz4-banded"
    assert Recipe.like(cache).bands == BANDS
    assert Recipe.like(cache, bands=BANDS, size=(48, 40)).bands == BANDS
    with pytest.raises(RecipeError, match=r"bands \[2, 4, 8\], not \[4, 8\]"):
        Recipe.like(cache, bands=(4, 8))


def test_a_cache_without_bands_is_not_added_to_with_bands(photos: Path, caches: Path, tmp_path: Path) -> None:
    cache = shutil.copytree(caches / "dct-lz4", tmp_path / "cache")
    with pytest.raises((RecipeError, StoreError), match="bands"):
        build_cache(photos, cache, recipe("dct-lz4", bands=BANDS), jobs=1)
