"""What `tpucache.jax.feed` gives, on four simulated devices; `test_feed.py` runs this in a process of its own."""

from __future__ import annotations

import itertools
import threading
import time
import types
import zlib

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from PIL import Image
from thorough import thorough

import tpucache.jax
from tpucache import CachedDataset, CachedLoader, DamageError, MixedLoader, Recipe, UsageError, build_cache
from tpucache.jax import AugmentSettings, feed, process_slice
from tpucache.ondevice import Augment, Normalise, decoder, draw
from tpucache.ondevice.arrays import ArrayLibrary
from tpucache.ondevice.decode import Resize, packed_or_pixels
from tpucache.store.fields import Field

ALL = AugmentSettings(
    flip=True, vertical_flip=True, shift=3, brightness=0.3, contrast=0.3, saturation=0.3, erase=0.4,
    crop=True, zoom=0.3, tilt=20, hue=0.2, blur=1.5, grey=0.2,
)  # fmt: skip
WORKERS = ("tpucache-feed", "tpucache-read", "tpucache-hint")


def make_cache(codec, tmp_path_factory):
    """Build a cache of 48 smooth images of 20x28."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(3)
    for number in range(48):
        (folder / str(number % 3)).mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (5, 7, 3), np.uint8)
        Image.fromarray(pixels).resize((28, 20)).save(folder / str(number % 3) / f"{number}.png")
    directory = tmp_path_factory.mktemp("caches") / "cache"
    build_cache(folder, directory, Recipe(size=(20, 28), codec=codec), jobs=1)
    return directory


@pytest.fixture(scope="module", params=["raw", *thorough("yuv420"), "dct-lz4"])
def each_cache(request, tmp_path_factory):
    """The images raw and as what a device finishes; the two dct codecs unpack to the same."""
    return make_cache(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return make_cache("raw", tmp_path_factory)


def test_the_public_names_are_there_and_documented():
    names = ["AugmentSettings", "Feed", "feed", "process_slice"]
    assert sorted(dir(tpucache.jax)) == sorted(tpucache.jax.__all__) == names
    assert all(getattr(tpucache.jax, name).__doc__ for name in tpucache.jax.__all__)


def normalised(dataset, images):
    statistics = dataset.manifest.statistics
    return Normalise(statistics.mean, statistics.std, torch.device("cpu"))(images.permute(0, 2, 3, 1))


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(WORKERS)]


@pytest.mark.parametrize("finish", ["host", "device"])
def test_images_and_labels_are_those_of_the_loader(each_cache, finish):
    dataset = CachedDataset(each_cache)
    batches = feed(CachedLoader(dataset, 16, shuffle=True, seed=3, finish=finish))
    assert len(batches) == 3
    for (images, labels), (expected, expected_labels) in zip(
        batches, CachedLoader(dataset, 16, shuffle=True, seed=3), strict=True
    ):
        assert images.dtype == np.uint8
        assert images.shape == (16, 20, 28, 3)
        assert len(images.sharding.device_set) == len(labels.sharding.device_set) == 4
        difference = np.abs(np.asarray(images).astype(int) - expected.permute(0, 2, 3, 1).numpy())
        assert difference.max() <= (0 if finish == "host" or dataset.record_fields[0].codec == "raw" else 1)
        assert labels.dtype == np.int32
        assert np.array_equal(labels, expected_labels)


@pytest.mark.parametrize(
    "chosen",
    [
        {**vars(ALL), "mixup": 0.4, "views": 2},
        {"trivial_augment": True},
        *thorough(vars(ALL), {**vars(ALL), "cutmix": 1.0}, {"rand_augment": 2, "views": 2}),
    ],
)
def test_augmented_images_and_mixed_labels_are_those_of_torch(cache, chosen):
    settings, dataset = AugmentSettings(**chosen), CachedDataset(cache)
    statistics = dataset.manifest.statistics
    augment = Augment(settings, statistics.mean, statistics.std, 20, 28, torch.device("cpu"))
    batches, host = feed(CachedLoader(dataset, 16), augment=settings, seed=5), CachedLoader(dataset, 16)
    loader = CachedLoader(dataset, 16, seed=5, augment=settings)
    for epoch in range(2):
        for number, ((images, labels), (expected, classes), own) in enumerate(zip(batches, host, loader, strict=True)):
            draws = torch.from_numpy(draw(settings, 5, 3 * epoch + number, 16, (20, 28)))
            mixes = settings.mixup or settings.cutmix
            targets = augment.views(torch.nn.functional.one_hot(classes, 3).float() if mixes else classes)
            pixels = augment.fields({"image": expected.permute(0, 2, 3, 1)}, draws)["image"]
            pixels, targets = augment.mix(pixels, targets, draws)
            found = np.array(images).transpose(0, 3, 1, 2)
            # Operations cut fractions off: of a few pixels on the other side of a whole number.
            of_levels = settings.trivial_augment or settings.rand_augment
            assert (~np.isclose(found, pixels, atol=2e-4, rtol=1e-4)).mean() <= (2e-3 if of_levels else 0)
            assert np.allclose(labels, targets, atol=1e-6)
            assert torch.equal(own[0], pixels)
            assert torch.equal(own[1], targets)


def loader_of(samples, folder, batch_size):
    build_cache(samples, folder / "cache", Recipe(size=8, mode="keep"), jobs=1)
    return CachedLoader(CachedDataset(folder / "cache"), batch_size)


@pytest.fixture
def deep(tmp_path):
    """Grey images of 16 bits."""
    images = np.random.default_rng(0).integers(0, 65536, (8, 8, 8, 1), np.uint16)
    return loader_of([(image, 0) for image in images], tmp_path, 8)


@pytest.fixture
def boxed(tmp_path):
    """Black images with a box each."""
    box = np.array([[1, 2, 5, 6, 0]], np.float32)
    return loader_of([{"image": np.zeros((8, 8, 3), np.uint8), "boxes": box, "label": 0}] * 8, tmp_path / "boxed", 4)


def test_numbers_of_16_bits_keep_their_white(deep):
    assert deep.dataset.manifest.fields[0].dtype == "<u2"
    images, _ = next(feed(deep, augment=AugmentSettings(brightness=0.1)))
    statistics = deep.dataset.manifest.statistics
    numbers = np.asarray(images) * np.array(statistics.std) + np.array(statistics.mean)
    assert 20_000 < numbers.mean() < 45_000


def test_normalised_images_are_those_of_torch_also_as_bfloat16(cache):
    dataset, settings = CachedDataset(cache), AugmentSettings(flip=True, brightness=0.2)
    for given in ({"normalise": True}, {"augment": settings}):
        own, long = CachedLoader(dataset, 16, **given), feed(CachedLoader(dataset, 16), **given)
        short = feed(CachedLoader(dataset, 16), dtype="bfloat16", **given)
        for (torchs, _), (expected, _), (images, _) in zip(own, long, short, strict=True):
            assert (expected.dtype, images.dtype) == (np.float32, jax.numpy.bfloat16)
            assert np.allclose(expected, torchs.permute(0, 2, 3, 1), atol=1e-5, rtol=1e-5)
            # Rounded to 8 bits, the last of which a fused multiply and add may change.
            assert np.allclose(images.astype("float32"), expected, rtol=1 / 128, atol=1e-5)


class FakeDevice:
    """A device of a process."""

    def __init__(self, host):
        self.process_index = host


@pytest.mark.parametrize(
    ("hosts", "slices"),
    [
        ([[0], [0], [1], [1]], [(0, 2), (1, 2)]),
        ([[1], [1], [0], [0]], [(1, 2), (0, 2)]),
        ([[0, 1]] * 4, [(0, 1), (0, 1)]),
        ([[0, 1], [0, 1], [2, 3], [2, 3]], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ([[0], [1], [0], [1]], "equal slices of consecutive samples"),
        ([[0], [0, 1], [1], [1]], "equal slices of consecutive samples"),
        ([[0], [0], [0], [1]], "equal slices of consecutive samples"),
        ([[1]] * 4, "has no device of process 0"),
    ],
)
def test_processes_along_the_batch_have_slices_and_others_the_same(monkeypatch, hosts, slices):
    """`hosts` are the processes of each of four places along the axis of the batch."""
    places = {FakeDevice(host): (slice(at, at + 1),) for at, place in enumerate(hosts) for host in place}
    fake = types.SimpleNamespace(device_set={*range(4)}, devices_indices_map=lambda _: places)
    for own, expected in enumerate(slices if isinstance(slices, list) else [None]):
        monkeypatch.setattr(jax, "process_index", lambda own=own: own)
        if expected is None:
            with pytest.raises(UsageError, match=slices):
                process_slice(fake)
        else:
            assert tuple(process_slice(fake).values()) == expected


def names_of(batches):
    """A checksum of each sample of each batch, for batches of JAX."""
    return [[zlib.crc32(image.tobytes()) for image in np.asarray(images)] for images, *_ in batches]


def mixture(cache):
    dataset = CachedDataset(cache)
    loaders = [CachedLoader(part, 8, shuffle=True) for part in (dataset[:32], dataset[32:])]
    return MixedLoader(loaders, shares=[3, 1])


def shuffled(cache, **options):
    return CachedLoader(CachedDataset(cache), 8, shuffle=True, seed=4, **options)


@pytest.mark.parametrize("make", [shuffled, mixture])
@pytest.mark.parametrize("augment", [None, AugmentSettings(flip=True, shift=2, mixup=0.3)], ids=["plain", "augmented"])
@pytest.mark.parametrize("taken", [*thorough(0), 1, *thorough(2, 5), 6, *thorough(8)])
def test_a_state_counts_the_batches_handed_out_and_not_those_read_ahead(cache, make, augment, taken):
    whole = feed(make(cache), augment=augment)
    expected = [names for _ in range(3) for names in names_of(whole)]
    loader = make(cache)
    batches = feed(loader, augment=augment, depth=3)
    found = names_of(itertools.islice(batches, min(taken, 6)))
    if taken > 6:
        found += names_of(itertools.islice(batches, taken - 6))
    state = batches.state_dict()
    assert state == loader.state_dict()
    assert (state["epoch"], state["position"]) == (taken // 6, taken % 6 * 8)
    rest = feed(make(cache), augment=augment)
    rest.load_state_dict(state)
    found += [names for _ in range(2) for names in names_of(rest)]
    assert found == expected[: len(found)]
    assert len(found) == (taken // 6 + 2) * 6
    if augment is None and taken == 1:
        assert expected[:6] == names_of((images.permute(0, 2, 3, 1), labels) for images, labels in make(cache))


@pytest.mark.parametrize(("reiterate", "epoch"), [("same", 0), ("next", 1)])
def test_an_epoch_that_is_left_early_is_followed_as_asked_however_much_was_read(cache, reiterate, epoch):
    settings, other = AugmentSettings(shift=2), shuffled(cache)
    other.set_epoch(epoch)
    expected = names_of(feed(other, augment=settings))
    batches = feed(shuffled(cache, reiterate=reiterate), augment=settings, depth=6)
    for _ in itertools.islice(batches, 2):
        time.sleep(0.1)  # by now the whole epoch is read
    assert names_of(batches) == expected


def test_a_state_is_right_after_set_epoch_and_ends_what_next_continues(cache):
    loader = shuffled(cache)
    batches = feed(loader)
    next(batches)
    loader.set_epoch(4)
    assert (batches.state_dict()["epoch"], batches.state_dict()["position"]) == (4, 0)
    with pytest.raises(UsageError, match="no single position"):
        next(batches), batches.state_dict()
    batches.load_state_dict({**shuffled(cache).state_dict(), "epoch": 2, "position": 16})
    assert not threads()
    assert names_of([next(batches)]) == names_of(feed(continued(cache, 2, 16)))[:1]
    assert batches.state_dict()["position"] == 24


def continued(cache, epoch, position):
    loader = shuffled(cache)
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "position": position})
    return loader


@pytest.mark.parametrize("finish", ["host", "device"])
def test_padded_batches_have_one_shape_and_say_which_rows_are_samples(each_cache, finish):
    dataset = CachedDataset(each_cache)[:42]
    batches = list(feed(CachedLoader(dataset, 20, finish=finish), normalise=True, pad_last=True))
    assert [int(np.asarray(is_sample).sum()) for _, _, is_sample in batches] == [20, 20, 2]
    for number, (images, labels, is_sample) in enumerate(batches):
        assert images.shape == (20, 20, 28, 3)
        assert labels.shape == is_sample.shape == (20,)
        assert is_sample.dtype == bool
        assert len(is_sample.sharding.device_set) == len(images.sharding.device_set) == 4
        rows = slice(20 * number, 20 * number + 20)
        assert np.array_equal(np.asarray(labels)[np.asarray(is_sample)], dataset.labels[rows])
        expected = normalised(dataset, torch.stack([image for image, _ in dataset[rows]]))
        found = torch.from_numpy(np.array(images)[: len(expected)]).permute(0, 3, 1, 2)
        # What a device decodes is within one step of 255 of what the host does.
        torch.testing.assert_close(found, expected, atol=0.03, rtol=1e-5)


def test_padding_compiles_nothing_and_leaves_whole_batches_as_they_are(cache):
    dataset = CachedDataset(cache)
    assert all(np.asarray(is_sample).all() for *_, is_sample in feed(CachedLoader(dataset, 16), pad_last=True))
    traced = []
    count = jax.jit(lambda images, is_sample: (traced.append(1), images.sum() + is_sample.sum())[1])
    for images, _, is_sample in feed(CachedLoader(dataset[:42], 16), normalise=True, pad_last=True):
        count(images, is_sample)
    assert len(traced) == 1


def test_kept_batches_stay_as_they_were_while_buffers_are_used_again(cache):
    dataset = CachedDataset(cache)
    kept = []
    for _ in range(4):
        for images, _ in feed(CachedLoader(dataset, 8)):
            kept.append((images, np.array(images)))
    assert all(np.array_equal(images, copy) for images, copy in kept)


def test_arrays_made_of_a_batch_by_jax_itself_keep_its_buffer(cache):
    kept = []
    for images, _ in CachedLoader(CachedDataset(cache), 8, shuffle=True):
        pixels = images.permute(0, 2, 3, 1).numpy()
        kept.append((jax.numpy.asarray(pixels), pixels.copy()))  # on the CPU it may be the same memory
        del images, pixels
    list(CachedLoader(CachedDataset(cache), 8))
    assert all(np.array_equal(array, copy) for array, copy in kept)


def test_leaving_a_loop_early_leaves_no_thread_and_next_goes_on_with_the_epochs(cache):
    loader = CachedLoader(CachedDataset(cache), 4)  # more batches than are read ahead
    batches = feed(loader)
    for _ in batches:
        assert threads()
        break
    assert not threads()
    for _ in range(2):
        assert [len(next(batches)[0]) for _ in range(12)] == [4] * 12
        with pytest.raises(StopIteration):
            next(batches)
    next(batches)
    assert threads()
    batches.close()
    assert not threads()
    next(feed(loader))
    assert not threads()


class Watched(CachedDataset):
    """A dataset that counts its reads, of which one fails, and whose labels are moved."""

    reads, fails, moved = 0, 0, 0

    def read_into(self, *arguments):
        self.reads += 1
        if self.reads == self.fails:
            raise DamageError("a shard was cut short")
        return super().read_into(*arguments)

    def labels_of(self, indices):
        return super().labels_of(indices) + self.moved


def watched(cache, **changes):
    dataset = Watched(cache)
    for name, value in changes.items():
        setattr(dataset, name, value)
    return dataset


def test_no_more_than_the_asked_batches_are_read_ahead(cache):
    dataset = watched(cache)
    batches = feed(CachedLoader(dataset, 4, prefetch=0, threads=1), depth=1)
    next(batches)
    time.sleep(0.3)
    assert 0 < dataset.reads <= 1 + 1 + 2  # handed out, waiting, and in the hands of the thread and of the reader
    batches.close()


def test_an_error_in_reading_is_raised_where_its_batch_would_have_come(cache):
    batches = feed(CachedLoader(watched(cache, fails=3), 4, threads=1))
    assert next(batches)[0].shape[0] == next(batches)[0].shape[0] == 4
    with pytest.raises(DamageError, match="cut short"):
        next(batches)
    assert not threads()


def test_a_sharding_of_ones_own_is_used(cache):
    loader = CachedLoader(CachedDataset(cache), 8)
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    images, labels = next(feed(loader, NamedSharding(mesh, PartitionSpec("batch", None, None, None))))
    assert {shard.data.shape for shard in images.addressable_shards} == {(4, 20, 28, 3)}
    assert {shard.data.shape for shard in labels.addressable_shards} == {(4,)}
    images, _ = next(feed(loader, SingleDeviceSharding(jax.devices()[3])))
    assert images.devices() == {jax.devices()[3]}


def test_what_does_not_fit_is_refused(cache, deep, boxed):
    dataset = CachedDataset(cache)
    mesh, short = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b")), dataset[:42]
    eight, twenty = CachedLoader(dataset, 8), CachedLoader(short, 20)
    mixed, unlabelled = AugmentSettings(mixup=0.4), CachedLoader(watched(cache, moved=-1), 8)
    for loader, options, text in (
        ([], {}, "feed takes a CachedLoader, not list"),
        (eight, {"sharding": NamedSharding(mesh, PartitionSpec("a", "b"))}, "first axis"),
        (CachedLoader(dataset, 6), {}, "6 samples cannot be divided evenly over 4 devices"),
        (twenty, {}, "drop_last=True to train, or .*pad_last=True"),
        (CachedLoader(dataset, 4, rank=1, world_size=2), {}, "world_size"),
        (CachedLoader(short, 20, drop_last=True), {"pad_last": True}, "drop_last leaves them out"),
        (twenty, {"augment": mixed, "pad_last": True}, "would mix samples with the padding"),
        (eight, {"augment": AugmentSettings(rotate=True)}, "square"),
        (eight, {"dtype": "bfloat16"}, "add normalise=True for bfloat16"),
        (eight, {"dtype": "float16", "normalise": True}, "dtype is one of float32, bfloat16"),
        (eight, {"resident": "maybe"}, '"auto", "yes", "no"'),
        (deep, {"augment": AugmentSettings(rand_augment=1)}, "rand_augment needs images of bytes, not of uint16"),
        (boxed, {"augment": AugmentSettings(crop=True)}, "not boxes: leave flip"),
        (CachedLoader(watched(cache, moved=2**31), 8), {}, "'label' holds numbers beyond int32"),
        (unlabelled, {"augment": mixed, "resident": "no"}, "have no class"),
        (unlabelled, {"augment": mixed, "resident": "yes"}, "have no class"),
    ):
        with pytest.raises(UsageError, match=text):
            next(feed(loader, **options))
    assert len(feed(CachedLoader(short, 20, drop_last=True))) == 2


def test_views_are_padded_together(cache):
    batches = feed(CachedLoader(CachedDataset(cache), 20), augment=AugmentSettings(flip=True, views=2), pad_last=True)
    assert [len(part) for part in next(batches)] == [40, 40, 40]


def test_images_with_boxes_may_change_their_colours(boxed):
    assert next(feed(boxed, augment=AugmentSettings(hue=0.1)))["boxes"].shape[0] == 4


def test_the_same_work_is_compiled_once(cache):
    dataset = CachedDataset(cache)
    settings = AugmentSettings(flip=True)
    feeds = [feed(CachedLoader(dataset, 8), augment=settings) for _ in range(3)]
    next(feeds[0])
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    next(feeds[1])
    next(feeds[2])
    assert not [event for event in events if "compile" in event]
    jax.jit(lambda values: values * 3 + 1)(np.arange(5))
    assert [event for event in events if "compile" in event]  # or they would not be noticed


@pytest.mark.parametrize("codec", [*thorough("raw", "yuv420"), "dct-zstd"])
def test_other_sizes_are_those_of_torch(codec):
    field = Field("image", codec, "|u1", (40, 56, 3), *((90, "420") if codec.startswith("dct") else ()))
    shape = (4, 3, 40, 56) if codec == "raw" else (4, *field.packed.shape)
    batch = np.zeros(shape, np.uint8)
    if codec != "dct-zstd":
        batch = np.random.default_rng(4).integers(0, 256, shape, np.uint8)
    batch[:, :5] = 7
    holder = types.SimpleNamespace(manifest=types.SimpleNamespace(fields=[field]))
    library, whole = ArrayLibrary(jax.numpy, lambda constant: constant), packed_or_pixels(field, Resize(24, 32))
    found = jax.jit(lambda packed: whole.decode(library, packed, whole.constants))(batch)
    expected = decoder(holder, (24, 32))(torch.from_numpy(batch))
    assert np.abs(np.asarray(found).astype(int) - expected.numpy()).max() <= 1
