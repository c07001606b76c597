"""inspect: what differs from the defaults, what a cache has, and nothing of what it has not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tpucache import Manifest, Recipe, build_cache
from tpucache.cli import main
from tpucache.report.inspect import describe_lines


class Tokens:
    """Six sequences of numbers."""

    classes = ("no", "yes")

    def __len__(self):
        return 6

    def __getitem__(self, number):
        return {"input_ids": np.arange(4), "label": number % 2}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return build_cache(Tokens(), tmp_path_factory.mktemp("tokens") / "cache", Recipe(), jobs=1)


def by_name(manifest):
    return dict(line.split(None, 1) for line in describe_lines(manifest) if not line.startswith(" "))


def test_a_recipe_shows_the_size_and_what_differs_from_the_defaults(cache):
    manifest = Manifest.load(cache)
    assert by_name(manifest)["recipe"] == "augment standard, size 16x16, variants 3"
    recipe = Recipe(size=(8, 16), fit="pad", codec="dct-zstd", quality=80, exact=True).to_dict()
    other = replace(manifest, recipe={**recipe, "seed": 7, "augmentation": {"large": 1}})
    text = "size 8x16, fit pad, augment standard, seed 7, codec dct-zstd, quality 80, exact yes"
    assert by_name(other)["recipe"] == text


def test_records_are_counted_in_words(cache, tokens):
    manifest = Manifest.load(cache)
    assert by_name(manifest)["records"] == "600 records: the clean one and 3 augmented variants of each"
    assert by_name(tokens)["records"] == "6 records, one of each"


def test_a_cache_without_images_shows_nothing_about_images(tokens):
    lines = by_name(tokens)
    assert lines["recipe"] == "the defaults"
    assert "mean, std" not in "\n".join(describe_lines(tokens))
    assert lines["fields"] == "input_ids 4 int64 raw"


def test_every_class_is_listed_once_where_all_are(tokens):
    counted = replace(tokens.statistics, class_counts=(7654,) * 10)
    manifest = replace(tokens, classes=tuple("abcdefghij"), statistics=counted)
    for lists_classes, listed in ((True, 10), (False, 8)):
        assert "".join(describe_lines(manifest, lists_classes=lists_classes)).count("7,654") == listed


def test_libraries_that_were_not_installed_are_left_out(cache):
    manifest = replace(Manifest.load(cache), created_by={"tpucache": "1.0", "pydicom": "", "pillow": "12.0"})
    assert by_name(manifest)["made"] == "by      tpucache 1.0, pillow 12.0"


@pytest.mark.slow
def test_bench_takes_a_cache_that_is_smaller_than_its_batches(cache, capsys):
    assert main(["bench", str(cache), "--in-memory", "yes"]) == 0
    said = capsys.readouterr()
    assert "batches of 150, 2 threads, shuffled, kept in memory" in said.out
    assert said.err.startswith("bench: measuring for about ")
    assert main(["bench", str(cache), "--batch-size", "200"]) == 2
    assert "150 samples, less than a batch of 200: give a smaller --batch-size" in capsys.readouterr().err
