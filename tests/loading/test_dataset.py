"""CachedDataset: the same samples everywhere, needing only numpy and torch."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from thorough import thorough
from torch.utils.data import DataLoader, Subset

from tpucache import CachedDataset, CachedLoader, DamageError, Recipe, build_cache
from tpucache.store.samples import encode_columns
from tpucache.warmup.records.presize import presize

TESTS = Path(__file__).parents[1]
READ_EVERYWHERE = """
import hashlib, os, processes, sys, torch, warnings
from torch.utils.data import DataLoader
from tpucache import CachedDataset

def digest(batches):
    total = hashlib.sha256()
    for images, labels in batches:
        total.update(images.contiguous().numpy().tobytes() + labels.numpy().tobytes())
    return total.hexdigest()

if __name__ == "__main__":
    processes.fork_alone()
    warnings.filterwarnings("ignore", "This DataLoader will create 2 worker")  # torch, where there is one core
    for name in ("lmdb", "PIL", "cv2", "albumentations", "joblib"):
        try:
            __import__(name)
        except ImportError:
            continue
        sys.exit(f"{name} could be imported")
    dataset = CachedDataset(sys.argv[1], variant=2)
    digests = {digest(DataLoader(dataset, 32))}
    digests.add(digest(DataLoader(dataset, 32, num_workers=int(sys.argv[3]), multiprocessing_context=sys.argv[2])))
    print(*digests)
"""

BLOCK_IMPORTS = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lmdb", "PIL", "cv2", "albumentations", "joblib"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
"""


def test_a_clean_sample_is_the_presized_photograph(cache, photos):
    dataset = CachedDataset(cache)
    image, label = dataset[77]
    path = dataset.paths[77]
    expected = presize((photos / path).read_bytes(), Recipe(size=16), path)
    assert image.dtype == torch.uint8
    assert torch.equal(image, torch.from_numpy(expected.copy()).permute(2, 0, 1))
    assert label.dtype == torch.int64
    assert label.shape == ()
    assert dataset.classes[label] == Path(path).parts[0]


# Two workers take turns; those that do not fork import torch again, each for seconds, and one shows what it reads.
@pytest.mark.slow
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1), *thorough(("forkserver", 1))])
def test_samples_are_the_same_under_any_worker_without_the_writers_libraries(
    cache, tmp_path, torch_forks, method, workers
):
    published = shutil.copytree(cache, tmp_path / "published")
    for path in (published, *published.iterdir()):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(path.name for path in published.iterdir())
    (tmp_path / "sitecustomize.py").write_text(BLOCK_IMPORTS)
    script = tmp_path / "read_everywhere.py"
    script.write_text(f"{BLOCK_IMPORTS}\n{READ_EVERYWHERE}")  # for the fork, too, which has begun already
    path = os.pathsep.join([str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = torch_forks.run([str(script), str(published), method, str(workers)], {**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 1
    assert sorted(path.name for path in published.iterdir()) == before


def test_items_batches_and_subsets_agree(cache):
    dataset = CachedDataset(cache, variant=1)
    chosen = [3, 140, 0, 77]
    singles = [dataset[index] for index in chosen]
    batch = dataset.__getitems__(chosen)
    subset = next(iter(DataLoader(Subset(dataset, chosen), 4)))
    selected = dataset.select(chosen)
    for at, (image, label) in enumerate(singles):
        assert torch.equal(image, batch[at][0])
        assert torch.equal(image, subset[0][at])
        assert torch.equal(image, selected[at][0])
        assert label == batch[at][1] == subset[1][at] == selected[at][1]
    assert selected.paths == [dataset.paths[index] for index in chosen]
    assert selected.labels.tolist() == [int(label) for _, label in singles]


def test_variant_epoch_shows_all_augmented_variants_in_turn(cache):
    fixed = {variant: CachedDataset(cache, variant) for variant in (0, 1, 2, 3)}
    turning = CachedDataset(cache, "epoch")
    for index in (0, 1, 149):
        shown = []
        for epoch in range(3):
            turning.set_epoch(epoch)
            image = turning[index][0]
            shown += [variant for variant, data in fixed.items() if torch.equal(data[index][0], image)]
        assert sorted(shown) == [1, 2, 3]


PERSISTING = """
import processes, sys, torch, warnings
from torch.utils.data import DataLoader
from tpucache import CachedDataset

if __name__ == "__main__":
    processes.fork_alone()
    warnings.simplefilter("error")
    turning, here = (CachedDataset(sys.argv[2], "epoch", indices=range(20)) for _ in range(2))
    loader = DataLoader(turning, 10, num_workers=1, persistent_workers=True, multiprocessing_context=sys.argv[1])
    for epoch in (0, 1, 5):
        turning.set_epoch(epoch)
        here.set_epoch(epoch)
        assert torch.equal(torch.cat([images for images, _ in loader]), torch.stack([image for image, _ in here]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", *thorough("spawn")])
def test_workers_that_persist_see_each_epoch(cache, method, run_with_torch):
    done = run_with_torch(PERSISTING, method, cache)
    assert done.returncode == 0, done.stderr


def test_a_copy_has_an_epoch_of_its_own(cache):
    turning = CachedDataset(cache, "epoch")
    turning.set_epoch(2)
    for copied in (copy.deepcopy(turning), pickle.loads(pickle.dumps(turning)), turning.select(range(3))):
        assert copied.epoch == 2
        copied.set_epoch(7)
        assert turning.epoch == 2


def test_a_pickled_dataset_is_small_and_reads_the_same(cache):
    dataset = CachedDataset(cache, variant=3)
    image = dataset[5][0]
    data = pickle.dumps(dataset)
    assert len(data) < 20_000
    assert torch.equal(pickle.loads(data)[5][0], image)


def test_repr_tells_what_it_is_but_not_where(cache):
    text = repr(CachedDataset(cache))
    assert "150" in text
    assert str(cache) not in text


def test_without_variants_an_epoch_shows_the_clean_images_and_that_is_said_once(photos, tmp_path, caplog):
    build_cache(photos, tmp_path / "clean", Recipe(size=16), jobs=1)
    dataset, plain = CachedDataset(tmp_path / "clean", "epoch"), CachedDataset(tmp_path / "clean")
    CachedDataset(tmp_path / "clean", "epoch")
    (said,) = [record.getMessage() for record in caplog.records if record.name == "tpucache"]
    assert f"{tmp_path / 'clean'} has no augmented variants" in said
    assert (dataset.variant, dataset.digest) == (0, plain.digest)
    for epoch in (0, 3):
        dataset.set_epoch(epoch)
        assert all(torch.equal(dataset[row][0], plain[row][0]) for row in (0, 77, 149))
    rest = CachedLoader(plain, 50, shuffle="block")
    rest.load_state_dict(CachedLoader(dataset, 50, shuffle="block").state_dict())


def test_labels_of_an_unlabelled_cache_are_minus_one(photos, tmp_path):
    build_cache(photos / "ant", tmp_path / "flat", Recipe(size=8), jobs=1)
    dataset = CachedDataset(tmp_path / "flat")
    assert dataset.classes == ()
    assert set(dataset.labels.tolist()) == {-1}
    assert np.asarray(dataset[0][0]).shape == (3, 8, 8)


def test_a_digest_covers_the_variant_the_selection_and_its_order(cache: Path) -> None:
    dataset = CachedDataset(cache)
    others = [
        CachedDataset(cache, np.int64(1)),
        CachedDataset(cache, "epoch"),
        dataset.select([0, 1, 2]),
        dataset.select([2, 1, 0]),
    ]
    digests = [dataset.digest, *(other.digest for other in others)]
    assert len(set(digests)) == len(digests)
    assert CachedDataset(cache).digest == dataset.digest == pickle.loads(pickle.dumps(dataset)).digest


def test_the_labels_of_another_cache_of_the_same_photographs_are_refused(copy: Path) -> None:
    dataset = CachedDataset(copy)
    columns = {name: dataset.table[name] for name in dataset.table}
    columns["label"] = np.zeros_like(columns["label"])
    assert len(encode_columns(columns)) == (copy / "samples.npz").stat().st_size
    (copy / "samples.npz").write_bytes(encode_columns(columns))
    for again in (CachedDataset(copy), pickle.loads(pickle.dumps(dataset))):
        with pytest.raises(DamageError, match="not the file that the manifest lists"):
            again.labels  # noqa: B018


def test_where_selects_of_a_dataset_what_it_shows(cache: Path) -> None:
    dataset = CachedDataset(cache)
    half = dataset[::-2]
    some = half.where("class == 'bee' and path > 'bee/0050'")
    assert 0 < len(some) < 38
    assert [path for path in half.paths if "bee/0050" < path < "c"] == some.paths
    assert set(some.labels.tolist()) == {1}
    assert len(dataset.where("label == 9")) == 0
