"""A cache of any codec, read packed and finished by the decoder, gives the images that the host decodes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tpucache import CachedDataset, CachedLoader, Recipe, UsageError, build_cache, verify_cache
from tpucache.ondevice.modules import decoder
from tpucache.store.codecs import IMAGE_CODECS
from tpucache.warmup.sources import FolderSource, select_source

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=IMAGE_CODECS)
def cache(request: pytest.FixtureRequest, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty of the photographs in each codec, at a size that is no multiple of a block."""
    directory = tmp_path_factory.mktemp("codecs") / request.param
    source = select_source(FolderSource(photos), limit=40)
    build_cache(source, directory, Recipe(size=(20, 36), codec=request.param, variants=1, augment="flip"), jobs=1)
    return directory


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("variant", [0, "epoch"])
def test_packed_batches_are_finished_to_the_hosts_images(cache: Path, in_memory: bool, variant: int) -> None:
    dataset = CachedDataset(cache, variant, in_memory=in_memory)
    finish = decoder(dataset)
    host = CachedLoader(dataset, 32, shuffle=True)
    device = CachedLoader(dataset, 32, shuffle=True, finish="device")
    for (images, labels), (packed, same_labels) in zip(host, device, strict=True):
        finished = finish(packed)
        assert finished.shape == images.shape
        assert int((finished.int() - images.int()).abs().max()) <= 1
        assert torch.equal(labels, same_labels)


def test_the_state_of_a_loader_fits_either_finish(cache: Path) -> None:
    dataset = CachedDataset(cache)
    host, device = CachedLoader(dataset, 32, shuffle=True), CachedLoader(dataset, 32, shuffle=True, finish="device")
    next(iter(host))
    device.load_state_dict(host.state_dict())
    assert device.state_dict() == host.state_dict()


def test_a_packed_dataset_pickles_and_selects(cache: Path) -> None:
    packed = CachedDataset(cache).packed()
    image = packed[3][0]
    assert torch.equal(pickle.loads(pickle.dumps(packed))[3][0], image)
    assert torch.equal(packed.select([3])[0][0], image)
    assert torch.equal(next(iter(DataLoader(packed, 4)))[0][3], image)


def test_every_codec_verifies(cache: Path) -> None:
    assert verify_cache(cache) == []


def test_another_finish_is_refused(cache: Path) -> None:
    with pytest.raises(UsageError, match="host, device"):
        CachedLoader(CachedDataset(cache), 4, finish="tpu")  # type: ignore[arg-type]  # wrong on purpose
