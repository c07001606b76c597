"""Each kind of source, from its files to what training reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tpucache import CachedDataset, CachedLoader
from tpucache.cli import main
from tpucache.recipe import Recipe
from tpucache.store.verify import verify_cache
from tpucache.warmup.build import build_cache

pytestmark = pytest.mark.usefixtures("short_runs")

TOKENS = """
import numpy as np
class Tokens:
    def __len__(self):
        return 90
    def __getitem__(self, i):
        ids = np.random.default_rng(i).integers(0, 999, 12)
        return {"ids": ids, "mask": np.arange(12) < 3 + i % 9, "target": i % 2, "note": f"row {i}"}
def tokens():
    return Tokens()
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Sixty images with masks in a CSV of classes, folds and ages; each mask marks where its image is bright."""
    rng = np.random.default_rng(3)
    rows = ["name,kind,part,age,mask"]
    for number in range(60):
        bright = np.zeros((20, 30), np.uint8)
        bright[5:15, 3 * (number % 8) : 3 * (number % 8) + 8] = 1
        noise = rng.integers(0, 40, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(noise + 200 * bright[..., None]).save(tmp_path / f"{number}.png")
        Image.fromarray(bright).save(tmp_path / f"{number}-mask.png")
        rows.append(f"{number},{('sun', 'moon', 'star')[number % 3]},{number % 5},{20 + number / 2},{number}-mask.png")
    path = tmp_path / "train.csv"
    path.write_text("\n".join(rows))
    return path


@pytest.mark.slow
@pytest.mark.thorough
def test_a_table_with_masks_is_cached_with_folds_and_the_masks_follow_the_images(table: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options = "--path-col name --label-col kind --suffix .png --fold-col part --mask-col mask --size 20x30 --variants 2"
    assert main(["warmup", str(table), str(cache), *options.split(), "--augment", "affine", "--jobs", "1"]) == 0
    assert verify_cache(cache) == []
    data = CachedDataset(cache)
    assert data.classes == ("moon", "star", "sun")
    assert np.asarray(data.table["fold"]).tolist() == [number % 5 for number in range(60)]
    assert np.asarray(data.table["age"]).tolist() == [20 + number / 2 for number in range(60)]
    for variant in (0, 1, 2):
        for batch in CachedLoader(CachedDataset(cache, variant), 20):
            bright = batch["image"].float().mean(1) > 120
            assert set(batch["mask"].unique().tolist()) <= {0, 1}
            agree = (bright == (batch["mask"].reshape(bright.shape) == 1)).float().mean(dim=(1, 2))
            assert float(agree.min()) > 0.9


def test_tokens_of_a_dataset_are_cached_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "tokens_by_test.py").write_text(TOKENS)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.delitem(sys.modules, "tokens_by_test", raising=False)
    cache = tmp_path / "cache"
    manifest = build_cache("tokens_by_test:tokens", cache, Recipe(), jobs=1)
    assert [field.name for field in manifest.fields] == ["ids", "mask"]
    assert manifest.statistics.class_counts == (45, 45)
    seen: dict[str, Any] = {"ids": [], "mask": [], "label": []}
    for batch in CachedLoader(CachedDataset(cache), 25):
        for name, parts in seen.items():
            parts.append(batch[name])
    ids = torch.cat(seen["ids"])
    assert ids.dtype == torch.int64
    expected = np.stack([np.random.default_rng(i).integers(0, 999, 12) for i in range(90)])
    assert np.array_equal(ids.numpy(), expected)
    assert torch.cat(seen["mask"]).sum(1).tolist() == [3 + i % 9 for i in range(90)]
    assert torch.cat(seen["label"]).tolist() == [i % 2 for i in range(90)]
    assert CachedDataset(cache).table["note"][4] == "row 4"
