"""Kaggle's rules, each broken once."""

from __future__ import annotations

import json

import pytest

from tpucache import UsageError
from tpucache.kaggle import MAX_FILES
from tpucache.publish.rules import LICENSES, breaches, check_id, check_license, check_title

METADATA = {"title": "Digits at 32", "id": "ann/digits-at-32", "licenses": [{"name": "CC0-1.0"}]}


@pytest.fixture
def folder(tmp_path):
    """A folder that keeps all rules."""
    (tmp_path / "dataset-metadata.json").write_text(json.dumps(METADATA))
    (tmp_path / "index.npy").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize("good", ["ann/digits", "Ann_B-1/a1-b2-c3", "ann/" + "x" * 50])
def test_ids_that_kaggle_takes_pass(good):
    assert check_id(good) == good


NO_ID = ["digits", "/digits", "ann/digits/2", "ann/digits\n", ""]
NO_SLUG = ["digit", "x" * 51, "Digits", "digits_32", "-digits", "digits-", "a--bcdef"]


@pytest.mark.parametrize("bad", [*NO_ID, *(f"ann/{slug}" for slug in NO_SLUG)])
def test_ids_that_kaggle_refuses_are_refused(bad):
    with pytest.raises(UsageError, match="owner/slug"):
        check_id(bad)


@pytest.mark.parametrize("bad", ["short", "x" * 51, "", "  digit  ", "digits\nat 32"])
def test_titles_that_kaggle_refuses_are_refused(bad):
    with pytest.raises(UsageError, match="6 to 50"):
        check_title(bad)


@pytest.mark.parametrize("bad", [None, "", "MIT", "cc0-1.0", "CC0-1.0 "])
def test_no_licence_is_assumed_and_all_are_listed(bad):
    with pytest.raises(UsageError) as caught:
        check_license(bad)
    assert all(name in str(caught.value) for name in LICENSES)


def test_a_folder_that_keeps_the_rules_passes(folder):
    assert breaches(folder) == []


def test_metadata_with_a_key_twice_breaks_the_rules(folder):
    text = (folder / "dataset-metadata.json").read_text()
    (folder / "dataset-metadata.json").write_text(text.replace("{", '{"id": "ann/others", ', 1))
    assert breaches(folder) == [
        "dataset-metadata.json: the key 'id' is there twice in one object: remove one of the two"
    ]


@pytest.mark.parametrize("name", ["a.zip", "A.TAR", "a.tar.gz", "labels.csv", "a.7z"])
def test_names_that_kaggle_unpacks_are_found(folder, name):
    (folder / name).write_bytes(b"x")
    (breach,) = breaches(folder)
    assert breach.startswith(f"{name} is a name that Kaggle unpacks")


@pytest.mark.parametrize("name", [".hidden", "dataset-cover-image.png", "kernel-metadata.json", "datapackage.json"])
def test_names_that_the_client_leaves_out_are_found(folder, name):
    (folder / name).write_bytes(b"x")
    assert breaches(folder) == [f"{name} is a name that Kaggle's client leaves out"]


def test_folders_and_empty_files_are_found(folder):
    (folder / "sub").mkdir()
    (folder / "empty.npy").touch()
    assert breaches(folder) == ["sub is not a plain file: folders are left out", "empty.npy is empty"]


def test_one_file_more_than_allowed_is_found(folder):
    for number in range(MAX_FILES - 1):
        (folder / f"v00-{number:05d}.lmdb").write_bytes(b"x")
    assert breaches(folder) == []
    (folder / "more").write_bytes(b"x")
    assert breaches(folder) == ["51 files are more than 50, the limit"]


@pytest.mark.parametrize(
    "change",
    [
        {"title": "x"},
        {"id": "x"},
        {"licenses": []},
        {"licenses": [{"name": "CC0-1.0"}] * 2},
        {"licenses": [{}]},
        {"id": 3},
    ],
)
def test_metadata_that_kaggle_refuses_is_found(folder, change):
    (folder / "dataset-metadata.json").write_text(json.dumps(METADATA | change))
    (breach,) = breaches(folder)
    assert breach.startswith("dataset-metadata.json: ")


def test_missing_metadata_is_found(folder):
    (folder / "dataset-metadata.json").unlink()
    assert breaches(folder) == ["dataset-metadata.json is missing"]
