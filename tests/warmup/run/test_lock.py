"""A work folder belongs to one run at a time, and its workers notice when it is no longer theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpucache.errors import BuildError
from tpucache.warmup.run.folder import hold, is_held


def test_a_run_holds_its_folder_until_it_ends(tmp_path: Path) -> None:
    with hold(tmp_path) as run:
        assert is_held(tmp_path, run)
    assert not is_held(tmp_path, run)


def test_a_run_that_another_took_over_from_holds_the_folder_no_more(tmp_path: Path) -> None:
    with hold(tmp_path) as first:
        pass
    with hold(tmp_path) as second:
        assert is_held(tmp_path, second)
        assert not is_held(tmp_path, first)


def test_a_folder_that_is_gone_is_not_held(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "nowhere", "a run")


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with hold(tmp_path) as first:
        with pytest.raises(BuildError, match="another process is writing"), hold(tmp_path):
            pass
        assert is_held(tmp_path, first)
