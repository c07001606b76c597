"""docs/architecture.md describes the package as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tpucache

PACKAGE = Path(tpucache.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text()


def test_each_folder_of_the_package_has_its_paragraph_and_no_other_has():
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*/__init__.py")} - {"."}
    assert set(re.findall(r"^\*\*`([\w/]+)/`\*\*", PAGE, re.MULTILINE)) == folders


def test_the_order_of_imports_is_the_one_that_is_checked():
    contracts = (PACKAGE.parent / ".importlinter").read_text()
    (layers,) = re.findall(r"name = Imports run downwards\n.*?layers =\n(.*?)\n\n", contracts, re.DOTALL)
    checked = [re.findall(r"tpucache\.(\w+)", line) for line in layers.splitlines() if line.strip()]
    (shown,) = re.findall(r"Imports run downwards:\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    drawn = [re.sub(r"\(.*\)", "", line).split() for line in shown.splitlines()]
    assert [sorted(line) for line in drawn] == [sorted(line) for line in checked]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE))))
def test_each_file_that_is_named_exists(name):
    paths = (PACKAGE / name, PACKAGE.parent / name, *PACKAGE.rglob(name))
    assert any(path.is_file() for path in paths)
