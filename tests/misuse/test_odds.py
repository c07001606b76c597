"""Reading ahead, small environments, arrays and URLs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lab import COUNT, assert_same
from refusals import assert_refused

from tpucache import CachedDataset, CachedLoader, Recipe, RecipeError, build_cache
from tpucache.training import Feeder, open_device


class Waves:
    """24 arrays that can be compressed, and a class each."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> dict[str, object]:
        return {"waves": np.arange(3000, dtype=np.float32) // 100 + number, "label": number % 2}


def test_a_state_saved_while_the_feeder_reads_ahead(lab):
    loader = CachedLoader(CachedDataset(lab.shared.cache), 4)
    with Feeder(loader, open_device("torch")) as feeder:
        taken = [batch.labels.tolist() for _, batch in zip(range(2), feeder, strict=False)]
        state = feeder.state_dict()
    assert loader.state_dict() == state
    rest = CachedLoader(CachedDataset(lab.shared.cache), 4)
    rest.load_state_dict(state)
    taken += [labels.tolist() for _, labels in rest]
    whole = [labels.tolist() for _, labels in CachedLoader(CachedDataset(lab.shared.cache), 4)]
    assert taken == whole


def test_arrays_in_zstd(lab):
    sizes = {}
    for codec in ("raw", "zstd"):
        manifest = build_cache(Waves(), lab.folder / codec, Recipe(codec=codec), jobs=1)
        assert {field.codec for field in manifest.fields} == {codec}, f"codecs of the fields for {codec}"
        assert_same(np.asarray(CachedDataset(lab.folder / codec)[5]["waves"]), Waves()[5]["waves"])
        sizes[codec] = manifest.total_bytes
    assert sizes["zstd"] < sizes["raw"] / 3


def test_variants_and_jpeg_of_arrays(lab):
    for recipe in (Recipe(variants=2), Recipe(codec="jpeg")):
        with pytest.raises(RecipeError) as error:
            build_cache(Waves(), lab.folder / "cache", recipe, jobs=1)
        assert " object at 0x" not in str(error.value)


def test_a_url_as_source(lab):
    assert_refused(
        lab.warmup("s3://bucket/train.csv", "cache"), "s3://bucket/train.csv is a URL", "aws s3 cp", status=2
    )


def test_a_url_as_the_folder_of_a_run(lab):
    assert_refused(lab.train(lab.shared.cache, Path("run"), "--run", "gs://bucket/run"), "is a URL", status=2)
    assert [path.name for path in Path().iterdir()] == []
