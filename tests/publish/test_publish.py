"""Publishing to a stand-in for Kaggle: what goes out, what arrives, and what does not."""

from __future__ import annotations

import sys

import pytest

from tpucache import DamageError, Manifest, PublishError, UnfinishedError
from tpucache.publish.publish import prepare, send
from tpucache.publish.rules import Metadata, PublishOptions

ID = "ann/noise-at-16"
METADATA = Metadata(ID, "Noise at 16", "CC-BY-4.0")


@pytest.fixture
def bundle(stored):
    """The folder to upload."""
    return prepare(stored, METADATA)


@pytest.mark.slow
@pytest.mark.parametrize("public", [False, True])
def test_a_new_dataset_has_the_folders_files_and_what_was_said_of_it(bundle, kaggle, public):
    kaggle.faults.lag = 2
    done = []
    assert send(bundle, PublishOptions(public=public), done.append)
    dataset = kaggle.datasets[ID]
    assert kaggle.files(ID) == {name: (bundle.folder / name).read_bytes() for name in bundle.files}
    assert (dataset.title, dataset.is_private) == ("Noise at 16", not public)
    assert dataset.versions[0].notes == bundle.card
    assert done[-1] == sum(bundle.files.values()) == kaggle.received
    assert len(bundle.files) > kaggle.page
    assert sorted(path.name for path in bundle.folder.parent.iterdir()) == ["stored", "stored.publish"]


@pytest.mark.slow
def test_one_that_exists_gets_a_new_version(bundle, kaggle):
    for message in (None, "more of it", None):
        send(bundle, PublishOptions(message=message))
    fingerprint = Manifest.load(bundle.folder).fingerprint
    notes = [version.notes for version in kaggle.datasets[ID].versions[1:]]
    assert notes == ["more of it", f"150 samples, 600 records, {fingerprint[:12]}"]


@pytest.mark.slow
def test_what_was_stopped_is_continued_and_sends_nothing_twice(bundle, kaggle):
    def stop(done):
        if done > total // 2:
            raise KeyboardInterrupt

    total = sum(bundle.files.values())
    with pytest.raises(KeyboardInterrupt):
        send(bundle, advance=stop)
    assert total // 2 < kaggle.received < total
    assert send(bundle)
    assert kaggle.received == total
    assert len(kaggle.datasets[ID].versions) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        ({"quota": 1}, PublishError, "the account's storage is full"),
        ({"lag": 1000}, UnfinishedError, "does not show the version"),
        ({"is_forbidden": True}, PublishError, "was denied"),
    ],
)
def test_what_kaggle_refuses_or_does_not_show_is_reported(bundle, kaggle, fault, error, reason):
    for name, value in fault.items():
        setattr(kaggle.faults, name, value)
    with pytest.raises(error, match=reason):
        send(bundle, patience=0)


@pytest.mark.slow
def test_signed_out_uploads_nothing_and_shows_no_key(bundle, kaggle, monkeypatch):
    monkeypatch.setenv("KAGGLE_KEY", "the-wrong-key")
    with pytest.raises(PublishError, match="does not know the account: set KAGGLE_API_TOKEN") as caught:
        send(bundle)
    assert "the-wrong-key" not in str(caught.value)
    assert kaggle.datasets == {}


def test_on_a_dry_run_or_without_kaggles_library_nothing_is_uploaded(bundle, kaggle, monkeypatch):
    assert not send(bundle, PublishOptions(dry_run=True))
    monkeypatch.setitem(sys.modules, "kagglesdk", None)
    assert not send(bundle)
    assert not kaggle.calls


def test_a_damaged_cache_is_not_published(stored):
    path = stored / "v01-00001.lmdb"
    data = bytearray(path.read_bytes())
    path.unlink()
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError, match=r"v01-00001\.lmdb"):
        prepare(stored, METADATA)
    assert not stored.with_name("stored.publish").exists()
