"""Selections and reading."""

from __future__ import annotations

import os
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from scripts.checks.misuse.lab import COUNT, Lab, array, check_photos, class_of, number_of, pixels
from scripts.checks.misuse.outcome import Outcome, Wrong, correct, equal, refuses
from scripts.checks.misuse.rows import row
from tpucache import CachedDataset, CachedLoader, TpucacheError, UsageError


@row
def an_untouched_cache(lab: Lab) -> Outcome:
    return correct(check_photos(CachedDataset(lab.shared.cache()), class_of, range(COUNT)))


@row
def a_mask_of_labels_as_selection(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    wanted = [n for n in range(COUNT) if class_of(n) == "cat"]
    masks: list[Any] = [dataset.labels == 2, (dataset.labels == 2).numpy(), (dataset.labels == 2).tolist()]
    for mask in masks:
        check_photos(dataset.select(mask), class_of, wanted)
        check_photos(dataset[mask], class_of, wanted)
    return correct("torch, numpy and list masks give the cats, and nothing else")


@row
def a_mask_that_is_too_short(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    return refuses(lambda: dataset.select(np.ones(COUNT - 1, bool)), UsageError, str(COUNT))


@row
def floats_texts_and_bools_as_an_index(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    for value in (
        1.0,
        "3",
        True,
        np.float64(2),
        [0.0, 1.0],
        ["a"],
        np.array([1.5]),
        torch.tensor([1.0]),
        None,
        [[0], [1]],
    ):
        outcome = refuses(lambda value=value: dataset[value], UsageError)
    return outcome


@row
def positions_beyond_both_ends(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    for value in (COUNT, -COUNT - 1, 2**62, np.uint64(2**64 - 1)):
        try:
            dataset[value]
        except IndexError:
            pass
        else:
            raise Wrong(f"dataset[{value}] gave a sample")
        outcome = refuses(lambda value=value: dataset.select([value]), UsageError)
    return outcome


@row
def slices_lists_and_negative_positions_as_numpy_takes_them(lab: Lab) -> Outcome:
    dataset, numbers = CachedDataset(lab.shared.cache()), np.arange(COUNT)
    order = np.array([number_of(path) for path in dataset.paths])
    for key in (slice(None, None, -1), slice(3, -2, 4), slice(100, 3), [5, -1, 5], np.array([-COUNT, 2], np.int8), []):
        chosen = dataset[key]
        equal(
            f"numbers of {key}",
            [number_of(path) for path in chosen.paths],
            order[numbers[key] if len(numbers[key]) else []].tolist() if not isinstance(key, list) or key else [],
        )
        check_photos(chosen, class_of, [number_of(path) for path in chosen.paths])
    return correct("the same samples as numpy's indexing of their numbers")


@row
def a_selection_of_a_subset_of_a_selection(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    order = [number_of(path) for path in dataset.paths]
    nested = Subset(Subset(dataset.select(range(1, 20)), [3, 5, -1]), [2, 0])
    images = next(iter(CachedLoader(nested, 2)))[0]
    for image, number in zip(images, (order[19], order[4]), strict=True):
        equal(f"photograph {number}", array(image), pixels(number))
    return correct("positions of each level refer to the level above, negative ones too")


@row
def an_empty_selection(lab: Lab) -> Outcome:
    empty = CachedDataset(lab.shared.cache()).select([])
    equal("samples", (len(empty), empty.paths, list(empty.labels.shape)), (0, [], [0]))
    equal("batches", len(list(CachedLoader(empty, 4, shuffle=True))), 0)
    equal("batches of a DataLoader", len(list(DataLoader(empty, 4))), 0)
    return correct("no samples, no batches, no error")


@row
def a_variant_that_the_cache_lacks(lab: Lab) -> Outcome:
    for value in (3, -1, True, "1", None, 1.0, "Epoch"):
        outcome = refuses(lambda value=value: CachedDataset(lab.shared.augmented(), value), UsageError, "variants")
    return outcome


@row
def indices_of_minus_one(lab: Lab) -> Outcome:
    return refuses(lambda: CachedDataset(lab.shared.cache(), indices=[0, -1]), UsageError, "-1")


@row
def in_memory_given_as_a_text_of_the_command_line(lab: Lab) -> Outcome:
    no: Any = "no"
    return refuses(lambda: CachedDataset(lab.shared.cache(), in_memory=no), UsageError, "in_memory")


@row
def writing_into_a_batch_or_a_sample(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache(), in_memory=True)
    dataset[0][0].zero_()
    dataset.labels.zero_()
    for images, labels in CachedLoader(dataset, 5):
        images.zero_()
        labels.zero_()
    for images in DataLoader(dataset, 5):
        images[0].zero_()
    return correct("what a caller overwrites is its own: " + check_photos(dataset, class_of, range(COUNT)))


@row
def keeping_every_batch(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    kept = [list(CachedLoader(dataset, 5, threads=3, prefetch=4)) for _ in range(4)]
    for batches in kept:
        images = torch.cat([images for images, _ in batches])
        for image, path in zip(images, dataset.paths, strict=True):
            equal(path, array(image), pixels(number_of(path)))
    return correct("batches kept over four epochs are all as they were read")


@row
def a_relative_path_and_another_working_folder(lab: Lab) -> Outcome:
    os.chdir(lab.shared.cache().parent)
    dataset = CachedDataset("cache")
    os.chdir("/")
    packed = pickle.loads(pickle.dumps(dataset))
    check_photos(packed, class_of, range(COUNT))
    return correct(check_photos(dataset, class_of, range(COUNT)) + ", pickled too")


@row
def a_cache_through_a_symlink(lab: Lab) -> Outcome:
    link = lab.folder / "a link"
    link.symlink_to(lab.shared.cache())
    return correct(check_photos(CachedDataset(str(link)), class_of, range(COUNT)))


@row
def a_closed_dataset_and_a_closed_loader(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    loader, other = CachedLoader(dataset, 4), dataset.select(range(4))
    loader.close()
    refuses(lambda: next(iter(loader)), UsageError, "closed")
    dataset.close()
    check_photos(other, class_of, [number_of(path) for path in other.paths])
    return refuses(lambda: dataset[0], UsageError, "closed")


@row
def closing_while_threads_read(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache(), in_memory=True)
    faults: list[str] = []

    def read(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            position = draw.randrange(COUNT)
            try:
                image = dataset[position][0]
            except UsageError:
                return
            except Exception as error:  # noqa: BLE001  # a thread's error would be lost
                faults.append(repr(error))
                return
            if not np.array_equal(array(image), pixels(number_of(dataset.paths[position]))):
                faults.append(f"pixels of position {position}")

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    dataset.close()
    for thread in threads:
        thread.join()
    equal("faults", faults, [])
    return correct("each read gave its photograph, or was refused because the dataset is closed")


@row
def one_dataset_in_eight_threads(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    with ThreadPoolExecutor(8) as threads:
        images = list(threads.map(lambda n: dataset[n % COUNT][0], range(40 * COUNT)))
    for position, image in enumerate(images):
        equal("photograph", array(image), pixels(number_of(dataset.paths[position % COUNT])))
    return correct(f"{len(images)} reads in 8 threads gave the photographs asked for")


@row
def forked_processes_of_a_dataset_in_use(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache(), in_memory=True)
    list(CachedLoader(dataset, 6))
    for start in range(4):
        pid = os.fork()
        if not pid:
            good = all(
                np.array_equal(array(dataset[n][0]), pixels(number_of(dataset.paths[n]))) for n in range(start, COUNT)
            )
            os._exit(0 if good else 7)
        equal("exit status of a fork", os.waitpid(pid, 0)[1], 0)
    return correct("four forks read all photographs while the parent keeps its own")


@row
def workers_that_stay_while_the_epoch_changes(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.augmented(), "epoch")
    loader = DataLoader(dataset, 6, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    for epoch in range(3):
        dataset.set_epoch(epoch)
        images = torch.cat([images for images, _ in loader])
        for image, path in zip(images, dataset.paths, strict=True):
            equal(f"epoch {epoch}, {path}", array(image), 255 - pixels(number_of(path)))
    return correct("three epochs of two workers are the inverted photographs")


@row
def a_cache_that_is_replaced_while_it_is_open(lab: Lab) -> Outcome:
    """Another cache at the same place: neither its pixels nor its labels may be taken for the first one's."""
    place = lab.copy(lab.shared.cache())
    dataset = CachedDataset(place)
    place.rename(lab.folder / "moved")
    lab.copy(lab.shared.relabelled())
    return _same_or_refused(dataset)


@row
def a_cache_that_is_removed_while_it_is_open(lab: Lab) -> Outcome:
    place = lab.copy(lab.shared.cache())
    dataset = CachedDataset(place)
    place.rename(lab.folder / "moved")
    return refuses(lambda: list(CachedLoader(dataset, 5)), TpucacheError, "copy")


@row
def a_file_where_a_cache_should_be(lab: Lab) -> Outcome:
    file = lab.folder / "cache"
    file.write_text("no cache")
    (lab.folder / "empty").mkdir()
    for path in (file, lab.folder / "empty", lab.folder / "nowhere"):
        outcome = refuses(lambda path=path: CachedDataset(path), TpucacheError, "manifest|cache")
    return outcome


def _same_or_refused(dataset: CachedDataset) -> Outcome:
    try:
        return correct(check_photos(dataset, class_of, range(COUNT)))
    except TpucacheError as error:
        message = str(error)
    return refuses(lambda: check_photos(dataset, class_of, range(COUNT)), TpucacheError, message[:8])
