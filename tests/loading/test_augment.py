"""Random crops on the host: the device's boxes and bytes, Pillow's filter, and only the rows that are needed."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tpucache import CachedDataset, CachedLoader, DamageError, MixedLoader, Recipe, UsageError, build_cache
from tpucache.loading.finishing import why_not
from tpucache.loading.reading import crops
from tpucache.loading.reading.crops import Boxes, Form, Normal
from tpucache.native import address
from tpucache.ondevice import Augment, AugmentSettings, draw, modules
from tpucache.ondevice import draws as drawn
from tpucache.ondevice.augment import scale_and_shift
from tpucache.store.codecs import yuv420

COUNT, HEIGHT, WIDTH = 22, 16, 24
CROP = AugmentSettings(crop=True, flip=True)
CPU = torch.device("cpu")


def epochs(loader: CachedLoader) -> list[Any]:
    """Return the batches of two epochs."""
    return [batch for _ in range(2) for batch in loader]


def read_dtype(loader: CachedLoader) -> np.dtype[Any]:
    """Return the dtype of the images that a loader's threads read."""
    buffer = loader._buffers.take()
    return buffer.arrays[0].dtype


def boxes_of(draws: np.ndarray[Any, Any]) -> Boxes:
    first = drawn.CROPPED.start
    return Boxes(*(draws[:, at] for at in (*range(first, first + 4), drawn.ROWS_REVERSED, drawn.COLUMNS_REVERSED)))


def cropped(
    form: Form, records: np.ndarray[Any, Any], boxes: Boxes, size: tuple[int, int], *, by_loop: bool = True,
    normal: Normal | None = None,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Return the crops of records, uint8 (n, bytes), with bytes around them that must not change."""
    dtype = np.dtype(np.uint8 if normal is None else np.float32)
    count, length = len(records), size[0] * size[1] * form.channels * dtype.itemsize
    out = np.full((count, length + 32), 77, np.uint8)
    targets = address(out) + 16 + out.shape[1] * np.arange(count)
    sources = address(records) + records.shape[1] * np.arange(count)
    if by_loop:
        crops.crop(form, boxes, sources, targets, *size, normal)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(crops, "crop_loop", lambda: None)
            crops.crop(form, boxes, sources, targets, *size, normal)
    assert (out[:, :16] == 77).all()
    assert (out[:, -16:] == 77).all()
    return np.ascontiguousarray(out[:, 16:-16]).view(dtype).reshape(count, *size, form.channels)


def tightly(records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(records.reshape(len(records), -1))


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 24), width=st.integers(1, 24), channels=st.sampled_from([1, 2, 3, 4, 5]),
    is_planar=st.booleans(), out=st.tuples(st.integers(1, 20), st.integers(1, 20)), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_compiled_loop_and_numpy_make_the_same_bytes(
    height: int, width: int, channels: int, is_planar: bool, out: tuple[int, int], seed: int
) -> None:
    pytest.importorskip("llvmlite", reason="there is no compiled loop without it")
    form = Form(height, width, 3 if is_planar else channels, is_planar)
    length = yuv420.nbytes(height, width) if is_planar else height * width * channels
    records = np.random.default_rng(seed).integers(0, 256, (5, length), np.uint8)
    chosen = AugmentSettings(crop=True, flip=True, vertical_flip=True)
    boxes = boxes_of(draw(chosen, seed, 3, 5, (height, width)))
    by_loop = cropped(form, records, boxes, out)
    assert np.array_equal(by_loop, cropped(form, records, boxes, out, by_loop=False))
    normal = Normal(*scale_and_shift([120.7, 99, 3, 130.1, 7][: form.channels], [61.3, 0, 57.9, 1, 3][: form.channels]))
    floats = cropped(form, records, boxes, out, normal=normal)
    assert np.array_equal(floats, by_loop.astype(np.float32) * normal.scale + normal.shift)
    assert np.array_equal(floats, cropped(form, records, boxes, out, by_loop=False, normal=normal))
    # What is not needed may be anything: it is not read.
    needed = np.zeros(records.shape, np.bool_)
    for at, parts in enumerate(crops.needed_bytes(form, boxes).tolist()):
        for start, size in parts:
            needed[at, start : start + size] = True
    assert np.array_equal(cropped(form, np.where(needed, records, 255 - records), boxes, out), by_loop)


def test_what_is_reduced_is_filtered_as_by_pillow() -> None:
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, (6, 40, 50, 3), np.uint8)
    draws = draw(AugmentSettings(crop=True, zoom=0.5), 0, 0, 6, (40, 50))
    found = cropped(Form(40, 50, 3, False), tightly(images), boxes_of(draws), (12, 15))
    for image, made, box in zip(images, found, draws[:, drawn.CROPPED], strict=True):
        top, height, left, width = box.astype(int).tolist()
        part = Image.fromarray(image[top : top + height, left : left + width])
        by_pillow = np.asarray(part.resize((15, 12), Image.Resampling.BILINEAR), np.int64)
        assert np.abs(made - by_pillow).max() <= 1


def test_planes_are_cropped_to_what_is_cropped_of_their_pixels(cache_of: Callable[[str], Path]) -> None:
    images = np.stack([image.permute(1, 2, 0).numpy() for image, _ in CachedDataset(cache_of("raw"))])
    planes = np.stack([np.frombuffer(yuv420.pack(image), np.uint8) for image in images])
    pixels = np.stack([yuv420.unpack(record.tobytes(), HEIGHT, WIDTH) for record in planes])
    boxes = boxes_of(draw(CROP, 0, 0, COUNT, (HEIGHT, WIDTH)))
    for size in ((HEIGHT, WIDTH), (9, 11)):
        found = cropped(Form(HEIGHT, WIDTH, 3, True), planes, boxes, size).astype(int)
        expected = cropped(Form(HEIGHT, WIDTH, 3, False), tightly(pixels), boxes, size)
        assert np.abs(found - expected).max() <= 2


@pytest.mark.parametrize("codec", ["raw", "yuv420", "png", "dct-zstd"])
@pytest.mark.parametrize("in_memory", ["auto", False])
@pytest.mark.parametrize(
    ("chosen", "is_finished"),
    [
        (AugmentSettings(crop=True, flip=True, vertical_flip=True, brightness=0.2, erase=0.5), False),
        (CROP, True),
        (AugmentSettings(flip=True, vertical_flip=True), True),
        (AugmentSettings(), True),
    ],
    ids=["crop and more", "crop", "flip", "normalise"],
)
def test_a_loader_on_a_cpu_gives_what_the_device_makes(
    cache_of: Callable[[str], Path], codec: str, in_memory: Any, chosen: AugmentSettings, is_finished: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if codec == "dct-zstd":
        pytest.importorskip("zstandard")
    dataset = CachedDataset(cache_of(codec), in_memory=in_memory)
    if not in_memory:  # from files, of which parts are read
        monkeypatch.setattr(type(dataset._open_reader._maps), "addresses", lambda _, rows, __: np.zeros_like(rows))
    statistics = dataset.manifest.statistics
    augment = Augment(chosen, statistics.mean, statistics.std, HEIGHT, WIDTH, CPU)
    loader = CachedLoader(dataset, 5, shuffle=True, seed=3, augment=chosen)
    assert (read_dtype(loader) == np.float32) == is_finished  # the reading threads normalise
    plain = CachedLoader(CachedDataset(cache_of(codec)), 5, shuffle=True, seed=3)
    batches = zip(epochs(plain), epochs(loader), strict=True)
    for step, ((images, labels), (found, targets)) in enumerate(batches):
        draws = torch.from_numpy(draw(chosen, 3, step, len(images), (HEIGHT, WIDTH)))
        expected = augment.images(images.permute(0, 2, 3, 1), draws)
        assert torch.equal(targets, labels)
        # yuv420 is cropped before its planes become pixels, which are rounded twice otherwise.
        most = 3 / min(statistics.std) if codec == "yuv420" and chosen.crop else 0
        assert torch.equal(found, expected) if not most else (found - expected).abs().max() < most


def test_of_records_in_files_only_the_rows_of_crops_are_read(
    cache_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llvmlite", reason="numpy reads whole records")
    chosen = AugmentSettings(crop=True, zoom=0.1)
    dataset = CachedDataset(cache_of("raw"), in_memory=False)
    reader = dataset._open_reader
    monkeypatch.setattr(type(reader._maps), "addresses", lambda _, rows, __: np.zeros_like(rows))
    list(CachedLoader(dataset, COUNT, augment=chosen))  # the first record of a shard is compared with its checksum
    asked: list[int] = []
    read = crops.needed_bytes

    def note(form: Form, boxes: Boxes) -> Any:
        parts = read(form, boxes)
        asked.append(int(parts[..., 1].sum()))
        return parts

    monkeypatch.setattr("tpucache.loading.finishing.needed_bytes", note)
    monkeypatch.setattr(reader, "_scatter", lambda *_, **__: pytest.fail("a whole record was read"))
    list(CachedLoader(dataset, COUNT, seed=1, augment=chosen))
    assert sum(asked) < 0.8 * COUNT * HEIGHT * WIDTH * 3


def test_a_crop_is_a_function_of_seed_and_step_whatever_reads_it(cache_of: Callable[[str], Path]) -> None:
    def loader(threads: int = 2, rank: int = 0, world_size: int = 1, seed: int = 4) -> CachedLoader:
        return CachedLoader(
            CachedDataset(cache_of("raw")), 6 // world_size, shuffle=True, seed=seed, augment=CROP, size=12,
            threads=threads, rank=rank, world_size=world_size,
        )  # fmt: skip

    whole = [images for images, _ in epochs(loader())]
    again = [images for images, _ in epochs(loader(threads=1))]
    assert len(whole) == len(again) == 8
    assert all(map(torch.equal, whole, again))
    ranks = [[images for images, _ in epochs(loader(rank=rank, world_size=2))] for rank in range(2)]
    assert all(torch.equal(torch.cat(parts), one) for *parts, one in zip(*ranks, again, strict=True))
    first = loader()
    next(iter(first))
    resumed = pickle.loads(pickle.dumps(loader(seed=0)))
    resumed.load_state_dict(first.state_dict())
    assert all(map(torch.equal, [images for images, _ in epochs(resumed)], again[1:]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "there is no random crop: give augment="),
        ({"augment": AugmentSettings(flip=True)}, "there is no random crop"),
        ({"augment": AugmentSettings(crop=True, tilt=5)}, "the crop would come after tilt"),
        ({"augment": AugmentSettings(crop=True, views=2)}, "several views"),
        ({"augment": CROP, "device": "meta"}, "meta is another device"),
        *(({"augment": CROP, "size": size}, "size is") for size in ("8", 0, (8,), (8, 8, 3), 8.5)),
    ],
)
def test_a_size_that_is_none_or_without_a_crop_on_the_host_is_refused(
    cache_of: Callable[[str], Path], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        CachedLoader(CachedDataset(cache_of("raw")), 4, **{"size": 8, **options})


def test_images_of_many_channels_are_left_to_augment_which_says_so(tmp_path: Path) -> None:
    samples = [(np.full((8, 8, 6), number, np.uint8), 0) for number in range(3)]
    build_cache(samples, tmp_path / "cache", Recipe(size=8, mode="keep"), jobs=1)
    dataset = CachedDataset(tmp_path / "cache")
    assert "6 channels" in str(why_not(CROP, dataset))
    ((images, _),) = CachedLoader(dataset, 3, augment=CROP)
    assert images.shape == (3, 6, 8, 8)


def test_a_mixture_makes_crops_of_the_images_size_alone(cache_of: Callable[[str], Path]) -> None:
    dataset = CachedDataset(cache_of("raw"))
    loaders = [CachedLoader(dataset, 4, augment=CROP, size=8) for _ in range(2)]
    with pytest.raises(UsageError, match="leave size out"):
        MixedLoader(loaders, [1, 1])


def test_augment_on_a_cpu_names_the_hosts_way_once(
    cache_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    modules._say_slow.cache_clear()
    with caplog.at_level(logging.WARNING, "tpucache"):
        CachedLoader(CachedDataset(cache_of("raw")), 4, augment=CROP)
        assert not caplog.records
        for _ in range(2):
            Augment(CROP, [0] * 3, [1] * 3, HEIGHT, WIDTH, CPU)
    assert [record.getMessage() for record in caplog.records] == [
        "on a CPU, Augment makes random crops about ten times more slowly than "
        "CachedLoader(dataset, …, augment=AugmentSettings(crop=True)) while it reads"
    ]


def test_a_damaged_record_is_named_whatever_is_read_of_it(cache_of: Callable[[str], Path], tmp_path: Path) -> None:
    for path in cache_of("raw").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (shard,) = tmp_path.glob("*.lmdb")
    dataset = CachedDataset(tmp_path)
    os.truncate(shard, shard.stat().st_size - 4096)
    with pytest.raises(DamageError, match=shard.name):
        list(CachedLoader(dataset, 4, augment=CROP))
