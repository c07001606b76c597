"""Records of several fields and of every codec, read into the same kind of batch."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from thorough import thorough
from written import write_cache

from tpucache import CachedDataset, CachedLoader, DamageError, FormatError, Recipe, UsageError, build_cache
from tpucache.store import cache
from tpucache.store.codecs import Codec, encode
from tpucache.store.fields import Field, RecordLayout
from tpucache.store.format import INDEX_NAME, shard_name

MIXED = {
    "raw": (
        Field("image", "raw", "|u1", (8, 9, 3)),
        Field("mask", "raw", "|u1", (8, 9)),
        Field("vector", "raw", "<f4", (5,)),
        Field("tokens", "raw", "<i8", (7,)),
    ),
    "encoded": (
        Field("image", "png", "|u1", (8, 9, 3)),
        Field("mask", "zstd", "|u1", (8, 9)),
        Field("vector", "raw", "<f4", (5,)),
        Field("tokens", "zstd", "<i8", (7,)),
    ),
}
SAMPLES = 23


def make_cache(directory, fields):
    """Write a cache of SAMPLES random samples of these fields; return their arrays by field."""
    rng = np.random.default_rng(3)
    arrays = {field.name: (rng.random((SAMPLES, *field.shape)) * 200).astype(field.dtype) for field in fields}
    layout = RecordLayout(fields)
    records = [layout.join([encode(field, arrays[field.name][at]) for field in fields]) for at in range(SAMPLES)]
    columns = {"label": np.arange(SAMPLES) % 4}
    write_cache(directory, fields, [records], block=SAMPLES, columns=columns, classes=("a", "b", "c", "d"))
    return arrays


@pytest.mark.parametrize("kind", MIXED)
def test_every_field_of_a_record_lands_in_its_own_tensor(tmp_path, kind):
    arrays = make_cache(tmp_path, MIXED[kind])
    dataset = CachedDataset(tmp_path)
    loader = CachedLoader(dataset, 10, shuffle=True)
    order = [int(index) for index in torch.randperm(SAMPLES)]
    seen = 0
    for batch in loader:
        assert list(batch) == ["image", "mask", "vector", "tokens", "label"]
        assert batch["image"].shape[1:] == (3, 8, 9)
        for row, tokens in enumerate(batch["tokens"]):
            (at,) = np.flatnonzero((arrays["tokens"] == tokens.numpy()).all(1))
            assert np.array_equal(batch["image"][row].permute(1, 2, 0), arrays["image"][at])
            assert np.array_equal(batch["mask"][row], arrays["mask"][at])
            assert np.array_equal(batch["vector"][row], arrays["vector"][at])
            assert batch["label"][row] == at % 4
            seen += 1
    assert seen == SAMPLES
    item = dataset[order[0]]
    assert np.array_equal(item["mask"], arrays["mask"][order[0]])
    assert item["label"] == order[0] % 4


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("name", ["image", "mask", "vector", "tokens"])
def test_one_field_of_all_samples_comes_in_their_order_in_batches(tmp_path, monkeypatch, kind, name):
    expected = make_cache(tmp_path, MIXED[kind])[name]
    dataset = CachedDataset(tmp_path, indices=[5, 1, *range(22, 6, -1)])
    monkeypatch.setattr(cache, "_BATCH_BYTES", 4 * expected[0].nbytes)
    batches = list(dataset.field_batches(name))
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 2]
    assert np.array_equal(np.concatenate(batches), expected[[5, 1, *range(22, 6, -1)]])


def test_a_field_without_bytes_comes_in_batches_too(tmp_path):
    make_cache(tmp_path, (Field("image", "raw", "|u1", (2, 2, 1)), Field("nothing", "raw", "<f4", (0, 3))))
    batches = list(CachedDataset(tmp_path).field_batches("nothing"))
    assert sum(len(batch) for batch in batches) == SAMPLES
    assert {batch.shape[1:] for batch in batches} == {(0, 3)}


def test_a_field_whose_length_varies_has_no_tensor_also_beside_one_that_has(tmp_path):
    text = Field("text", "bytes", "|u1", ())
    make_cache(tmp_path, (Field("image", "raw", "|u1", (2, 2, 1)), text))
    with pytest.raises(FormatError, match="whose length varies: tensors cannot hold it"):
        CachedDataset(tmp_path)[0]


@pytest.mark.parametrize("kind", MIXED)
def test_for_one_field_the_others_are_neither_read_nor_decoded(tmp_path, monkeypatch, kind):
    arrays = make_cache(tmp_path, MIXED[kind])
    read, decoded, preadv = [], [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read.append(sum(map(len, buffers))) or preadv(
        file, buffers, at))  # fmt: skip
    decode = Codec.decode_into
    monkeypatch.setattr(Codec, "decode_into", lambda codec, field, *rest: decoded.append(field.name) or decode(
        codec, field, *rest))  # fmt: skip
    (masks,) = CachedDataset(tmp_path).field_batches("mask")
    assert np.array_equal(masks, arrays["mask"])
    assert sum(read) <= SAMPLES * (72 + 20 + 3 * 4 + 20)  # a mask, its index row, the lengths, what zstd adds to noise
    assert set(decoded) <= {"mask"}


@pytest.mark.parametrize("kind", MIXED)
def test_one_field_of_records_that_are_not_as_their_layout_says_is_damage(tmp_path, kind):
    make_cache(tmp_path, MIXED[kind])
    with pytest.raises(UsageError, match=r"no field 'depth'.*image, mask"):
        next(CachedDataset(tmp_path).field_batches("depth"))
    index = np.load(tmp_path / INDEX_NAME)
    index["length"][3] -= 1
    np.save(tmp_path / INDEX_NAME, index)
    with pytest.raises(DamageError):
        list(CachedDataset(tmp_path).field_batches("mask"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jpeg", *thorough("png", "zstd")])
def test_every_codec_gives_the_same_images_in_batches_and_one_by_one(photos, tmp_path, name):
    build_cache(photos, tmp_path / "raw", Recipe(size=16), jobs=1)
    build_cache(photos, tmp_path / name, Recipe(size=16, codec=name), jobs=1)
    exact, coded = CachedDataset(tmp_path / "raw"), CachedDataset(tmp_path / name)
    at = 0
    for images, labels in CachedLoader(coded, 40, threads=2):
        for image, label in zip(images, labels, strict=True):
            assert torch.equal(image, coded[at][0])
            assert label == exact[at][1]
            error = (image.float() - exact[at][0].float()).abs().mean()
            assert error < (25 if name == "jpeg" else 1e-9)
            at += 1
    assert at == 150


@pytest.mark.slow
def test_lengths_that_no_memory_holds_are_damage(photos, tmp_path):
    build_cache(photos, tmp_path / "cache", Recipe(size=8, codec="jpeg"), jobs=1)
    path = tmp_path / "cache" / "index.npy"
    index = np.load(path)
    index["length"] = 0xFFFFFFFF
    np.save(path, index)
    with pytest.raises(DamageError, match=r"but the cache's fields take at most.*verify"):
        CachedDataset(tmp_path / "cache").__getitems__(list(range(150)) * 40)


def test_a_record_that_does_not_decode_is_an_error_of_ours(tmp_path):
    make_cache(tmp_path, MIXED["encoded"])
    shard = tmp_path / shard_name(0, 0)
    data = bytearray(shard.read_bytes())
    at = data.index(b"\x89PNG")
    data[at : at + 40] = bytes(40)
    shard.write_bytes(data)
    with pytest.raises(DamageError, match="image"):
        list(CachedLoader(CachedDataset(tmp_path), 5))
