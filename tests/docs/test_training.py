"""The commands and the code on the page about training work as shown, on a small cache and with plain torch."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, blocks, commands

from tpucache.cli import main

PAGE = DOCS / "training.md"
SMALL = ["--backend", "torch", "--cores", "1", "--epochs", "1", "--batch-size", "32", "--model", "cnn"]


@pytest.fixture
def page(cache, tmp_path, monkeypatch):
    """A folder with the caches that the page names, and the page's blocks as (language, text)."""
    (tmp_path / "cache").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "cache" / name).symlink_to(cache)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return blocks(PAGE)


@pytest.mark.slow
def test_the_commands_of_the_page_work_one_after_another(page, tmp_path):
    (step,) = [text for _, text in page if "def step(" in text]
    (tmp_path / "simclr.py").write_text(step)
    try:
        for text in (text for language, text in page if language == "sh"):
            for words in commands(text):
                if not any(word.startswith("timm:") for word in words):  # which may not be installed
                    small = {"train": SMALL, "predict": ["--backend", "torch"]}.get(words[0], [])
                    assert main([*words, *small]) == 0, words
    finally:
        sys.modules.pop("simclr", None)
    with Path("predictions.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 150
    assert "Confusion" in Path("run.html").read_text()


@pytest.mark.slow
def test_training_from_python_and_a_model_of_columns_work_as_shown(page):
    from tpucache.training import build_model

    (columns,) = [text for _, text in page if "def age_and_image(" in text]
    (python,) = [text for _, text in page if "train(\n" in text]
    space: dict[str, Any] = {"my_model": lambda outputs: build_model("cnn", outputs)}
    exec(compile(columns, PAGE.name, "exec"), space)
    assert space["age_and_image"](2, 3).head.in_features == 19
    exec(compile(python.replace("epochs=10", "epochs=1, batch_size=32"), PAGE.name, "exec"), space)
    assert len(space["result"].history) == 1
    assert Path("runs/mine/best.pt").exists()
