"""A CachedLoader finishes its batches on a device: with the random numbers of (seed, step) alone, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tpucache import CachedDataset, CachedLoader, DependencyError, MixedLoader, Recipe, UsageError, build_cache
from tpucache.loading import finishing
from tpucache.loading.ahead import Ahead
from tpucache.ondevice import Augment, AugmentSettings, Normalise, decoder, draw

COUNT, HEIGHT, WIDTH = 22, 16, 24
ALL = AugmentSettings(flip=True, shift=2, crop=True, brightness=0.3, saturation=0.2, erase=0.3, hue=0.1)
CPU = torch.device("cpu")


@pytest.fixture
def own_cache(cache_of: Callable[[str], Path]) -> Path:
    return cache_of("raw")


def epochs(loader: CachedLoader, count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch for _ in range(count) for batch in loader]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True)
    )


def test_without_these_arguments_batches_are_bytes(own_cache: Path) -> None:
    (images, labels), *_ = epochs(CachedLoader(CachedDataset(own_cache), 8))
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    (alike, _), *_ = epochs(CachedLoader(CachedDataset(own_cache), 8, device="cpu"))
    assert torch.equal(alike, images)


def test_normalising_is_that_of_the_caches_statistics(own_cache: Path) -> None:
    dataset = CachedDataset(own_cache)
    statistics = dataset.manifest.statistics
    images = torch.cat([images for images, _ in CachedLoader(dataset, 8, normalise=True)])
    assert (images.dtype, images.shape) == (torch.float32, (COUNT, 3, HEIGHT, WIDTH))
    whole = torch.stack([image for image, _ in dataset])
    assert torch.equal(images, Normalise(statistics.mean, statistics.std, CPU)(whole.permute(0, 2, 3, 1)))
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)


@pytest.mark.parametrize("settings", [ALL, AugmentSettings(mixup=0.3, cutmix=1.0), AugmentSettings(flip=True, views=2)])
def test_augmenting_is_by_the_numbers_of_seed_and_step(own_cache: Path, settings: AugmentSettings) -> None:
    dataset = CachedDataset(own_cache)
    plain = epochs(CachedLoader(dataset, 8, shuffle=True, seed=3), 2)
    found = epochs(CachedLoader(dataset, 8, shuffle=True, seed=3, augment=settings), 2)
    statistics = dataset.manifest.statistics
    augment = Augment(settings, statistics.mean, statistics.std, HEIGHT, WIDTH, CPU)
    for step, ((images, labels), (changed, targets)) in enumerate(zip(plain, found, strict=True)):
        draws = torch.from_numpy(draw(settings, 3, step, len(images), (HEIGHT, WIDTH)))
        expected = augment.images(augment.views(images.permute(0, 2, 3, 1)), draws)
        kept = augment.views(labels)
        if settings.mixes:
            expected, kept = augment.mix(expected, torch.nn.functional.one_hot(labels, 2).float(), draws)
        assert torch.equal(changed, expected)
        assert torch.equal(targets, kept)
    assert len({images.sum().item() for images, _ in found}) == len(found)


def test_a_state_that_is_loaded_meanwhile_leaves_a_running_iteration_as_it_is(own_cache: Path) -> None:
    first, other = (CachedLoader(CachedDataset(own_cache), 8, seed=seed, augment=ALL) for seed in (1, 2))
    expected = epochs(CachedLoader(CachedDataset(own_cache), 8, seed=1, augment=ALL))
    running = iter(first)
    found = [next(running)]
    first.load_state_dict(other.state_dict())
    assert same([*found, *running], expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_get_their_rows_of_the_same_global_batches(own_cache: Path, world_size: int) -> None:
    whole = epochs(CachedLoader(CachedDataset(own_cache), 6, shuffle=True, augment=ALL), 2)
    ranks = [
        epochs(
            CachedLoader(
                CachedDataset(own_cache), 6 // world_size, shuffle=True, augment=ALL, rank=rank, world_size=world_size
            ),
            2,
        )
        for rank in range(world_size)
    ]
    for at, (images, labels) in enumerate(whole):
        assert torch.equal(torch.cat([rank[at][0] for rank in ranks]), images)
        assert torch.equal(torch.cat([rank[at][1] for rank in ranks]), labels)


def test_packed_images_are_decoded(cache_of: Callable[[str], Path]) -> None:
    dataset = CachedDataset(cache_of("yuv420"))
    (packed, _), *_ = epochs(CachedLoader(dataset, 8, finish="device"))
    (images, _), *_ = epochs(CachedLoader(dataset, 8, finish="device", device="cpu"))
    assert torch.equal(images, decoder(dataset)(packed))
    (normalised, _), *_ = epochs(CachedLoader(dataset, 8, finish="device", normalise=True))
    statistics = dataset.manifest.statistics
    assert torch.equal(normalised, Normalise(statistics.mean, statistics.std, CPU)(images.permute(0, 2, 3, 1)))


def test_a_mixture_is_finished_as_its_loaders_are(own_cache: Path) -> None:
    dataset = CachedDataset(own_cache)

    def mixture(**options: Any) -> MixedLoader:
        return MixedLoader([CachedLoader(dataset, 4, **options), CachedLoader(dataset, 4, **options)], [1, 1])

    (images, _), *_ = epochs(mixture(normalise=True))
    (plain, _), *_ = epochs(mixture())
    statistics = dataset.manifest.statistics
    assert torch.equal(images, Normalise(statistics.mean, statistics.std, CPU)(plain.permute(0, 2, 3, 1)))
    with pytest.raises(UsageError, match="loader 1 has another augment, normalise or device than loader 0"):
        MixedLoader([CachedLoader(dataset, 4, normalise=True), CachedLoader(dataset, 4)], [1, 1])


def test_what_finishes_batches_itself_refuses_a_loader_that_does(own_cache: Path) -> None:
    loader = CachedLoader(CachedDataset(own_cache), 4, normalise=True)
    with pytest.raises(UsageError, match="make a CachedLoader without augment, normalise and device"):
        Ahead(loader, lambda batch, _: batch).__enter__()


def test_arguments_that_cannot_be_met_are_refused(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = CachedDataset(own_cache)
    for options, text in (
        ({"augment": "flip"}, "augment is an AugmentSettings"),
        ({"augment": AugmentSettings(rotate=True)}, "rotate turns only square images"),
        ({"device": "cpu:x"}, "device 'cpu:x' cannot be used: "),
        ({"device": "hpu"}, "device 'hpu' cannot be used: "),
    ):
        with pytest.raises(UsageError, match=text):
            CachedLoader(dataset, 4, **options)
    monkeypatch.setattr(finishing, "HAS_TORCH", False)
    with pytest.raises(DependencyError, match=r"use tpucache.jax.feed"):
        CachedLoader(dataset, 4, normalise=True)


def test_classes_of_samples_without_labels_are_not_mixed(own_cache: Path, tmp_path: Path) -> None:
    build_cache(own_cache.parent / "photos" / "0", tmp_path / "cache", Recipe(size=8), jobs=1)
    loader = CachedLoader(CachedDataset(tmp_path / "cache"), 4, augment=AugmentSettings(mixup=0.2))
    with pytest.raises(UsageError, match="mixup and cutmix mix classes, and some samples of this cache have no class"):
        next(iter(loader))
