"""A dataset and a loader let go of what they hold, say so when they are used later, and crash for nothing."""

from __future__ import annotations

import pickle
import weakref

import pytest
import torch
from opened import open_files
from thorough import thorough

from tpucache import CachedDataset, CachedLoader, UsageError


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_closed_dataset_has_no_file_open_and_says_that_it_is_closed(copy, in_memory):
    dataset = CachedDataset(copy, "epoch", in_memory=in_memory)
    dataset[3]
    assert open_files(copy)
    memory = weakref.ref(dataset._reader._memory)
    for _ in range(2):
        dataset.close()
        assert open_files(copy) == []
        assert memory() is None
        assert not dataset.in_memory
        for use in (lambda: dataset[0], lambda: dataset.select([1]), lambda: list(CachedLoader(dataset, 10))):
            with pytest.raises(UsageError, match=r"copy is closed: open another CachedDataset"):
                use()
    assert len(dataset) == len(dataset.labels) == 150
    with pytest.raises(UsageError, match="closed"):
        pickle.loads(pickle.dumps(dataset))[0]


def test_a_with_block_closes(cache):
    with CachedDataset(cache) as dataset, CachedLoader(dataset, 50) as loader:
        images, _ = next(iter(loader))
        before = images.clone()
    assert torch.equal(images, before)
    with pytest.raises(UsageError, match="closed"):
        dataset[0]
    with pytest.raises(UsageError, match="this loader is closed: make another CachedLoader"):
        iter(loader)


def test_closing_leaves_what_was_selected_open(copy):
    dataset = CachedDataset(copy, in_memory=True)
    parts = [dataset.select([5]), dataset.select([6])]
    image = dataset[5][0]
    dataset.close()
    assert torch.equal(parts[0][0][0], image)
    parts[0].close()
    parts[1][0]
    assert open_files(copy)
    parts[1].close()
    assert open_files(copy) == []


def test_a_closed_loader_frees_its_buffers_and_ends_what_iterates(cache):
    loader = CachedLoader(CachedDataset(cache), 10)
    batches = iter(loader)
    images, _ = next(batches)
    before = images.clone()
    pool = weakref.ref(loader._buffers)
    for _ in range(2):
        loader.close()
    for use in (lambda: next(batches), lambda: iter(pickle.loads(pickle.dumps(loader)))):
        with pytest.raises(UsageError, match="this loader is closed"):
            use()
    assert pool() is None
    assert torch.equal(images, before)
    loader.dataset[0]


@pytest.mark.slow
def test_an_index_cut_short_while_a_dataset_is_open_is_an_error_and_not_a_crash(copy, run_with_torch):
    program = (
        "import os, sys\n"
        "from tpucache import CachedDataset, DamageError\n"
        "dataset = CachedDataset(sys.argv[1], 3)\n"
        "os.truncate(sys.argv[1] + '/index.npy', 4096)\n"
        "try:\n"
        "    dataset[149]\n"
        "except DamageError as error:\n"
        "    print(error)\n"
    )
    done = run_with_torch(program, copy)
    assert done.returncode == 0, done
    assert "index.npy was cut short" in done.stdout


KEPT = """
import stat, sys
from tpucache import CachedDataset, CachedLoader

datasets = [CachedDataset(sys.argv[1], "epoch", in_memory=memory) for memory in ("auto", False)]
loaders = [CachedLoader(dataset, 8) for dataset in datasets]
iterators = [iter(loader) for loader in loaders]
kept = [datasets, loaders, iterators, [next(iterator) for iterator in iterators], [dataset[0] for dataset in datasets]]
if sys.argv[2] == "ahead":
    from tpucache.training import Feeder, open_device

    feeder = Feeder(CachedLoader(datasets[0], 8), open_device("torch"))
    feeder.__enter__()
    iterator = iter(feeder)
    kept += [feeder, next(iterator), iterator]
stat.kept = kept  # a module that is taken apart after os, and after tpucache
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", [*thorough("loaders"), "ahead"])
def test_what_lives_until_the_interpreter_ends_goes_without_a_word(cache, what, run_with_torch):
    done = run_with_torch(KEPT, cache, what, finalise=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
