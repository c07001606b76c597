"""Every command of docs/sources.md works on small data in the layout that it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import DOCS, blocks, commands

from tpucache.cli import main
from tpucache.store.manifest import Manifest

layouts = pytest.importorskip("layouts", exc_type=ImportError)  # it writes with libraries that may not be installed

SHOWN = [words for language, text in blocks(DOCS / "sources.md") if language == "sh" for words in commands(text)]
COMMANDS = [words for words in SHOWN if words[0] == "warmup"]


def test_each_layout_has_its_command():
    assert {Path(words[2]).name for words in COMMANDS} == set(layouts.EXPECTED)


@pytest.mark.slow
def test_every_command_of_the_page_makes_its_cache(tmp_path, monkeypatch):
    layouts.write_layouts(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made = {}
    for words in {words[2]: words for words in COMMANDS}.values():
        small = ["8" if before == "--size" else word for before, word in zip(["", *words], words, strict=False)]
        assert main([*small, "--jobs", "1"]) == 0, words
        manifest = Manifest.load(Path(words[2]))
        labels = list(manifest.classes) or manifest.source["labels"]["kind"]
        made[Path(words[2]).name] = (manifest.samples, labels, [field.name for field in manifest.fields])
    assert made == layouts.EXPECTED
