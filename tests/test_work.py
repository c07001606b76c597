"""Counts the work of a start, a batch, a record and a step, and bounds it; each bound has its reason.

Times differ from machine to machine and from run to run; counts do not. A bound is what is counted today and about a
quarter more, which other releases of Python and of the libraries may take. To raise one, say in its comment what for.
"""

from __future__ import annotations

import math
import os
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from work import THREAD_READS, file_calls, loaded_modules, package_lines, reads_so_far

from scripts.bench.huge import write_huge
from tpucache import CachedDataset, CachedLoader, Recipe, build_cache, native
from tpucache.loading.order import EpochOrder, make_order, make_sampled_order
from tpucache.store import files
from tpucache.store.fields import Field
from tpucache.warmup.run import tasks

pytestmark = pytest.mark.slow

RAW = Field("image", "raw", "|u1", (32, 32, 3))
SAMPLES = 256


class Start(NamedTuple):
    """What a start may load: modules of the package, of Python's own library, and other packages."""

    before: str
    statement: str
    own: int
    stdlib: int
    others: set[str]


STARTS = {
    # Today 4: errors, version, and what imports the public names when they are used. Of the standard library 39 on
    # Python 3.12, for `typing` and `ast`, which other programs mostly have loaded.
    "the package": Start("", "import tpucache", 5, 48, set()),
    # Today 55 and 54: all of loading/ and what it reads of store/, but nothing that writes, and no importlib.metadata:
    # parts that other packages add are looked for when a name is none of ours. Where torch is, it is imported, too.
    "reading": Start(
        "import numpy; sys.modules['torch'] = None",
        "from tpucache import CachedDataset, CachedLoader",
        55,
        65,
        {"numpy"},
    ),
    # Today 15 and 31: what reads words, prints and handles signals, and no command.
    "--help": Start("import numpy", "from tpucache.cli import main; main(['--help'])", 18, 40, {"numpy"}),
    # Today 119 and 116: sources, what their labels mean, and planning as well. Pillow says which endings are images,
    # and lmdb is to write; but albumentations, joblib and torch take seconds, and are imported by the workers that need
    # them, if at all.
    "warmup, to the list": Start(
        "import numpy",
        "from tpucache.cli import main; main(['warmup', 'photos', 'cache'])",
        125,
        130,
        # __mp_main__ is this program, as multiprocessing names it
        {"numpy", "PIL", "lmdb", "cython_runtime", "_cython", "__mp_main__"},
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_start_loads_few_modules(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()  # an empty folder: there is nothing to do once it is listed
    monkeypatch.chdir(tmp_path)
    before, statement, own, stdlib, others = STARTS[name]
    loaded = loaded_modules(statement, before)
    print(loaded)  # pytest shows it with a failure
    assert loaded.pop("tpucache") <= own
    assert loaded.pop("stdlib", 0) <= stdlib
    assert {package.partition("_3_")[0] for package in loaded} <= others


def write_noise(folder: Path, images: int, side: int) -> Path:
    """Write images of noise, in two classes."""
    rng = np.random.default_rng(5)
    for number in range(images):
        path = folder / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def cache_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The function `cache_of(codec)`: a cache of 256 images of 32x32 in one shard."""
    folder = tmp_path_factory.mktemp("work")
    photos = write_noise(folder / "photos", SAMPLES, 32)

    def build(codec: str) -> Path:
        cache = folder / codec
        if not cache.exists():
            build_cache(photos, cache, Recipe(size=32, codec=codec, max_blocks=1), jobs=1)
        return cache

    return build


@pytest.fixture
def large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few hundred kilobytes are read by the compiled loops, as those of 8 MiB and more are."""
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(native, "_LARGE", 1)


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file system is mounted read-only, as far as can be seen: shards are mapped."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))


def warm_loader(cache: Path, batch: int, in_memory: Any = False, finish: Any = "host") -> CachedLoader:
    """Return a loader whose files are open, and whose records and buffers are in memory; one thread reads, none ahead.

    It has been through two epochs: what is kept, compiled or mapped once is no work of a batch.
    """
    dataset = CachedDataset(cache, in_memory=in_memory)
    loader = CachedLoader(dataset, batch, shuffle=True, threads=1, prefetch=0, finish=finish)
    for _ in range(2):
        read_all(loader)
    return loader


def read_all(loader: Any) -> None:
    for _ in loader:
        pass


def lines_of(loader: CachedLoader) -> int:
    """Return how many lines of the package an epoch takes."""
    with package_lines() as lines:
        read_all(loader)
    print(len(loader), Counter(Path(name).name for name in lines).most_common(6))  # pytest shows it with a failure
    return len(lines)


class Reading(NamedTuple):
    """A way of reading, and the lines of the package that a batch and each sample in it may take."""

    batch: int
    sample: float
    codec: str = "raw"
    in_memory: bool | str = False
    finish: str = "host"
    is_large: bool = True


# What every batch takes: its slice of the order, rows of the index, a buffer, labels, tensors, and a thread that does
# it. Meanwhile no other thread runs Python. One line more for each sample is worse: in a batch of 256 these are more
# than all others together.
READINGS = {
    # Today 159 and 0.4: compiled loops copy the records. The 0.4 are the 100 lines of an epoch, shared by 256 samples.
    "kept": Reading(200, 0.6, in_memory=True),
    # Today 184 and 0.4: the maps are looked at, too.
    "mapped": Reading(230, 0.6, in_memory="auto"),
    # Today 224 and 2.6: Python looks up the file of each record, and its row of the buffer.
    "files": Reading(280, 3.3),
    # Today 155 and 2.4, 217 and 3.6: small batches are copied and read record by record, without the compiled loops.
    "files, small batches": Reading(270, 4.5, is_large=False),
    # Today 261 and 1.6: a compiled loop reads and unpacks the records.
    "dct-lz4": Reading(325, 2.0, "dct-lz4", finish="device"),
    # Today 350 and 0.5: records are unpacked out of maps, where they are.
    "dct-lz4, mapped": Reading(435, 0.7, "dct-lz4", finish="device"),
    # Today 330 and 19, 31 or 73: a library decodes record by record. Before it does, the headers of a JPEG are read
    # here, because libraries differ in what they refuse.
    "jpeg": Reading(330, 91, "jpeg"),
}


@pytest.mark.parametrize("name", READINGS)
def test_a_batch_and_each_sample_in_it_take_few_lines(
    name: str, cache_of: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    way = READINGS[name]
    if way.is_large:
        request.getfixturevalue("large_batches")
    if not name.endswith("mapped"):
        request.getfixturevalue("no_leases")
    else:
        if not native.can_populate():
            pytest.skip("this system has no MADV_POPULATE_READ: nothing is mapped")
        request.getfixturevalue("read_only")
    loaders = [warm_loader(cache_of(way.codec), batch, way.in_memory, way.finish) for batch in (16, 64)]
    few, many = (lines_of(loader) / len(loader) for loader in loaders)
    sample = (many - few) / (64 - 16)
    batch = few - 16 * sample
    print(name, batch, sample)
    assert batch <= way.batch
    assert sample <= way.sample


@pytest.mark.parametrize("codec", ["raw", "jpeg"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_batches_use_the_same_memory_again(codec: str, in_memory: bool, cache_of: Callable[[str], Path]) -> None:
    loader = warm_loader(cache_of(codec), 64, in_memory, "device")
    tracemalloc.start()
    try:
        batches = iter(loader)
        next(batches)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in batches:
            pass
        most = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # A batch is 197 kB, and a new one costs as much in page faults as the copy into it. Today 16 kB are taken, and 52
    # to decode JPEG record by record, for row numbers, addresses and views; they grow with samples, not with pixels.
    print(most)
    assert most < 80_000


@pytest.mark.usefixtures("no_leases")
@pytest.mark.skipif(not THREAD_READS.exists(), reason=f"this system has no {THREAD_READS}")
@pytest.mark.parametrize("codec", ["raw", "jpeg", "dct-zstd"])
@pytest.mark.parametrize("is_large", [True, False])
def test_a_record_is_one_read_and_in_memory_none(
    codec: str, is_large: bool, cache_of: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    if is_large:
        request.getfixturevalue("large_batches")
    for in_memory in (False, True):
        dataset = CachedDataset(cache_of(codec), in_memory=in_memory).packed()
        records = range(len(dataset))
        dataset.__getitems__(records)  # opens the files, and keeps what is kept
        begin, end = reads_so_far(), reads_so_far()
        own = end - begin
        dataset.__getitems__(records)
        reads = reads_so_far() - end - own
        # Each record is read at once, by its place in the index: a header or a page of LMDB's tree would be a second.
        assert reads == (0 if in_memory else len(records))


def opened(folder: Path, samples: int, shards: int = 1) -> tuple[CachedDataset, int]:
    """Write a cache, all but its shards; return it opened, and the lines of the package that opening took."""
    folder.mkdir()
    each = -(-samples // shards)
    write_huge(folder, samples, RAW, (each + 2) * 4096)
    with package_lines() as lines:
        dataset = CachedDataset(folder)
    assert len(dataset.manifest.shards) == shards
    return dataset, len(lines)


def test_opening_takes_as_many_lines_for_ten_thousand_samples_as_for_a_hundred(tmp_path: Path) -> None:
    opened(tmp_path / "first", 10)  # what Python imports when it is first used
    few, many, shards = (
        opened(tmp_path / name, *size)[1]
        for name, size in {"few": (100,), "many": (10_000,), "shards": (10_000, 100)}.items()
    )
    print(few, many, shards)
    assert many <= few + 10  # today the same: tables are arrays, and a loop over 13 million rows would take seconds
    assert (shards - many) / 99 <= 112  # today 90 a shard: what the manifest says of it is checked word by word


def test_an_epoch_s_order_takes_as_many_lines_however_many_samples_it_has(tmp_path: Path) -> None:
    counts: dict[str, list[int]] = {}
    for samples in (1000, 100_000):
        dataset = opened(tmp_path / str(samples), samples)[0]
        orders: dict[str, EpochOrder | None] = {
            "full": make_order(True, 0, 0, changes_variants=False),
            "block": make_order("block", 4096, 100, changes_variants=True),
            "balance": make_sampled_order(dataset, balance=True),
            "weights": make_sampled_order(dataset, weights=np.ones(samples)),
        }
        for name, order in orders.items():
            assert order is not None
            with package_lines() as lines:
                order.positions(samples, 0, 0)
            counts.setdefault(name, []).append(len(lines))
    print(counts)
    assert all(most <= 15 for _, most in (counts[name] for name in ("full", "balance", "weights")))  # today 5 to 10
    assert counts["block"][1] <= 80  # today 62: 2 for each of 24 windows of 4,096 samples


def test_warmup_opens_an_image_once_and_waits_for_the_disk_once_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    # A worker looks now and then whether its run is still there: how often, a slow machine decides.
    monkeypatch.setattr(tasks, "_CHECK_SECONDS", math.inf)
    monkeypatch.setattr(files, "LATE_SECONDS", math.inf)  # and so whether its storage seems to answer late

    def build(name: str, images: int) -> Counter[str]:
        photos = write_noise(tmp_path / f"photos {name}", images, 24)
        synced.clear()
        with file_calls() as calls, package_lines() as lines:
            build_cache(photos, tmp_path / name, Recipe(size=16, variants=1), jobs=1)
        return Counter(calls) + Counter(fsync=len(synced), lines=len(lines))

    # What is imported for the first build, or compiled, is no work of the others.
    build_cache(write_noise(tmp_path / "photos", 8, 24), tmp_path / "first", Recipe(size=16, variants=1), jobs=1)
    half, whole = build("half", 128), build("whole", 256)
    # Both are 64 chunks of work; one makes two shards of each of the two variants, the other four.
    image = {name: (whole[name] - half[name]) / 128 for name in whole}
    chunk = {name: (2 * half[name] - whole[name]) / 64 for name in whole}
    shard = (whole["fsync"] - half["fsync"]) / 4
    print(image, chunk, shard)  # pytest shows it with a failure
    # Today 1.3: an image is read once, for its checks and for all of its variants; the rest is of its share of a shard.
    assert image["open"] <= 1.6
    # Today 2.3: when it is listed, and when it is opened.
    assert image["stat"] <= 2.9
    # Today 736 on Python 3.11, less on 3.13: two records, little compared with decoding, resizing and augmenting.
    assert image["lines"] <= 742
    # Today 14 and 3.1: a chunk is up to 16 MB of records, and before its work what an earlier run left is looked for.
    assert chunk["open"] <= 18
    assert chunk["rename"] <= 4
    # Today 4: the shard and its folder, the receipt and its folder. Chunks are not waited for: they can be made again.
    assert shard <= 5
    # Today 10, of the plan, the tables and the manifest.
    assert 2 * half["fsync"] - whole["fsync"] <= 12


#: What makes the host wait until an accelerator has computed a value.
SYNCS = ("item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__")
EVERYTHING = {
    "accumulate": 2,
    "clip": 1.0,
    "ema": 0.9,
    "smoothing": 0.1,
    "precision": "bf16",
}


@pytest.mark.parametrize("wanted", [{}, EVERYTHING], ids=["plain", "everything"])
def test_a_step_reads_an_earlier_loss_from_the_device_and_nothing_else(
    cache: Path, tmp_path: Path, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from tpucache.ondevice.settings import AugmentSettings
    from tpucache.training.device import CpuDevice
    from tpucache.training.loop import train
    from tpucache.training.options import RunOptions
    from tpucache.training.settings import TrainSettings

    counts: Counter[str] = Counter()

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **named)

        return call

    for name in SYNCS:
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name), name))

    class CountingDevice(CpuDevice):
        put = counted(CpuDevice.put, "put")

    def run(steps: int) -> Counter[str]:
        counts.clear()
        augment = AugmentSettings(flip=True, shift=2, crop=True, mixup=0.4) if wanted else AugmentSettings()
        settings = TrainSettings(model="cnn", epochs=1, batch_size=144 // steps, augment=augment, **wanted)
        samples = CachedDataset(cache).select(range(144))
        train(tmp_path / str(steps), settings, samples, None, CountingDevice(), RunOptions(replay=False, curves=False))
        return Counter(counts)

    few, many = run(8), run(24)
    step = {name: (many[name] - few[name]) / 16 for name in many if many[name] > few[name]}
    # Images, labels and random numbers of each part of a batch go up. What comes back is the loss of a step that was
    # taken at least 16 steps before: nothing waits for it. Anything else would stop the host until the step has run.
    assert step == {"put": 3 * wanted.get("accumulate", 1), "cpu": 1, "__float__": 1}
