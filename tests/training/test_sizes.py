"""Runs whose images grow: the sizes that were asked for, the same results after a stop, nothing compiled twice."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import TRUST, EndAfter, command, last_of, learner_on, report_of, rows_of, train_on
from thorough import thorough

from tpucache import CachedDataset, Recipe, UsageError, build_cache
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training.data import prepare_data
from tpucache.training.device import CpuDevice
from tpucache.training.feed import drawer, parts
from tpucache.training.interrupt import StopRequest
from tpucache.training.loop import train
from tpucache.training.lr_finder import _losses
from tpucache.training.options import RunOptions
from tpucache.training.run.report import TrainReport
from tpucache.training.settings import TrainSettings, plan_sizes

GROWING = TrainSettings(
    model="tiny_models:tiny",
    epochs=4,
    batch_size=16,
    lr=0.02,
    grow="32:0.5,64",
    valid_size=48,
    augment=AugmentSettings(flip=True, shift=2, mixup=0.2),
)


@pytest.fixture(scope="module")
def cache(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs at 64x64. Not to be written to."""
    cache = tmp_path_factory.mktemp("sizes") / "cache"
    build_cache(photos, cache, Recipe(size=64, codec="dct-lz4"), jobs=1)
    return cache


shares = st.lists(st.floats(0.01, 0.99), min_size=0, max_size=3, unique=True).map(sorted)


@given(st.integers(1, 40), shares)
def test_each_size_has_its_share_of_the_epochs(epochs: int, shares: list[float]) -> None:
    sides = [32 * (number + 1) for number in range(len(shares) + 1)]
    grow = ",".join([*(f"{side}:{share:.4f}" for side, share in zip(sides, shares, strict=False)), str(sides[-1])])
    shares = [round(share, 4) for share in shares]
    if len(set(shares)) < len(shares):
        return
    plain = plan_sizes(epochs, grow=grow)
    assert plain.epochs == tuple(sorted(plain.epochs, key=lambda side: side or 0))
    assert plain.epochs[-1] in sides
    for side, share in zip(sides, shares, strict=False):
        assert sum(each <= side for each in plain.epochs if each) == round(share * epochs)
    assert plain.valid == sides[-1]
    assert plain.at(epochs + 7) == plain.epochs[-1]


def test_batches_have_the_size_of_their_epoch_and_so_have_their_draws(cache: Path) -> None:
    dataset = CachedDataset(cache)
    base = dataset.in_resolution(48)
    each = GROWING.steps_per_epoch(len(base))
    draw = drawer(GROWING, base)
    task = learner_on(GROWING, base)
    assert draw is not None
    for number, (images, _) in enumerate(parts(GROWING, base, epochs=4)):
        size = (32, 32, 64, 64)[number // each]
        assert images.shape[1:] == dataset.in_resolution(size).packed().record_fields[0].shape
        task.resize(size)
        assert draw(number).shape == draw(0).shape
    assert number == 4 * each - 1


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [*thorough(1, 3), 2])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(cache: Path, tmp_path: Path, epoch: int) -> None:
    dataset = CachedDataset(cache)
    train_set, valid_set = dataset.select(range(48)), dataset.select(range(100, 116))
    quick = RunOptions(replay=False)
    whole = train_on(tmp_path / "whole", GROWING, train_set, valid_set)
    stopping = replace(quick, watchers=[EndAfter(epoch)], checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", GROWING, train_set, valid_set, CpuDevice(), stopping)
    found = train_on(tmp_path / "cut", GROWING, train_set, valid_set, resume=True)
    assert found.losses == whole.losses
    assert found.epochs == whole.epochs
    assert [row["size"] for row in found.epochs] == [32, 32, 64, 64]
    one, other = (last_of(tmp_path / name)["learner"]["model"] for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(UsageError, match="grow"):
        train(tmp_path / "cut", replace(GROWING, grow="32:0.75,64"), train_set, valid_set, CpuDevice(), resumed(quick))


def resumed(options: RunOptions) -> RunOptions:
    return replace(options, resume=True)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xla
def test_each_size_is_compiled_once(cache: Path, tmp_path: Path, python: Callable[..., Any]) -> None:
    run = tmp_path / "run"
    options = ["--model", "tiny_models:tiny", "--epochs", "6", "--batch-size", "16", "--valid", "0.2"]
    options += ["--backend", "xla", "--grow", "32:0.5,64", "--flip"]
    done = python("-m", "tpucache", "train", cache, "--run", run, *options)
    assert done.returncode == 0, done.stderr
    pace = report_of(run)["pace"]
    assert pace["compiles"] == 0
    assert {*pace["sizes"]} == {"32", "64"}
    small, large = (pace["sizes"][side]["received_bytes"] / pace["sizes"][side]["images"] for side in ("32", "64"))
    assert small < 0.5 * large  # with labels and draws, and what of 64 was sent ahead
    assert "32 pixels:" in done.stdout


def test_predictions_are_made_in_the_size_of_the_evaluation(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = "--model tiny_models:tiny --epochs 1 --batch-size 16 --lr 0.1 --size 32 --backend torch --valid"
    assert command("train", cache, "--run", run, *words.split(), cache) == 0
    output = tmp_path / "found.csv"
    assert command("predict", run, cache, "-o", output, "--backend", "torch", "--trust", TRUST[0]) == 0
    rows = rows_of(output)
    report = report_of(run)
    right = sum(row["label"] == row["prediction"] for row in rows) / len(rows)
    assert math.isclose(right, report["epochs"][-1]["valid_accuracy"], abs_tol=1e-6)


def test_a_range_test_has_one_size(cache: Path) -> None:
    dataset = CachedDataset(cache).select(range(40))
    settings = replace(GROWING, epochs=8, valid_size=None, grow="32:0.1,64")
    learner = learner_on(settings, dataset.in_resolution(64))
    assert len(_losses(learner, dataset.in_resolution(64), [1e-4] * 12, StopRequest())) == 12


def test_a_size_that_cannot_be_made_is_refused_before_the_first_step(
    cache: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_cache(photos, tmp_path / "raw", Recipe(size=32), jobs=1)
    for place, options, words in (
        (cache, "--valid-size 64 --grow 32:0.3,256:0.6,64", "not 256x256"),
        (
            tmp_path / "raw",
            "--size 16",
            "images of raw have one size, here 32x32 pixels.*warm up with `--codec dct-lz4`, or with `--size 16`",
        ),
    ):
        assert command("train", place, "--run", tmp_path / "run", "--backend", "torch", *options.split()) == 2
        assert re.search(words, " ".join(capsys.readouterr().err.split()))
        assert not (tmp_path / "run" / "last.pt").exists()


def test_the_data_of_a_run_have_the_size_of_its_evaluation(cache: Path) -> None:
    dataset = CachedDataset(cache)
    data = prepare_data(GROWING, dataset.select(range(100)), dataset.select(range(100, 140)), CpuDevice())
    assert data.valid_set is not None
    assert data.train_set.resolution == data.valid_set.resolution == 48
    assert (len(data.train_set), len(data.valid_set)) == (100, 40)


def test_the_size_of_the_evaluation_leaves_training_images_as_they_are(cache: Path, tmp_path: Path) -> None:
    dataset = CachedDataset(cache)
    parts = dataset.select(range(100)), dataset.select(range(100, 140))
    # The channels' statistics are those of the images in the evaluation.
    settings = replace(GROWING, epochs=1, grow=None, valid_size=None, mean=(127.0,) * 3, std=(60.0,) * 3)

    def trained(size: int | None) -> TrainReport:
        run, sized = tmp_path / f"run-{size}", replace(settings, valid_size=size)
        return train_on(run, sized, *parts)

    assert trained(None).losses == trained(32).losses
    names = "run-None", "run-32"
    rows = [csv.DictReader((tmp_path / name / "history.csv").read_text().splitlines()) for name in names]
    (plain,), (other,) = map(list, rows)
    assert plain["valid_loss"] != other["valid_loss"]
    assert other["size"] == "64"
