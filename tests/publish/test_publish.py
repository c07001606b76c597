"""Publishing through a stand-in for Kaggle's client: what goes out, what arrives, and what does not."""

from __future__ import annotations

import re
import shlex

import pytest
from patience import PATIENCE

from tpucache import DamageError, Manifest, PublishError
from tpucache.publish.publish import KaggleClient, prepare, send
from tpucache.publish.rules import Metadata, PublishOptions

METADATA = Metadata("ann/noise-at-16", "Noise at 16", "CC-BY-4.0")


@pytest.fixture
def bundle(stored):
    """The folder to upload."""
    return prepare(stored, METADATA)


def command_of(bundle, action="create", *words):
    """The command as it may be typed into a shell: a folder may have a space in its name."""
    return shlex.join(["kaggle", "datasets", action, "-p", str(bundle.folder), *words])


@pytest.mark.slow
def test_a_new_dataset_is_created_and_checked_page_by_page(bundle, kaggle):
    kaggle.wait(0)
    announced = []
    result = send(bundle, announce=announced.append)
    assert result.uploaded
    assert {name: len(data) for name, data in kaggle.uploaded.items()} == bundle.files
    assert announced == [command_of(bundle)] == [result.command]
    assert kaggle.calls[:2] == ["datasets, status, ann/noise-at-16", f"datasets, create, -p, {bundle.folder}"]
    pages = -(-len(bundle.files) // 4)
    assert sum("files" in call for call in kaggle.calls) == pages > 2


@pytest.mark.slow
@pytest.mark.thorough
def test_one_that_exists_gets_a_new_version(bundle, kaggle):
    send(bundle)
    result = send(bundle, PublishOptions(message="more of it", public=True))
    assert result.command == command_of(bundle, "version", "-m", "more of it")
    fingerprint = Manifest.load(bundle.folder).fingerprint
    assert send(bundle).command.endswith(f"-m '150 samples, 600 records, {fingerprint[:12]}'")


@pytest.mark.slow
def test_public_is_asked_for_only_where_wanted(bundle, kaggle):
    send(bundle, PublishOptions(public=True))
    assert f"datasets, create, -p, {bundle.folder}, --public" in kaggle.calls


@pytest.mark.slow
def test_a_file_that_was_left_out_is_named(bundle, kaggle):
    kaggle.mode("partial")
    with pytest.raises(
        PublishError, match=rf"differs from what was sent: {max(bundle.files)} is missing\. Look at https"
    ):
        send(bundle)


@pytest.mark.slow
def test_a_file_that_was_cut_short_is_named(bundle, kaggle):
    kaggle.mode("short")
    size = bundle.files[max(bundle.files)]
    with pytest.raises(PublishError, match=f"{max(bundle.files)} has {size - 1:,} bytes at Kaggle and {size:,} here"):
        send(bundle)


@pytest.mark.slow
def test_a_client_that_rounds_sizes_is_believed_the_names(bundle, kaggle):
    kaggle.mode("rounds")
    assert send(bundle).uploaded


@pytest.mark.slow
def test_what_kaggle_still_prepares_is_waited_for(bundle, kaggle):
    kaggle.wait(3)
    assert send(bundle, PublishOptions(patience=PATIENCE)).uploaded
    assert sum("status" in call for call in kaggle.calls) == 5
    kaggle.wait(1000)
    with pytest.raises(PublishError, match="is still preparing it"):
        send(bundle, PublishOptions(patience=0))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "reason"), [("fails", "status 1"), ("refuses", "title is already in use")])
def test_a_client_that_fails_is_reported(bundle, kaggle, mode, reason):
    kaggle.mode(mode)
    with pytest.raises(PublishError, match=reason):
        send(bundle)


def test_signed_out_uploads_nothing_and_tells_the_command(bundle, kaggle, capfd):
    kaggle.mode("signed-out")
    announced = []
    with pytest.raises(PublishError, match=f"not signed in.* then run `{re.escape(command_of(bundle))}`"):
        send(bundle, announce=announced.append)
    assert announced == [command_of(bundle)]
    assert kaggle.calls == ["datasets, status, ann/noise-at-16"]
    assert "TOKEN" not in "".join(capfd.readouterr())


def test_a_dataset_that_kaggle_could_not_be_asked_about_is_not_made_anew(bundle, kaggle):
    assert send(bundle).uploaded
    kaggle.mode("offline")
    with pytest.raises(PublishError, match=r"Max retries exceeded.*Check the network"):
        send(bundle)
    assert not any("create" in call for call in kaggle.calls[-1:])


@pytest.mark.parametrize("slug", ["connection-500", "credentials", "already-there"])
def test_the_words_of_a_datasets_name_are_no_answer_of_the_client(bundle, kaggle, slug):
    client = KaggleClient("kaggle")
    assert client.state(f"ann/{slug}") is None
    assert send(bundle).uploaded
    kaggle.wait(1)
    assert client.state(f"ann/{slug}") == "pending"


def test_without_a_client_or_on_a_dry_run_nothing_is_uploaded(bundle, kaggle, monkeypatch):
    assert not send(bundle, PublishOptions(dry_run=True)).uploaded
    assert kaggle.calls == []
    monkeypatch.setenv("PATH", "/nowhere")
    result = send(bundle)
    assert (result.uploaded, result.command) == (False, command_of(bundle))


def test_a_damaged_cache_is_not_published(stored):
    path = stored / "v01-00001.lmdb"
    data = bytearray(path.read_bytes())
    path.unlink()
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError, match=r"v01-00001\.lmdb"):
        prepare(stored, METADATA)
    assert not stored.with_name("stored.publish").exists()
