"""The versions that a manifest records: a library that takes the place of another is named, and one is enough."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import pytest

from tpucache.warmup import library_versions
from tpucache.warmup.plan import resolve


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    found = dict.fromkeys(("numpy", "lmdb", "joblib", "albumentations", "pillow-heif", "pydicom"), "1.0")

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(library_versions, "version", version)
    library_versions._library_versions.cache_clear()
    yield found
    library_versions._library_versions.cache_clear()


def test_an_augmentation_library_in_place_of_another_is_recorded(installed: dict[str, str]) -> None:
    before = library_versions.versions()
    assert before["albumentations"] == "1.0"
    assert "nrtk-albumentations" not in before  # so that manifests are those of machines that know one library
    del installed["albumentations"]
    installed["nrtk-albumentations"] = "2.3.0"
    library_versions._library_versions.cache_clear()
    now = library_versions.versions()
    assert (now["albumentations"], now["nrtk-albumentations"]) == ("", "2.3.0")
    assert library_versions.version_differences(before) == [
        "albumentations 1.0, now none",
        "nrtk-albumentations none, now 2.3.0",
    ]


@pytest.mark.parametrize("name", ["flip", "strong"])
def test_a_preset_has_no_key_that_one_library_alone_writes(name: str) -> None:
    assert "seed" not in resolve(name, 16, 16)["transform"]
