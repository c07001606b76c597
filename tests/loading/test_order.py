"""In the block order, a chunk is one stretch of one file also where variants change by the epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache import CachedDataset, CachedLoader, Manifest, UsageError
from tpucache.loading import loader as loader_module
from tpucache.loading.order import EpochOrder, global_batches, local_order, local_parts, make_order, rank_slice
from tpucache.loading.reading.record_reader import RecordReader
from tpucache.store.codecs import CODECS

CHUNK = 12


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Chunks of a few samples, as caches of many images have relative to their size."""
    size = CHUNK * CachedDataset(cache, "epoch").usual_record_bytes
    monkeypatch.setattr(loader_module, "CHUNK_BYTES", size)


def shown(loader: CachedLoader, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the sample and the variant of everything that an epoch shows."""
    seen: list[int] = []
    read_into = RecordReader.read_into

    def noting(self: RecordReader, buffer: Any, rows: Any, **how: Any) -> None:
        seen.extend(rows.tolist())
        read_into(self, buffer, rows, **how)

    with monkeypatch.context() as patch:
        patch.setattr(RecordReader, "read_into", noting)
        for _ in loader:
            pass
    return [(row % 150, row // 150) for row in seen]


def test_samples_of_a_chunk_show_one_variant_and_each_sample_shows_all(cache: Path, monkeypatch) -> None:
    dataset = CachedDataset(cache, "epoch")
    loader = CachedLoader(dataset, 20, shuffle="block", window=40)
    epochs = [shown(loader, monkeypatch) for _ in range(3)]
    for epoch in epochs:
        assert sorted(sample for sample, _ in epoch) == list(range(150))
        of = dict(epoch)
        assert all(len({of[at] for at in range(start, min(start + CHUNK, 150))}) == 1 for start in range(0, 150, CHUNK))
    assert all({dict(epoch)[sample] for epoch in epochs} == {1, 2, 3} for sample in range(150))


def test_a_window_is_read_in_as_few_stretches_as_it_has_chunks(cache: Path) -> None:
    dataset = CachedDataset(cache, "epoch")
    loader = CachedLoader(dataset, 20, shuffle="block", window=5 * CHUNK)
    order = loader.order.positions(150, 0, 0)[: 5 * CHUNK]

    def stretches(shared: int) -> int:
        return 1 + int(np.count_nonzero(np.diff(np.sort(dataset._rows(order, 0, shared))) > 1))

    assert stretches(loader.order.shared) <= 6  # one more where the short last chunk shifts the others
    assert stretches(1) > 50


@pytest.mark.parametrize("variant", [0, 2, "epoch"])
def test_a_chunk_holds_as_many_samples_as_usually_have_its_bytes(
    cache: Path, variant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows from the fields alone, so that it is the same before any record is made."""
    usual = sum(field.nbytes * CODECS[field.codec].typical_ratio for field in Manifest.load(cache).fields)
    monkeypatch.setattr(loader_module, "CHUNK_BYTES", 7 * round(usual))
    assert CachedLoader(CachedDataset(cache, variant), 20, shuffle="block").state_dict()["chunk"] == 7


@pytest.mark.parametrize(("shuffle", "by_chunk"), [("block", True), (True, False), (False, False)])
def test_only_the_block_order_changes_variants_by_chunk(cache: Path, shuffle: Any, by_chunk: bool) -> None:
    turning = CachedLoader(CachedDataset(cache, "epoch"), 20, shuffle=shuffle, window=40)
    still = CachedLoader(CachedDataset(cache, 1), 20, shuffle=shuffle, window=40)
    assert turning.state_dict()["order"].endswith(", variants by chunk") is by_chunk
    assert "variants" not in str(still.state_dict()["order"])
    assert (turning.order.shared == CHUNK) is by_chunk


@pytest.mark.slow
def test_a_state_of_an_order_by_samples_continues_in_that_order(cache: Path) -> None:
    def loader() -> CachedLoader:
        return CachedLoader(CachedDataset(cache, "epoch"), 30, shuffle="block", window=40)

    by_sample = loader()
    by_sample.order = EpochOrder("block", 40, CHUNK)
    whole = [images.clone() for _ in range(2) for images, _ in by_sample]
    by_sample.set_epoch(0)
    batches = iter(by_sample)
    next(batches)
    state = by_sample.state_dict()
    assert state["order"] == "block 40"
    resumed = loader()
    resumed.load_state_dict(state)
    found = [images.clone() for _ in range(2) for images, _ in resumed]
    assert all(torch.equal(one, other) for one, other in zip(found, whole[1:], strict=True))
    assert resumed.state_dict()["order"] == "block 40"
    again = loader()
    again.load_state_dict(loader().state_dict())
    assert again.order.shared == CHUNK
    with pytest.raises(UsageError, match="order"):
        resumed.load_state_dict({**state, "order": "block 41, variants by chunk"})


def test_each_order_has_a_text_of_its_own_and_chunks_of_one_sample_need_none() -> None:
    def text(shuffle: Any, chunk: int = 5, *, changes_variants: bool = False) -> str:
        return make_order(shuffle, 9, chunk, changes_variants=changes_variants).text

    assert [text(shuffle) for shuffle in (False, True, "full", "block")] == ["file", "full", "full", "block 9"]
    assert text("block", changes_variants=True) == "block 9, variants by chunk"
    assert text("block", 1, changes_variants=True) == "block 9"


def test_an_order_that_is_none_is_refused() -> None:
    for value in ("epoch", 3, None):
        with pytest.raises(UsageError, match='shuffle is True, False, "full", "block" or "local"'):
            make_order(value, 1, 1, changes_variants=False)


@settings(max_examples=60)
@given(samples=st.integers(0, 90), parts=st.integers(1, 5), each=st.integers(1, 6), seed=st.integers(0, 3))
def test_the_local_order_gives_each_part_samples_of_its_own(samples: int, parts: int, each: int, seed: int) -> None:
    of = local_parts(samples, seed, parts=parts)
    orders = [local_order(samples, seed, epoch, parts=parts, each=each) for epoch in range(2)]
    for order in orders:
        assert sorted(order.tolist()) == [*range(samples)]
        for first, stop in global_batches(0, samples, parts * each, 1, drop_last=False):
            own = [of[order[rank_slice(first, stop, part, parts)]] for part in range(parts)]
            assert all((found == part).all() for part, found in enumerate(own))
            assert stop - first < parts * each or {len(found) for found in own} == {each}
    assert samples < 30 or orders[0].tolist() != orders[1].tolist()
    assert samples < 30 or parts == 1 or of.tolist() != local_parts(samples, seed + 1, parts=parts).tolist()


def local(dataset: CachedDataset, batch: int, **more: Any) -> CachedLoader:
    return CachedLoader(dataset, batch, shuffle="local", seed=5, drop_last=True, **more)


@pytest.mark.slow
def test_ranks_and_cores_see_the_same_global_batches_in_the_local_order(cache: Path) -> None:
    dataset = CachedDataset(cache)
    whole = [labels.tolist() for _, labels in local(dataset, 24, cores=4)]
    ranks = [[labels.tolist() for _, labels in local(dataset, 12, cores=2, rank=r, world_size=2)] for r in range(2)]
    assert [one + other for one, other in zip(*ranks, strict=True)] == whole
    owners = [local(dataset, 12, cores=2, rank=rank, world_size=2).record_owners(2) for rank in range(2)]
    assert all(sorted(np.bincount(each + 1).tolist()) == [37, 38, 75] for each in owners)
    assert ((owners[0] < 0) == (owners[1] >= 0)).all()
    saved = local(dataset, 24, cores=4)
    next(iter(saved))
    other = local(dataset, 6, rank=3, world_size=4)
    other.load_state_dict(saved.state_dict())
    assert [labels.tolist() for _, labels in other] == [labels[18:] for labels in whole[1:]]
    with pytest.raises(UsageError, match="another order"):
        local(dataset, 24, cores=2).load_state_dict(saved.state_dict())


@pytest.mark.slow
def test_a_local_order_that_cannot_be_is_refused(cache: Path) -> None:
    dataset = CachedDataset(cache)
    with pytest.raises(UsageError, match="does not divide evenly over 5 cores"):
        local(dataset, 24, cores=5)
    with pytest.raises(UsageError, match="select each once"):
        local(dataset.select([1, 2, 2, 3]), 2)
    with pytest.raises(UsageError, match="leave cores out for other orders"):
        CachedLoader(dataset, 24, shuffle=True, cores=2)
    with pytest.raises(UsageError, match="balance decides the order itself"):
        local(dataset, 24, balance=True)
    with pytest.raises(UsageError, match="cores is at least 1"):
        local(dataset, 24, cores=0)
