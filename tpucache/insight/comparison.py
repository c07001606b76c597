"""Compares two caches: finds pictures that are in both, and compares brightness, contrast, sizes and classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.insight.hashing import details, hashes, opened
from tpucache.insight.matching import THRESHOLD, Pairs, Search, pairs
from tpucache.native import Array
from tpucache.store import facts
from tpucache.store.cache import Cache
from tpucache.store.hashes import Hashes, kept_hashes
from tpucache.store.samples import HEIGHT, WIDTH

if TYPE_CHECKING:
    from tpucache.insight.hashing import Samples

Positions = npt.NDArray[np.int64]

#: Settings of a recipe that do not change the bytes of a clean record.
_NOT_IN_RECORDS: Final = {"variants", "augment", "augmentation", "seed", "shard_mb"}

#: Pictures whose details have at least this correlation count as copies. Copies of 63 photographs (encoded again,
#: halved, brighter or mirrored) have at least 0.96; 238 pairs of different photographs that look alike at most 0.64.
_SAME_DETAILS: Final = 0.9
_CONFIRMED_AT_ONCE: Final = 512  # pairs of pictures

#: Each of these numbers of comparisons, of hashes and of details, takes a few seconds.
_QUICK: Final = 1_000_000_000
_QUICK_PAIRS: Final = 2048


@dataclass(frozen=True)
class Exact:
    """Samples of two caches whose clean records are equal byte for byte.

    `first` and `second` are the samples' positions in the two caches or datasets, int64 (m,). `reason` says why nothing
    was compared, and is "" if records were compared.
    """

    first: Positions
    second: Positions
    reason: str = ""

    def __len__(self) -> int:
        return len(self.first)


def findings(dataset: Samples) -> facts.Findings:
    """Return possible problems of a cache. `dataset` is a dataset of the cache, the opened cache, or its folder or URL.

    All samples of the cache are considered, also those that a dataset leaves out. No record is read. Raises the errors
    of opening a cache.
    """
    return facts.findings(opened(dataset)[0])


def exact_copies(one: Samples, two: Samples | None = None) -> Exact:
    """Return the pairs of samples of two caches, or of one cache, that have the same clean record.

    Lengths and checksums of all records are compared, then the bytes of those records for which both are equal. If
    several records of `one` are equal, each equal record is paired with the first of them. If the two caches were made
    with different settings or libraries, their records of one picture differ, so nothing is compared.

    Raises DamageError or FormatError for records that cannot be read, and the errors of opening a cache.
    """
    first, second = (_Records.of(each) for each in (one, one if two is None else two))
    if reason := _difference(first.cache, second.cache):
        return Exact(np.empty(0, np.int64), np.empty(0, np.int64), reason)
    return _match(first, first if two is None else second, is_one_set=two is None)


@dataclass(frozen=True)
class _Records:
    """The clean records of samples: their rows of the cache's index.

    `keys` has the length (high 32 bits) and the CRC-32 (low 32 bits) of each sample's record.
    """

    cache: Cache
    rows: Array
    keys: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, dataset: Samples) -> _Records:
        """Return the records of the samples in the cache's first variant, which is the clean one if there is one."""
        cache, positions = opened(dataset)
        chosen = np.arange(cache.manifest.samples) if positions is None else positions
        rows = cache.index[cache.rows(cache.manifest.variants[0], chosen)]
        lengths, sums = (rows[name].astype(np.uint64) for name in ("length", "crc32"))
        return cls(cache, rows, lengths << np.uint64(32) | sums)

    def read(self, place: int) -> bytes:
        return bytes(self.cache.reader.read(self.rows[place]))


def _match(one: _Records, two: _Records, is_one_set: bool) -> Exact:
    """Return the pairs of equal records. With `is_one_set`, a record is not paired with itself."""
    order = np.argsort(one.keys, kind="stable")
    places = np.searchsorted(one.keys[order], two.keys)
    is_there = places < len(order)
    is_there[is_there] = one.keys[order[places[is_there]]] == two.keys[is_there]
    first, second = order[places[is_there]], np.flatnonzero(is_there)
    if is_one_set:
        is_other = first != second
        first, second = first[is_other], second[is_other]
    is_equal = [one.read(a) == two.read(b) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    kept = np.array(is_equal, np.bool_)
    return Exact(first[kept], second[kept])


def _difference(one: Cache, two: Cache) -> str:
    """Return why the records of one picture may differ between two caches; "" if there is no reason."""
    if one.manifest.fields != two.manifest.fields:
        return "the two caches have records of different fields, sizes or codecs"
    if one.manifest.variants[0] != two.manifest.variants[0]:
        return "the two caches have different first variants: one of the caches lacks the clean variant"
    first, second = one.manifest.recipe, two.manifest.recipe
    others = sorted(str(name) for name in {*first, *second} - _NOT_IN_RECORDS if first.get(name) != second.get(name))
    return f"the two caches were made with different settings: {', '.join(others)}" if others else ""


@dataclass(frozen=True)
class Drift:
    """Average figures of two caches' images. They do not say whether a difference matters.

    Each pair has the first cache's figure, then the second's. `brightness` is the mean of an image's thumbnail, and
    `contrast` its standard deviation, 0 to 255, both averaged over the images. `sizes` has the median width and height
    of the source images, None for a cache without them. `classes` has two numbers for each class that is in both
    caches: the distance between the two mean thumbnails of this class (root mean square, 0 to 255), and the distance to
    expect by chance in classes of that size.
    """

    brightness: tuple[float, float]
    contrast: tuple[float, float]
    sizes: tuple[tuple[float, float] | None, tuple[float, float] | None]
    classes: Mapping[str, tuple[float, float]]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        classes = {name: {"distance": far, "by_chance": chance} for name, (far, chance) in self.classes.items()}
        return {
            "brightness": list(self.brightness),
            "contrast": list(self.contrast),
            "sizes": [None if size is None else list(size) for size in self.sizes],
            "classes": classes,
        }


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    `exact` are the samples with equal records. `near` are the pairs of pictures that look alike; it has no pair that is
    in `exact`. `is_copy`, bool (m,), says for each pair in `near` whether a second test confirms that it is a copy.
    `drift` has figures about the images of both caches, such as their brightness.
    """

    exact: Exact
    near: Pairs
    is_copy: npt.NDArray[np.bool_]
    drift: Drift

    @property
    def has_copies(self) -> bool:
        """Whether any picture of one cache is also in the other cache, or looks like a picture in it."""
        return bool(len(self.exact) or len(self.near))


def compare(
    one: Samples,
    two: Samples,
    threshold: int = THRESHOLD,
    *,
    search: Search = "auto",
    hashed: tuple[Hashes, Hashes] | None = None,
) -> Comparison:
    """Return the pictures of two caches that are copies or look alike, and figures about the images of both caches.

    `threshold` and `search` are those of `pairs`. `hashed` has the hashes of both caches; without it they are computed.
    Raises the errors of `hashes`, `pairs` and `exact_copies`.
    """
    first, second = hashed or (hashes(one), hashes(two))
    exact = exact_copies(one, two)
    near = pairs(first, threshold, other=second, search=search)
    known = np.isin(near.first * len(second) + near.second, exact.first * len(second) + exact.second)
    near = near.select(~known)
    return Comparison(exact, near, confirm_copies(near, one, two), _drift((one, first), (two, second)))


def confirm_copies(alike: Pairs, one: Samples, two: Samples | None = None) -> npt.NDArray[np.bool_]:
    """Return which of the pairs that look alike are copies, by details that hashes do not have: bool (m,).

    `alike` are pairs of images of `one` and `two`, or of `one` alone. Copies that were encoded again, made smaller or
    brighter, or mirrored are confirmed. Copies that were cropped, rotated or drawn on may stay unconfirmed. Raises
    DamageError or FormatError for records that cannot be read, and the errors of opening a cache.
    """
    sets = [opened(each) for each in (one, one if two is None else two)]
    found = np.zeros(len(alike), np.bool_)
    for start in range(0, len(alike), _CONFIRMED_AT_ONCE):
        part = slice(start, start + _CONFIRMED_AT_ONCE)
        fine = []
        for (cache, positions), ends in zip(sets, (alike.first[part], alike.second[part]), strict=True):
            distinct, places = np.unique(ends, return_inverse=True)
            fine.append(details(cache, distinct if positions is None else positions[distinct])[places.reshape(-1)])
        turned = alike.is_mirrored[part, None, None]
        found[part] = (fine[0] * np.where(turned, fine[1][:, :, ::-1], fine[1])).sum((1, 2)) >= _SAME_DETAILS
    return found


@dataclass(frozen=True)
class Leak:
    """How many validation samples are copies of training samples, and how many others only look like training samples.

    `samples` is the number of validation samples that are copies, and `path` is the path of one of them, or "".
    `compared` is "hashes" if hashes and then details of pictures were compared, and "records" if only records were
    compared. `alike` is the number of other validation samples that look like a training sample. `closest` is the
    closest pair of these: the path of the validation sample, the path of the training sample, and the number of bits,
    of 256, in which their hashes differ. `closest` is None if `alike` is 0.
    """

    samples: int
    compared: str
    path: str
    alike: int = 0
    closest: tuple[str, str, int] | None = None


def find_leak(train: Samples, valid: Samples) -> Leak | None:
    """Return how many validation samples are copies of training samples; None if that cannot be found out.

    If both caches have stored hashes, and are not too large for a quick search, hashes are compared, then the details
    of the closest pairs. Otherwise the records are compared. If the caches were made with different settings or
    libraries, records cannot be compared either, and None is returned.
    """
    sets = opened(train), opened(valid)
    known = [kept_hashes(cache) for cache, _ in sets]
    sizes = [cache.manifest.samples if at is None else len(at) for cache, at in sets]
    chosen = [
        each if at is None else each.select(at) for each, (_, at) in zip(known, sets, strict=True) if each is not None
    ]
    if len(chosen) == len(sets) and sizes[0] * sizes[1] <= _QUICK:
        return _leak_of_hashes(train, valid, pairs(chosen[0], other=chosen[1]))
    exact = exact_copies(train, valid)
    if exact.reason:
        return None
    copies = np.unique(exact.second)
    return Leak(len(copies), "records", _path(valid, copies[0]) if len(copies) else "")


def _leak_of_hashes(train: Samples, valid: Samples, alike: Pairs) -> Leak:
    """`alike` begins with the closest pairs. Only the first `_QUICK_PAIRS` are tested for being copies."""
    is_copy = np.zeros(len(alike), np.bool_)
    is_copy[:_QUICK_PAIRS] = confirm_copies(alike.select(slice(_QUICK_PAIRS)), train, valid)
    copies = np.unique(alike.second[is_copy])
    others = np.flatnonzero(~np.isin(alike.second, copies))
    closest = None
    if len(others):  # the closest come first
        pair = others[0]
        closest = _path(valid, alike.second[pair]), _path(train, alike.first[pair]), int(alike.distance[pair])
    path = _path(valid, copies[0]) if len(copies) else ""
    return Leak(len(copies), "hashes", path, len(np.unique(alike.second[others])), closest)


def _path(dataset: Samples, number: np.int64) -> str:
    cache, at = opened(dataset)
    return cache.samples.paths[int(number if at is None else at[number])]


def _drift(*sets: tuple[Samples, Hashes]) -> Drift:
    thumbnails = [hashed.thumbnails.reshape(len(hashed), -1).astype(np.float64) for _, hashed in sets]
    brightness = [float(each.mean()) if each.size else 0.0 for each in thumbnails]
    contrast = [float(each.std(1).mean()) if each.size else 0.0 for each in thumbnails]
    classes: dict[str, tuple[float, float]] = {}
    by_class = [_by_class(dataset, each) for (dataset, _), each in zip(sets, thumbnails, strict=True)]
    for name in by_class[0]:
        if name in by_class[1]:
            (mean, error), (other, other_error) = by_class[0][name], by_class[1][name]
            far = float(np.sqrt(np.mean((mean - other) ** 2)))
            classes[name] = (far, float(np.sqrt(np.mean(error + other_error))))
    sizes = tuple(_median_size(dataset) for dataset, _ in sets)
    return Drift((brightness[0], brightness[1]), (contrast[0], contrast[1]), (sizes[0], sizes[1]), classes)


def _by_class(dataset: Samples, thumbnails: Array) -> dict[str, tuple[Array, Array]]:
    """Return each class's mean thumbnail, and the variance of that mean, by the class's name.

    Classes of fewer than two samples are left out. The result is empty for a cache without classes.
    """
    cache, positions = opened(dataset)
    labels, names = cache.samples.labels, cache.manifest.classes
    if labels is None or not names:
        return {}
    labels = labels if positions is None else labels[positions]
    found = {}
    for number, name in enumerate(names):
        members = thumbnails[labels == number if labels.ndim == 1 else labels[:, number] > 0]
        if len(members) > 1:
            found[name] = (members.mean(0), members.var(0, ddof=1) / len(members))
    return found


def _median_size(dataset: Samples) -> tuple[float, float] | None:
    """Return the median width and height of the source images in pixels; None if the cache does not have them."""
    cache, positions = opened(dataset)
    sides = []
    for name in (WIDTH, HEIGHT):
        column = cache.samples.get(name)
        if not isinstance(column, np.ndarray) or column.ndim != 1:
            return None
        known = column[column > 0] if positions is None else column[positions][column[positions] > 0]
        if not len(known):
            return None
        sides.append(float(np.median(known)))
    return sides[0], sides[1]
