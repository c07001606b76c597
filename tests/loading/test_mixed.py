"""Batches mixed from several caches by shares."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tpucache import CachedDataset, CachedLoader, MixedLoader, Recipe, UsageError, build_cache
from tpucache.loading.mixed import Mixture
from tpucache.loading.order import full_order
from tpucache.warmup import TableOptions, TableSource


def loaders(cache: Path, size: int, **more: Any) -> list[CachedLoader]:
    """Two loaders: of 100 samples in one variant, and of the 50 others, which change variants."""
    more = {"drop_last": True, **more}
    one = CachedLoader(CachedDataset(cache)[:100], size, shuffle=True, seed=1, **more)
    return [one, CachedLoader(CachedDataset(cache, "epoch")[100:], size, balance=True, seed=2, **more)]


def mixed(cache: Path, size: int, **more: Any) -> MixedLoader:
    return MixedLoader(loaders(cache, size, **more), shares=[1, 3])


def kept(batches: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(images.clone(), labels) for images, labels in batches]


def same(one: Any, other: Any) -> bool:
    pairs = itertools.zip_longest(one, other, fillvalue=(torch.empty(0), torch.empty(0)))
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.slow
def test_each_batch_has_its_shares_of_samples_as_their_caches_show_them(cache: Path) -> None:
    loader = mixed(cache, 20)
    assert len(loader) == 150 // 20
    order = loader.order.positions(150, 0, 0)
    datasets = [each.dataset for each in loaders(cache, 20)]
    for number, (images, labels) in enumerate(kept(loader)):
        indices = order[20 * number :][:20]
        assert np.count_nonzero(indices % 150 >= 100) == 15
        for image, label, index in zip(images, labels, indices.tolist(), strict=True):
            dataset = datasets[index % 150 >= 100]
            dataset.set_epoch(index // 150)
            expected = dataset[index % 150 - (100 if index % 150 >= 100 else 0)]
            assert torch.equal(image, expected[0])
            assert label == expected[1]


def test_each_cache_continues_in_its_own_order_epoch_after_epoch(cache: Path) -> None:
    order = mixed(cache, 20).order
    indices = np.concatenate([order.positions(150, 0, epoch) for epoch in range(4)])
    shown = indices[indices % 150 < 100]
    own = np.concatenate([full_order(100, 1, epoch) + 150 * epoch for epoch in range(2)])
    assert shown.tolist() == own[: len(shown)].tolist()
    assert len(shown) == 150


def test_a_state_of_other_shares_seeds_or_caches_is_refused(cache: Path) -> None:
    state = mixed(cache, 16).state_dict()
    one, other = loaders(cache, 16)
    for different in (
        MixedLoader([one, other], shares=[1, 2]),
        MixedLoader([other, one], shares=[1, 3]),
        MixedLoader([CachedLoader(one.dataset, 16, shuffle=True, drop_last=True), other], shares=[1, 3]),
        one,
    ):
        with pytest.raises(UsageError, match="cannot be continued here"):
            different.load_state_dict(state)
    MixedLoader([one, other], shares=[2, 6]).load_state_dict(state)


@pytest.mark.slow
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 500), st.integers(0, 60))
def test_any_stretch_of_a_mixture_has_the_shares_to_within_two(shares: list[int], first: int, samples: int) -> None:
    sources, turns = Mixture(shares).sources(first, first + samples)
    for at, share in enumerate(shares):
        assert abs(np.count_nonzero(sources == at) - samples * share / sum(shares)) <= 2
        assert np.array_equal(np.diff(turns[sources == at]), np.ones(max(0, np.count_nonzero(sources == at) - 1)))


@pytest.mark.parametrize(
    ("shares", "message"), [([1], "one share for each"), ([1, 0], "at least 1"), ([0.5, 0.5], "whole number")]
)
def test_shares_that_are_none_are_refused(cache: Path, shares: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MixedLoader(loaders(cache, 16), shares)


def test_loaders_that_do_not_fit_are_refused(cache: Path) -> None:
    one, other = loaders(cache, 16)
    misfits: list[tuple[Any, str]] = [
        (CachedLoader(one.dataset, 8, drop_last=True), "batch_size 8, loader 0 16"),
        (CachedLoader(one.dataset[:0], 16, drop_last=True), "no samples"),
        (CachedLoader(one.dataset, 16, drop_last=True, reiterate="same"), "loader 1 has reiterate same, loader 0 next"),
        (MixedLoader([one, other], [1, 1]), "not of MixedLoader"),
    ]
    for wrong, message in misfits:
        with pytest.raises(UsageError, match=message):
            MixedLoader([one, wrong], [1, 1])


@pytest.mark.slow
def test_caches_are_mixed_where_their_records_are_alike(photos: Path, tmp_path: Path) -> None:
    two, other = tmp_path / "source" / "two", tmp_path / "source" / "other"
    for folder, name in ((two, "ant"), (two, "bee"), (other, "ant"), (other, "cat")):
        shutil.copytree(photos / name, folder / name)

    def made(source: Path, name: str, **recipe: Any) -> CachedDataset:
        build_cache(source, tmp_path / name, Recipe(**{"size": 16, "codec": "dct-zstd", **recipe}), jobs=1)
        return CachedDataset(tmp_path / name)

    good, poor = made(two, "good", quality=95), made(two, "poor", quality=40)
    for finish in ("host", "device"):
        loaders = [CachedLoader(dataset, 19, finish=finish) for dataset in (good, good, poor)]
        both = torch.cat([images for images, _ in MixedLoader(loaders[:2], [1, 1])])
        assert torch.equal(both[::2], both[1::2])
        assert torch.equal(both[::2], torch.cat([images for images, _ in loaders[0]]))
        if finish == "host":
            assert len(list(MixedLoader(loaders, [1, 1, 1]))) == 12
        else:
            with pytest.raises(UsageError, match="leave finish out if only codecs differ"):
                MixedLoader(loaders, [1, 1, 1])
    for wrong, option in ((made(other, "classes"), "--classes"), (made(two, "size", size=24), "--like")):
        with pytest.raises(UsageError, match=option):
            MixedLoader([CachedLoader(good, 19), CachedLoader(wrong, 19)], [1, 1])


def test_caches_whose_labels_are_the_same_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "0.png")
    (tmp_path / "table.csv").write_text("path,width,height\n0.png,0.5,1.5\n")
    loaders = []
    for names in (("width", "height"), ("height", "width")):
        source = TableSource(tmp_path / "table.csv", TableOptions(label_cols=names))
        build_cache(source, tmp_path / names[0], Recipe(size=16), jobs=1)
        loaders.append(CachedLoader(CachedDataset(tmp_path / names[0]), 1))
    with pytest.raises(UsageError, match="are the columns height, width, those of"):
        MixedLoader(loaders, [1, 1])
