"""Sequences of different lengths: padded to the longest or to a length, with a mask of what is not padding."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import build_here, encode
from numpy.testing import assert_array_equal
from PIL import Image

from tpucache import CachedDataset, CachedLoader, build_cache
from tpucache.errors import SampleError, UsageError
from tpucache.store.verify import verify_cache
from tpucache.warmup import repair_cache
from tpucache.warmup.sources import pad_source
from tpucache.warmup.sources.datasets import DatasetSource


class Reviews:
    """Picklable, and so a dataset that can be given itself."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number]


def _padded(*items, **options):
    source = pad_source(DatasetSource(Reviews(*items)), **options)
    samples = source.list().samples
    source = pickle.loads(pickle.dumps(source))
    return [source.load(sample) for sample in samples]


@pytest.mark.slow
@given(lengths=st.lists(st.integers(0, 9), min_size=2, max_size=6))
def test_tuples_of_lists_are_padded_to_the_longest(lengths):
    items = _padded(*(([7] * length, number % 2) for number, length in enumerate(lengths)))
    for number, (item, length) in enumerate(zip(items, lengths, strict=True)):
        ids = item.fields["input_ids"]
        assert item.label == number % 2
        if len(set(lengths)) == 1:
            assert (list(item.fields), ids.tolist()) == (["input_ids"], [7] * length)
            continue
        assert ids.tolist() == [7] * length + [0] * (max(lengths) - length)
        assert item.fields["attention_mask"].tolist() == [1] * length + [0] * (max(lengths) - length)
        assert item.columns == {"length": length}


def test_all_sequences_of_a_dictionary_are_padded_and_its_own_mask_is_kept():
    one = {
        "ids": torch.tensor([5, 6, 7]),
        "mask": [1, 1, 1],
        "kinds": np.array([0, 0, 1]),
        "targets": 1,
        "text": "a b c",
    }
    two = {"ids": torch.tensor([8]), "mask": [1], "kinds": np.array([1]), "targets": 0, "text": "d"}
    first, second = _padded(one, two, pad=4)
    assert {name: value.tolist() for name, value in second.fields.items()} == {
        "ids": [8, 0, 0, 0], "mask": [1, 0, 0, 0], "kinds": [1, 0, 0, 0],
    }  # fmt: skip
    assert (first.label, first.columns) == (1, {"text": "a b c", "length": 3})


def test_longer_sequences_are_refused_or_cut():
    items = ([1, 2, 3], 0), ([1, 2, 3, 4, 5], 1)
    with pytest.raises(SampleError, match=r"'input_ids' has 5 numbers: give --pad 5 or more, .*cut with --truncate"):
        _padded(*items, pad=4)
    cut = _padded(*items, pad=4, truncate=True)[1]
    assert cut.fields["input_ids"].tolist() == [1, 2, 3, 4]
    assert cut.columns == {"length": 5}


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (({"ids": [1, 2], "kinds": [1, 2]}, {"ids": [1], "kinds": [1, 2]}), "'kinds' is not a sequence of 1 numbers"),
        (({"ids": [1, 2]}, {"ids": [[1]]}), "has no sequence 'ids'"),
    ],
)
def test_a_sample_whose_sequences_do_not_fit_is_refused(items, reason):
    with pytest.raises(SampleError, match=reason):
        _padded(*items, pad=3)


def test_wrong_options_are_refused(tmp_path):
    for options, reason in (({"pad": 0}, "pad is at least 1"), ({"truncate": True}, "give --pad, too")):
        with pytest.raises(UsageError, match=reason):
            build_cache(Reviews(([1], 0)), tmp_path / "cache", **options)
    image = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(UsageError, match="has no sequences: leave out --pad"):
        build_cache(Reviews((image, 0)), tmp_path / "cache", pad=3)


@pytest.mark.slow
def test_a_dataset_itself_becomes_a_cache_that_is_extended_and_repaired(tmp_path):
    items = [(list(range(1, 2 + number % 5)), number % 3) for number in range(12)]
    cache = tmp_path / "cache"
    build_here(Reviews(*items[:9]), cache, pad=4, truncate=True)
    manifest = build_here(Reviews(*items), cache, pad=4, truncate=True)
    assert manifest.samples == 12
    batch = next(iter(CachedLoader(CachedDataset(cache), 12)))
    assert batch["attention_mask"].sum(1).tolist() == [min(4, 1 + number % 5) for number in range(12)]
    assert batch["label"].tolist() == [number % 3 for number in range(12)]
    shard = cache / manifest.shards[0].name
    shard.write_bytes(shard.read_bytes()[:-4096])
    repair_cache(Reviews(*items), cache, jobs=1)
    assert verify_cache(cache) == []


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", [int, float])
def test_an_empty_sequence_has_the_dtype_of_the_others(at, kind, tmp_path):
    items = [([kind(number + 1)] * 3, number % 2) for number in range(4)]
    items[at] = ([], 1)
    manifest = build_here(Reviews(*items), tmp_path / "cache")
    assert manifest.samples == 4
    batch = next(iter(CachedLoader(CachedDataset(tmp_path / "cache"), 4)))
    assert batch["input_ids"].is_floating_point() == (kind is float)
    assert batch["attention_mask"].sum(1).tolist() == [0 if number == at else 3 for number in range(4)]


def test_a_dataset_that_cannot_be_sent_to_workers_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"the Reviews cannot be sent to workers .*: give module:callable"):
        build_cache(Reviews(lambda: 1), tmp_path / "cache")
    with pytest.raises(UsageError, match="to send to each worker: give module:callable"):
        build_cache(Reviews(bytes(17 << 20)), tmp_path / "cache")


def test_images_of_any_mode_are_those_of_files(tmp_path, caplog):
    """CMYK, YCbCr, LA, RGBA, palettes, bytes in a dictionary, (H, W, 1) and (C, H, W) become the pixels of files."""
    rng = np.random.default_rng(0)
    colours = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
    images = [colours.convert(mode) for mode in ("RGB", "CMYK", "YCbCr", "LA", "RGBA", "P", "1")]
    pixels = np.asarray(colours)
    others = [{"bytes": encode(colours), "path": "x.png"}, torch.tensor(pixels).permute(2, 0, 1)]
    grey = [np.asarray(colours.convert("L"))[..., None], colours.convert("L")]
    with caplog.at_level(logging.WARNING, "tpucache"):
        build_here(Reviews(*images, *others, *grey), tmp_path / "cache")
    cached = CachedDataset(tmp_path / "cache")
    found = [cached[number][0].permute(1, 2, 0).numpy() for number in range(11)]
    for image, expected in zip(found, images, strict=False):
        assert_array_equal(image, np.asarray(expected.convert("RGB")))
    for image in found[7:9]:
        assert_array_equal(image, pixels)
    assert_array_equal(found[9], found[10])
