"""Wall times of a few epochs: what a row says, who runs again, and the contender that is tpucache."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scripts.bench import epochs
from scripts.bench.rounds import Contender, Track
from scripts.bench.table import machine
from scripts.commands import CommandError


def times(*ends: float, images: int = 8) -> dict[str, Any]:
    return {"images": images, "first_batch": ends[0] / 2, "epoch_ends": list(ends)}


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for number in range(8):
        path = tmp_path / "photographs" / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 30, 3), 30 * number, np.uint8)).save(path)
    return tmp_path / "photographs"


def field(tmp_path: Path) -> epochs.Field:
    (tmp_path / "log").mkdir(exist_ok=True)
    return epochs.Field(Track(tmp_path), argparse.Namespace(work=tmp_path, side=24, size=16, batch=4))


def test_a_row_has_the_medians_of_the_rounds_and_the_ratio_to_torchvision():
    rounds = [{"first": times(4, 6, 8), "again": times(2, 3, 4)}, {"first": times(8, 9, 10), "again": times(3, 4, 6)}]
    row = epochs.summarise("ours", rounds, [{"first": times(8, 16, 24)}, {"first": times(10, 20, 30)}])
    assert epochs.to_rows({"rows": [row], "epochs": 3})[1] == [
        "ours",
        "9.0",
        "8.0 - 10.0",
        "3.0",
        "6.0",
        "1.5",
        "5.0",
        "3.0",
    ]
    alone = epochs.summarise("ours", [{"first": times(4)}], None)
    assert epochs.to_rows({"rows": [alone], "epochs": 1})[1] == ["ours", "4.0", "4.0 - 4.0", "2.0", "4.0", "", "", ""]


def test_the_fastest_is_first_and_what_was_measured_is_below(photographs):
    options = argparse.Namespace(photographs=photographs, side=24, size=16, batch=4, epochs=2, rounds=1)
    runs = {"torchvision": [{"first": times(6, 9)}], "tpucache, ImageFolder": [{"first": times(2, 3)}]}
    report = epochs.to_report(runs, options) | {"machine": machine(), "versions": {"a": {"b": "1"}}, "left_out": []}
    lines = epochs.to_markdown(report).splitlines()
    assert lines[2].startswith("| **tpucache, ImageFolder** | **3.0** |")
    assert lines[3].startswith("| torchvision | 9.0 |")
    assert lines[5].startswith("8 photographs in shuffled batches of 4, crops of 16 pixels out of stored sides of 24; ")
    assert lines[-1] == "- a: b 1"


def test_who_keeps_a_cache_runs_again_with_it_and_others_do_not(tmp_path, photographs, monkeypatch):
    found = []

    def take(contender, python, log, *, folder, **task):
        found.append((contender.name, Path(folder).exists()))
        if contender.name == "ours":
            Path(folder).mkdir(exist_ok=True)
        return times(1, 2)

    monkeypatch.setattr(epochs, "take_epochs", take)
    turns = [field(tmp_path).turn(Contender(name, "epochs.any"), photographs, 1) for name in ("ours", "plain", "ours")]
    assert [set(turn) for turn in turns] == [{"first", "again"}, {"first"}, {"first", "again"}]
    assert found == [("ours", False), ("ours", True), ("plain", False), ("ours", False), ("ours", True)]


def test_who_leaves_photographs_out_is_left_out(tmp_path, photographs, monkeypatch):
    monkeypatch.setattr(epochs, "take_epochs", lambda *_, **__: times(1, images=7))
    with pytest.raises(CommandError, match="gave 7 images in 1 epochs of 8"):
        field(tmp_path).turn(Contender("ours", "epochs.any"), photographs, 1)


def test_a_few_photographs_are_of_each_class(tmp_path, photographs, monkeypatch):
    monkeypatch.setattr(epochs, "_FEW", 4)
    few = epochs.copy_few(photographs, tmp_path / "few")
    assert sorted(str(path.relative_to(few)) for path in few.glob("*/*")) == [
        "class-0/0.png", "class-0/2.png", "class-1/1.png", "class-1/3.png",
    ]  # fmt: skip


@pytest.mark.slow
def test_both_ways_of_tpucache_give_all_crops_of_all_epochs(tmp_path, photographs):
    ours = [each for each in epochs.CONTENDERS if each.peer == "tpucache"]
    assert len(ours) == 2
    for contender in ours:
        task = {"photographs": str(photographs), "folder": str(tmp_path / contender.name), "side": 24, "size": 16}
        log = tmp_path / "log"
        run = epochs.take_epochs(contender, Path(sys.executable), log, **task, batch=3, epochs=2, workers=1)
        assert run["images"] == 16
        assert 0 < run["first_batch"] <= run["epoch_ends"][0] <= run["epoch_ends"][1]
