"""Kaggle's limits are the same in warmup, in publishing and in what the documentation states."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpucache import BuildError, Manifest, PublishError, Recipe, build_cache
from tpucache.cli import main
from tpucache.kaggle import MAX_FILES, TARGET_SHARDS
from tpucache.publish.bundle import make_bundle
from tpucache.publish.options import Metadata
from tpucache.publish.rules import breaches
from tpucache.store.verify import verify_cache

METADATA = Metadata("ann/noise-at-16", "Noise at 16", "CC-BY-4.0")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_what_the_target_allows_is_published_with_all_that_goes_with_it(photos, tmp_path, caplog):
    """One shard more costs the sheet, two more are refused, and nothing is left that says otherwise."""
    source = tmp_path / "photos"
    source.mkdir()
    for photo in sorted((photos / "ant").iterdir())[:2]:
        (source / photo.name).write_bytes(photo.read_bytes())
    cache, recipe = tmp_path / "cache", Recipe(size=8, variants=TARGET_SHARDS - 1)
    build_cache(source, cache, recipe, jobs=1, target="kaggle")
    assert len(Manifest.load(cache).shards) == TARGET_SHARDS
    made = make_bundle(cache, METADATA)
    assert len(made.files) == MAX_FILES
    assert {"sheet.png", "README.md", "manifest.json"} < made.files.keys()
    for shards in (TARGET_SHARDS + 1, TARGET_SHARDS + 2):
        recipe = Recipe(size=8, variants=shards - 1)
        with pytest.raises(BuildError, match=f"{TARGET_SHARDS}"):
            build_cache(source, cache, recipe, jobs=1, target="kaggle")
        build_cache(source, cache, recipe, jobs=1)
        with pytest.raises(BuildError, match=f"{TARGET_SHARDS}"):  # finished as it is
            build_cache(source, cache, recipe, jobs=1, target="kaggle")
        if shards == TARGET_SHARDS + 1:
            made = make_bundle(cache, METADATA)
            assert len(made.files) == MAX_FILES
            assert "sheet.png" not in made.files
            assert "no room for a sheet" in caplog.text
            assert breaches(made.folder) == verify_cache(made.folder) == []
        else:
            with pytest.raises(PublishError, match=f"at most {TARGET_SHARDS + 1}"):
                make_bundle(cache, METADATA)


def test_the_documented_limit_is_the_one_that_is_kept(capsys):
    for name in ("README.md", "docs/kaggle.md", "docs/warmup.md"):
        assert f"{TARGET_SHARDS} shards" in (ROOT / name).read_text().replace("\n", " ")
    with pytest.raises(SystemExit):
        main(["warmup", "--help"])
    assert f"{TARGET_SHARDS} shards" in " ".join(capsys.readouterr().out.split())
