"""A run is continued with its own data and settings, and with nothing else."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
from running import best_of, last_of, train_on

from tpucache import CachedDataset, UsageError
from tpucache.errors import TrainingError
from tpucache.training.device import CpuDevice
from tpucache.training.device.base import ALONE
from tpucache.training.loop import train
from tpucache.training.lr_finder import find_lr
from tpucache.training.options import RunOptions
from tpucache.training.run.files import hold_run
from tpucache.training.settings import TrainSettings
from tpucache.training.weights import load_checkpoint

SETTINGS = TrainSettings(model="tiny_models:tiny", epochs=1, batch_size=16)
OPTIONS = RunOptions(resume=True, replay=False)


def run_once(run, train_set, valid_set, settings=SETTINGS):
    return train(run, settings, train_set, valid_set, CpuDevice(), OPTIONS)


def fold(cache, number):
    """A fifth of the samples to validate on, and the others."""
    dataset, positions = CachedDataset(cache), np.arange(150)
    return dataset.select(positions[positions % 5 != number]), dataset.select(positions[positions % 5 == number])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["training", "validation"])
def test_a_run_is_not_resumed_with_another_fold_of_the_same_size(cache, tmp_path, part):
    (train_set, valid_set), (other_train, other_valid) = fold(cache, 0), fold(cache, 1)
    run_once(tmp_path, train_set, valid_set)
    others = (other_train, valid_set) if part == "training" else (train_set, other_valid)
    with pytest.raises(UsageError, match=f"the {part} data have changed"):
        run_once(tmp_path, *others)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["order", "no validation data", "variant"])
def test_a_run_is_not_resumed_with_data_that_differ_otherwise(cache, tmp_path, kind):
    train_set, valid_set = fold(cache, 0)
    run_once(tmp_path, train_set, valid_set)
    if kind == "order":
        train_set = train_set.select(range(len(train_set) - 1, -1, -1))
    elif kind == "variant":
        train_set = CachedDataset(cache, 1, [n for n in range(150) if n % 5])
    else:
        valid_set = None
    with pytest.raises(UsageError, match="data have changed"):
        run_once(tmp_path, train_set, valid_set)


@pytest.mark.slow
def test_a_run_without_its_last_checkpoint_is_not_begun_anew(cache, tmp_path):
    run_once(tmp_path, *fold(cache, 0))
    (tmp_path / "last.pt").unlink()
    best = (tmp_path / "best.pt").read_bytes()
    with pytest.raises(UsageError, match=r"not its last\.pt"):
        run_once(tmp_path, *fold(cache, 0))
    assert (tmp_path / "best.pt").read_bytes() == best


@pytest.mark.slow
def test_a_run_keeps_the_rate_that_it_began_with(cache, tmp_path):
    dataset, device, again = CachedDataset(cache), CpuDevice(), RunOptions(replay=False, resume=True)
    first = train(tmp_path, dataclasses.replace(SETTINGS, lr=0.05), dataset, None, device, again)
    assert train(tmp_path, SETTINGS, dataset, None, device, again).losses == first.losses
    with pytest.raises(UsageError, match=r"lr 0\.05, now 0\.06"):
        train(tmp_path, dataclasses.replace(SETTINGS, lr=0.06), dataset, None, device, again)


@pytest.mark.slow
def test_what_was_decided_of_rates_is_in_the_runs_files_and_its_report(cache, tmp_path):
    report = train_on(tmp_path, SETTINGS, CachedDataset(cache))
    for settings in (
        json.loads((tmp_path / "run.json").read_text())["settings"],
        best_of(tmp_path)["settings"],
        last_of(tmp_path)["settings"],
    ):
        assert None not in [settings[name] for name in ("lr", "weight_decay", "schedule")]
    assert any(line.startswith("optimizer  sgd, lr 0.099, weight decay") for line in report.lines())


def test_a_folder_in_which_another_process_trains_is_refused(cache, tmp_path):
    run, (train_set, valid_set) = tmp_path / "run", fold(cache, 0)
    with hold_run(run, ALONE):
        for resume in (False, True):
            with pytest.raises(UsageError, match=rf"{run} is being trained in by process {os.getpid()} on .*--resume"):
                train_on(run, SETTINGS, train_set, valid_set, resume=resume, replay=True)
        with pytest.raises(UsageError, match="is being trained in"):
            find_lr(run, SETTINGS, train_set, CpuDevice())
        assert [path.name for path in run.iterdir()] == ["run.lock"]
    assert not run.exists()


def test_a_run_whose_lock_is_taken_away_writes_no_checkpoint(cache, tmp_path, monkeypatch):
    settings, (train_set, valid_set) = dataclasses.replace(SETTINGS, epochs=2), fold(cache, 0)

    def take_away(_line):
        (tmp_path / "run.lock").unlink(missing_ok=True)

    with pytest.raises(TrainingError, match=r"run\.lock was removed or taken over"):
        train_on(tmp_path, settings, train_set, valid_set, on_epoch=take_away)
    if (tmp_path / "last.pt").exists():  # written before the first epoch was shown, or not at all
        assert load_checkpoint(tmp_path / "last.pt")["stand"]["rows"][-1]["epoch"] == 1


def test_a_lock_of_a_run_is_freed_when_it_ends_or_fails(cache, tmp_path):
    train_set, valid_set = fold(cache, 0)
    run_once(tmp_path, train_set, valid_set)
    with pytest.raises(UsageError, match="add --resume"):
        train_on(tmp_path, SETTINGS, train_set, valid_set, replay=True)
    assert not (tmp_path / "run.lock").exists()
    run_once(tmp_path, *fold(cache, 0))
