"""The card of a published cache: what it is, how to read it, and no name that breaks it."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from tpucache import Recipe, build_cache
from tpucache.publish.bundle import make_bundle
from tpucache.publish.rules import Metadata
from tpucache.store.manifest import Manifest

METADATA = Metadata("ann/noise-at-16", "Noise at 16", "CC-BY-4.0")


@pytest.mark.slow
def test_the_card_tells_what_it_is_and_how_to_read_it(stored):
    folder = make_bundle(stored, METADATA).folder
    card = (folder / "README.md").read_text()
    for part in (
        "# Noise at 16",
        "150 samples, each clean and in 3 augmented variants",
        "| ant | 38 |",
        "| fields | image 16x16x3 uint8 raw |",
        "size 16x16, ",
        "CC-BY-4.0",
        "(sheet.png)",
        "| mean, std | ",
        Manifest.load(stored).fingerprint,
        'CachedDataset("kaggle:ann/noise-at-16", variant="epoch")',
        "pip wheel --no-deps --wheel-dir wheels .",
        "pip install --no-deps --no-index ",
    ):
        assert part in card
    with Image.open(folder / "sheet.png") as sheet:
        assert min(sheet.size) > 4 * 128
        assert len(np.unique(np.asarray(sheet).reshape(-1, 3), axis=0)) > 1000


@pytest.mark.slow
def test_names_of_files_and_classes_cannot_break_the_card(photos, tmp_path):
    source = shutil.copytree(photos / "ant", tmp_path / "source" / "a|<b>_`c`[x](y)&")
    (source / "bad|\n<script>.png").write_text("no image")
    build_cache(source.parent, tmp_path / "cache", Recipe(size=8), jobs=1, on_error="skip")
    card = (make_bundle(tmp_path / "cache", METADATA).folder / "README.md").read_text()
    assert r"| a&#124;&#60;b&#62;\_\`c\`\[x\](y)&#38; | 38 |" in card
    assert r"bad&#124;\\x0a&#60;script&#62;.png |" in card
    assert "<script>" not in card
