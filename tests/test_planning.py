"""A plan: what caches would take, measured on a few samples, and which of them is recommended."""

from __future__ import annotations

import io
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from thorough import thorough

from tpucache import CachePlan, Manifest, PlanRow, Recipe, build_cache, kaggle, plan_cache, planning
from tpucache.cli import main
from tpucache.cli.planning import _lines
from tpucache.errors import BuildError, DependencyError, RecipeError, SourceError, UsageError
from tpucache.planning import _best
from tpucache.store.codecs.plain import Zstd
from tpucache.warmup.sources.source import Item, Listing, Sample

SIZES = [48, (24, 32)]
CODECS = ["raw", "dct-lz4", "jpeg"]


@pytest.fixture(scope="module", autouse=True)
def _short_readings() -> Iterator[None]:
    """Read for moments, as how fast it is does not matter here, and build of as many samples on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_SAMPLES", 60)
        patch.setattr(planning, "_COMPARED", 8)
        patch.setattr(planning, "_MOST_SECONDS", 0.01)
        patch.setattr(planning, "_LEAST_SECONDS", 0.01)
        patch.setattr(planning, "_ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def planned(photos: Path) -> CachePlan:
    """A plan of every codec, size and number of variants."""
    return plan_cache(photos, sizes=SIZES, codecs=CODECS, variants=[0, 1], target="kaggle", seconds=900, jobs=1)


def run(source: Path, *flags: str) -> int:
    few = ["--sizes", "16", "--codecs", "raw", "--variants", "0", "--seconds", "900", "--jobs", "1"]
    return main(["plan", str(source), *few, *flags])


def row(**changed: Any) -> PlanRow:
    whole: dict[str, Any] = {
        "codec": "dct-zstd",
        "size": (224, 224),
        "resolution": None,
        "bands": None,
        "variants": 0,
        "bytes": 100,
        "seconds": 1.0,
        "bytes_per_image": 100,
        "batch_bytes_per_image": 400,
        "images_per_second": 1000.0,
        "reading": "keep",
        "idle": 0.0,
        "psnr": 40.0,
        "fits": True,
        "reason": "",
    }
    return PlanRow(**{**whole, **changed})


@pytest.mark.slow
@pytest.mark.thorough
def test_there_is_a_row_for_each_codec_size_and_number_of_variants_and_for_each_size_read_of_bands(
    planned: CachePlan,
) -> None:
    found = {(each.codec, each.size, each.resolution, each.variants) for each in planned.rows if each.bands is None}
    assert found == {(codec, size, None, k) for codec in CODECS for size in [(48, 48), (24, 32)] for k in (0, 1)}
    bands = [(each.codec, each.size, each.resolution) for each in planned.rows if each.bands and each.variants]
    assert sorted(bands, key=str) == [("dct-lz4", (48, 48), (24, 32)), ("dct-lz4", (48, 48), None)]
    assert planned.samples == 150
    assert planned.tried == 60


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, *thorough(1)])
def test_bytes_are_those_of_the_cache_that_is_then_built(
    planned: CachePlan, photos: Path, tmp_path: Path, every: int
) -> None:
    rows = [each for each in planned.rows if each.resolution is None and (each.variants or each.bands)]
    assert len(rows) > 6
    for number, each in enumerate(rows[::every]):
        recipe = Recipe(size=each.size, codec=each.codec, variants=each.variants, bands=each.bands)
        built = build_cache(photos, tmp_path / f"{number}", recipe, jobs=1)
        assert each.bytes == pytest.approx(built.total_bytes, rel=0.1), each


@pytest.mark.slow
def test_pixels_are_compared_with_those_that_no_codec_has_touched(planned: CachePlan) -> None:
    for each in planned.rows:
        if each.codec == "raw":
            assert each.psnr is None
        else:
            assert each.psnr is not None
            assert 15 < each.psnr < 60
        assert each.images_per_second > 0
        assert each.idle is None
        assert each.seconds > 0
        assert each.reading == "keep"


@pytest.mark.slow
def test_the_largest_cache_in_bands_that_serves_every_size_is_recommended(planned: CachePlan) -> None:
    assert planned.recommended == Recipe(size=48, codec="dct-lz4", variants=1, bands=(2, 4, 8))
    assert len([each for each in planned.rows if planned.is_recommended(each)]) == 2


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({}, {"fits": False, "variants": 4}),
        ({"idle": 0.02}, {"idle": 0.03, "size": (512, 512)}),
        ({"idle": 0.5}, {"idle": 0.6, "size": (512, 512)}),
        ({"size": (256, 256)}, {"variants": 4}),
        ({"variants": 4, "bytes": 500}, {"bytes": 400}),
        ({"codec": "raw", "bytes": 800}, {"bytes": 100}),
        ({"bytes": 100}, {"codec": "raw", "bytes": 800, "reading": "stream"}),
        ({"bytes": 100}, {"codec": "dct-lz4", "bytes": 120}),
    ],
)
def test_the_better_cache_is_recommended(better: dict[str, Any], worse: dict[str, Any]) -> None:
    good, bad = row(**better), row(**worse)
    assert _best([good, bad]) == _best([bad, good]) == good


def test_a_cache_that_is_read_in_more_sizes_is_recommended_where_each_of_them_feeds_the_device() -> None:
    bands = [row(bands=(2, 4, 8)), row(bands=(2, 4, 8), resolution=(112, 112))]
    assert _best([row(), *bands]) == bands[0]
    assert _best([row(), bands[0], row(bands=(2, 4, 8), resolution=(112, 112), idle=0.3)]) == row()
    assert _best([row(fits=False)]) is None


@pytest.mark.slow
def test_the_printed_command_builds_the_recommended_cache(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a source"
    for name in ("cat", "dog"):
        (source / name).mkdir(parents=True)
        for path in sorted((photos / name).iterdir())[:20]:
            shutil.copy(path, source / name)
    (source / "cat" / "bad.png").write_bytes(b"no image")
    given = [
        "--codecs",
        "dct-lz4",
        "--quality",
        "70",
        "--for",
        "kaggle",
        "--exclude",
        "dog/*",
        "--fit",
        "pad",
    ]
    assert run(source, *given, "--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert "building caches of 21 samples by 1 recipes, and reading them in 1 ways" in err
    assert [each["path"] for each in report["failed"]] == ["cat/bad.png"]
    (found,) = report["rows"]
    assert {"codec", "size", "variants", "bytes", "seconds", "images_per_second", "idle", "psnr", "fits"} <= {*found}
    assert found["recommended"]
    monkeypatch.chdir(tmp_path)
    words = shlex.split(report["command"])
    assert words[:2] == ["tpucache", "warmup"]
    assert main(words[1:]) == 0
    manifest = Manifest.load(tmp_path / "cache")
    assert (manifest.fields[0].codec, manifest.fields[0].quality, manifest.recipe["fit"]) == ("dct-lz4", 70, "pad")
    assert manifest.samples == report["samples"] - 1
    assert manifest.total_bytes == pytest.approx(found["bytes"], abs=4096)  # a page: the cache is next to nothing


@pytest.mark.slow
def test_the_table_says_what_it_is_measured_on_and_what_fits(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(photos, "--device-rate", "5000") == 0
    text = capsys.readouterr().out
    assert "built and read 60 of the 150 samples of this source" in text
    assert "idle" in text
    assert "fits" not in text
    assert "* recommended: tpucache warmup" in text
    monkeypatch.setattr(kaggle, "WORKING_BYTES", 1000)
    assert run(photos, "--for", "kaggle") == 0
    text = capsys.readouterr().out
    assert "recommended" not in text
    assert "no cache is within the limits of kaggle" in text
    assert run(photos, "--for", "kaggle", "--json") == 0
    assert json.loads(capsys.readouterr().out)["command"] is None


def test_the_table_has_at_most_80_columns() -> None:
    rows = [
        row(
            bands=(2, 4, 8),
            size=(384, 512),
            resolution=resolution,
            variants=16,
            bytes=123_456_000_000,
            seconds=600_000.0,
            images_per_second=137_540.0,
            idle=1.0,
            psnr=None,
        )
        for resolution in (None, (192, 256))
    ]
    widest = CachePlan(rows, None, 1_000_000, 256, [], {}, "kaggle", 1e6, workers=128, threads=16, seconds=100.0)
    lines = [*_lines(widest)]
    assert "384x512 bands  16" in lines[2]
    assert "  as 192x256" in lines[3]
    assert max(map(len, lines)) <= 80, lines
    assert "!raw" in [*_lines(replace(widest, rows=[row(codec="raw", fits=False)]))][2]


def test_a_device_is_idle_for_the_share_of_the_images_that_are_not_read(photos: Path) -> None:
    for rate in (1.0, 1e9):
        (found,) = plan_cache(photos, sizes=[16], codecs=["raw"], variants=[0], device_rate=rate, jobs=1).rows
        assert found.idle == max(0.0, 1 - found.images_per_second / rate)


@pytest.mark.thorough
def test_the_whole_build_is_in_proportion_to_the_small_ones(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = planning._TrialBuilds._build

    def as_if(trial: Any, few: Any, recipe: Recipe) -> Any:
        samples = len(few.listing.samples)
        return build(trial, few, recipe)._replace(seconds=5.0 + samples * (0.25 + 0.5 * recipe.variants))

    monkeypatch.setattr(planning._TrialBuilds, "_build", as_if)
    for jobs in (1, 4):
        found = plan_cache(photos, sizes=[16], codecs=["raw"], variants=[2, 0, 1], seconds=1e6, jobs=jobs)
        assert found.tried == 60
        expected = [5 + 150 * (0.25 + 0.5 * variants) / jobs for variants in (0, 1, 2)]
        assert [each.seconds for each in found.rows] == pytest.approx(expected, abs=1)


@pytest.mark.slow
def test_what_every_small_build_warns_of_is_said_once(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(photos / "cat", tmp_path / "cat")
    (tmp_path / "notes.txt").write_text("no image")
    plan_cache(tmp_path, sizes=[16], codecs=["raw", "png"], variants=[0], jobs=1)
    (warned,) = [record.getMessage() for record in caplog.records]
    assert "left out: 1 .txt" in warned


def test_what_does_not_fit_into_memory_is_read_from_files(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpucache.loading.reading.memory.available_memory", lambda: 0)
    found = plan_cache(photos, sizes=[16], codecs=["raw"], variants=[0], seconds=0.2, jobs=1)
    assert [each.reading for each in found.rows] == ["stream"]


def test_without_a_temporary_folder_the_error_says_so(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(photos / "nowhere"))
    with pytest.raises(BuildError, match="TMPDIR"):
        plan_cache(photos, codecs=["raw"], variants=[0], jobs=1)


class OneImage:
    """A source of a single image, whose label is a number; with a mask where there is one."""

    def __init__(self, **others: Any) -> None:
        self.others = others

    def list(self) -> Listing:
        return Listing([Sample(0, "one")])

    def load(self, sample: Sample) -> Item:
        file = io.BytesIO()
        Image.fromarray(np.arange(3072, dtype=np.uint16).astype(np.uint8).reshape(32, 32, 3)).save(file, "PNG")
        return Item({"image": file.getvalue(), **self.others}, label=(0.5,))


@pytest.mark.slow
@pytest.mark.parametrize("others", [{}, {"mask": np.ones((32, 32), np.uint8), "boxes": np.array([[1.0, 2, 9, 9]])}])
def test_one_sample_is_enough_and_other_fields_are_measured_with_the_image(others: dict[str, Any]) -> None:
    found = plan_cache(OneImage(**others), sizes=[16], codecs=["raw", "dct-lz4"], variants=[0, 1], seconds=0.2, jobs=1)
    assert (found.samples, found.tried, len(found.rows)) == (1, 1, 4)
    assert found.recommended == Recipe(size=16, codec="raw", variants=1)


@pytest.mark.slow
def test_codecs_that_cannot_be_used_are_left_out_with_the_reason(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few: dict[str, Any] = {"sizes": [16], "variants": [0], "seconds": 0.2, "jobs": 1}

    def missing(*_: object) -> bytes:
        raise DependencyError("the codec zstd needs `pip install zstandard`")

    monkeypatch.setattr(Zstd, "encode", missing)
    found = plan_cache(photos, Recipe(mode="grey"), codecs=["yuv420", "zstd", "raw"], **few)
    assert [each.codec for each in found.rows] == ["raw"]
    assert "grey" in found.left_out["yuv420"]
    assert "pip install zstandard" in found.left_out["zstd"]
    with pytest.raises(DependencyError, match="zstandard"):
        plan_cache(photos, codecs=["zstd"], **few)
    with pytest.raises(RecipeError, match="grey"):
        plan_cache(photos, Recipe(mode="grey"), codecs=["yuv420"], **few)


class Tokens:
    def list(self) -> Listing:
        return Listing([Sample(0, "one")])

    def load(self, sample: Sample) -> Item:
        return Item({"tokens": np.arange(8)})


def test_what_cannot_be_planned_is_refused_as_by_warmup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "empty").mkdir()
    for source, status, said in (
        (tmp_path / "nowhere", 1, "does not exist"),
        (tmp_path / "empty", 1, "empty"),
        (tmp_path, 1, "could be used; 'bad.png': not an image"),
    ):
        assert run(source) == status
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err.splitlines()[-1]
    with pytest.raises(SourceError, match="has no images"):
        plan_cache(Tokens(), codecs=["raw"], variants=[0], jobs=1)


@pytest.mark.parametrize(
    "flags",
    [
        ["--codecs", "webp"],
        ["--sizes", "0x"],
        ["--variants", "-1"],
        ["--seconds", "0"],
        ["--device-rate", "0"],
        ["--for", "moon"],
        ["--codecs", ""],
    ],
    ids=" ".join,
)
def test_wrong_options_are_wrong_usage(photos: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = run(photos, *flags)
    except SystemExit as stop:
        status = stop.code  # type: ignore[assignment]  # argparse gives a number
    assert status == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"sizes": []}, UsageError),
        ({"codecs": "raw"}, UsageError),
        ({"seconds": float("nan")}, UsageError),
        ({"threads": 0}, UsageError),
        ({"sizes": [0]}, RecipeError),
        ({"variants": [-1]}, RecipeError),
        ({"target": "moon"}, UsageError),
    ],
)
def test_values_that_no_argument_has_are_refused(photos: Path, arguments: dict[str, Any], kind: type) -> None:
    with pytest.raises(kind):
        plan_cache(photos, **arguments)
