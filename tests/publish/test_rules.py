"""Ids, titles and licences that Kaggle takes, and others."""

from __future__ import annotations

import pytest

from tpucache import UsageError
from tpucache.kaggle import check_id
from tpucache.publish.rules import LICENSES, Metadata


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
        Metadata("ann/digits", bad, "CC0-1.0")


@pytest.mark.parametrize("bad", [None, "", "MIT", "cc0-1.0", "CC0-1.0 "])
def test_no_licence_is_assumed_and_all_are_listed(bad):
    with pytest.raises(UsageError) as caught:
        Metadata("ann/digits", "Digits at 32", bad)
    assert all(name in str(caught.value) for name in LICENSES)
