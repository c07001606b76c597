"""The source of a cache read by a DataLoader, and when building has paid for itself."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from tpucache import CachedDataset, Recipe, UsageError, build_cache, payback
from tpucache.cli import main
from tpucache.payback import _fit, measure_payback
from tpucache.report.bench import run_bench


@pytest.fixture(scope="module")
def dataset(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("payback") / "cache"
    build_cache(photos, folder, Recipe(size=(8, 12)), jobs=1)
    return CachedDataset(folder)


def measure(source, dataset, rate=1e9, **options):
    return measure_payback(source, dataset, rate, workers=0, seconds=0.02, **options)


def test_the_same_images_are_read_and_building_is_paid_when_less_time_was_taken(photos, dataset):
    found = measure(photos, dataset, device_rate=1e8)
    assert (found.images, found.workers, found.source) == (150, 0, str(photos))
    assert found.images_per_second > 0
    assert 0 <= found.idle <= 1
    assert found.epoch_seconds == pytest.approx(150 / found.images_per_second)
    assert found.cache_epoch_seconds == 150 / 1e8  # no faster than the device
    saved = found.epoch_seconds - found.cache_epoch_seconds
    assert found.build_seconds > 0
    assert (found.epochs - 1) * saved <= found.build_seconds < found.epochs * saved


def test_a_cache_that_is_no_faster_never_pays(photos, dataset):
    found = measure(photos, dataset, rate=1e-3)
    assert (found.epochs, found.idle) == (None, None)


def test_what_the_manifest_alone_names_is_not_called(photos, dataset, monkeypatch):
    recipe = {**dataset.manifest.recipe, "variants": 1, "augment": "os:system"}
    monkeypatch.setattr(dataset, "manifest", dataset.manifest.changed(recipe=recipe))
    found = measure(photos, dataset)
    assert (found.build_seconds, found.epochs) == (None, None)
    assert "os:system, is not called" in found.unknown


def test_another_source_is_refused(dataset, tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "other.png")
    with pytest.raises(UsageError, match=r"was not built from .*give --against the source that was given to warmup"):
        measure(tmp_path, dataset)


@pytest.mark.parametrize("mode", ["rgb", "grey"])
@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_an_image_is_a_tensor_of_the_caches_shape(mode, fit, photos, dataset):
    recipe = Recipe(size=(8, 12), fit=fit, mode=mode)
    source = payback.to_source(photos)
    image = payback._SourceImages(source, source.list().samples[:1], recipe)[0]
    assert (image.dtype, tuple(image.shape)) == (torch.float32, (1 if mode == "grey" else 3, 8, 12))
    assert 0 <= image.min() <= image.max() <= 1


def test_a_crop_keeps_the_middle_and_the_shape_of_things():
    ramp = np.broadcast_to(np.arange(60, dtype=np.uint8)[None, :, None], (20, 60, 3))
    cut = np.asarray(_fit(Image.fromarray(ramp.copy()), Recipe(size=20)))
    assert (cut[0, :, 0] == np.arange(20, 40)).all()


@pytest.mark.thorough
def test_bench_says_what_it_is_against(photos, dataset, monkeypatch, capsys):
    for name, value in (("rounds", 1), ("seconds", 0.02)):
        monkeypatch.setitem(run_bench.__kwdefaults__, name, value)
    for name, value in (("workers", 0), ("seconds", 0.02)):
        monkeypatch.setitem(measure_payback.__kwdefaults__, name, value)
    words = ["bench", str(dataset.directory), "--against", str(photos), "--device-rate", "1000", "--batch-size", "50"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert f"by a DataLoader with 0 workers: 150 images of {photos}" in text
    assert "of that accelerator with the DataLoader" in text
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    against = report["against"]
    assert against["images"] == 150
    assert math.isclose(against["cache_epoch_seconds"], 150 / min(1000, report["images_per_second"]))
