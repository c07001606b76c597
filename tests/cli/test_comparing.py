"""What a cache would take and bring, as a dry run and `bench --against` say it."""

from __future__ import annotations

import json
import shlex
import shutil
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tpucache import CachedDataset, Manifest, Recipe, UsageError, build_cache
from tpucache.cli import main
from tpucache.cli.comparing import CodecFigures, Listed, compare_codecs, measure_against, recommended
from tpucache.process import PROG
from tpucache.store.codecs import IMAGE_CODECS
from tpucache.warmup import FolderSource, dry_run
from tpucache.warmup.build_options import BuildOptions


@pytest.fixture(scope="module")
def dataset(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("against") / "cache"
    build_cache(photos, folder, Recipe(size=(8, 12)), jobs=1)
    return CachedDataset(folder)


def compare(photos, recipe, codecs):
    source, options = FolderSource(photos), BuildOptions(jobs=1)
    listed = Listed(source, source.list())
    found = dry_run(listed, photos / "nowhere", recipe, jobs=1)
    return compare_codecs(listed, found, recipe, options, codecs, seconds=0.01)


def figures(codec="raw", size=100, rate=1000.0, reading="keep", *, fits=True):
    return CodecFigures(codec, size, 1.0, 10, 10, rate, reading, None, fits)


@pytest.mark.slow
def test_the_size_of_each_codec_is_that_of_the_cache_that_is_then_built(photos, tmp_path):
    recipe = Recipe(size=(48, 64), variants=1)
    rows, left_out = compare(photos, recipe, IMAGE_CODECS.own)
    assert ([row.codec for row in rows], left_out) == ([*IMAGE_CODECS.own], {})
    for row in rows:
        recipe = Recipe(size=(48, 64), variants=1, codec=row.codec)
        built = build_cache(photos, tmp_path / row.codec, recipe, jobs=1)
        assert row.bytes == pytest.approx(sum(entry.bytes for entry in built.shards), rel=0.2), row
        assert (row.psnr is None) == (row.codec in ("raw", "png", "zstd"))
        assert row.psnr is None or 15 < row.psnr < 60
        assert min(row.images_per_second, row.seconds) > 0
        assert (row.reading, row.fits) == ("keep", True)


def test_a_codec_that_cannot_be_used_is_left_out_with_the_reason(photos):
    rows, left_out = compare(photos, Recipe(size=8, mode="grey"), ["raw", "yuv420"])
    assert [row.codec for row in rows] == ["raw"]
    assert "grey" in left_out["yuv420"]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (figures("dct-lz4", size=120), figures("raw", fits=False)),
        (figures("raw", size=800), figures("dct-zstd", size=100)),
        (figures("dct-zstd", size=100), figures("raw", size=800, reading="stream")),
        (figures("dct-zstd", size=100), figures("dct-lz4", size=120)),
        (figures("dct-zstd", size=100), figures("jpeg", size=90, rate=400.0)),
    ],
)
def test_the_better_codec_is_recommended(better, worse):
    assert recommended([better, worse]) == recommended([worse, better]) == better
    assert recommended([figures(fits=False)]) is None


@pytest.mark.slow
def test_the_printed_command_builds_the_cache(photos, tmp_path, capsys, monkeypatch):
    source = shutil.copytree(photos, tmp_path / "a source")
    monkeypatch.chdir(tmp_path)
    words = ["warmup", source.name, "cache", "--size", "16", "--fit", "pad", "--jobs", "1", "--limit", "30"]
    assert main([*words, "--dry-run"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert max(map(len, table[-9:-1])) <= 80
    assert sum(line.startswith("*raw ") for line in table) == 1
    assert main([*words, "--codec", "dct-lz4", "--quality", "70", "--json", "--dry-run"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["codecs"]
    assert {"codec", "bytes", "seconds", "images_per_second", "psnr", "fits", "recommended"} <= {*row}
    assert main(shlex.split(report["command"].removeprefix(f"{PROG} "))) == 0
    manifest = Manifest.load(tmp_path / "cache")
    field = manifest.fields[0]
    assert (field.codec, field.quality, manifest.recipe["fit"], manifest.samples) == ("dct-lz4", 70, "pad", 30)


def against(source: Any, dataset: CachedDataset, **options: Any) -> dict[str, Any]:
    return measure_against(source, dataset, workers=0, seconds=0.02, **options)


@pytest.mark.parametrize("recipe", [Recipe(size=(8, 12), fit="pad"), Recipe(size=20, mode="grey", fit="stretch")])
def test_a_dataloader_reads_images_of_any_shape(recipe, photos, tmp_path):
    build_cache(photos, tmp_path / "cache", recipe, jobs=1)
    found = against(photos, CachedDataset(tmp_path / "cache"), device_rate=1e8)
    assert (found["images"], found["workers"], found["source"]) == (150, 0, str(photos))
    assert found["images_per_second"] > 0
    assert 0 <= found["idle"] <= 1


def test_another_source_is_refused(dataset, tmp_path):
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "other.png")
    with pytest.raises(UsageError, match=r"was not built from .*give --against the source that was given to warmup"):
        against(tmp_path, dataset)
