"""A run from its first step to its report: what it needs, what it leaves, and that it can be left and resumed."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
from running import best_of, last_of, report_of, rows_of, train_on

from tpucache import CachedDataset, Recipe, TrainingError, UnfinishedError, UsageError, build_cache
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training.device import CpuDevice
from tpucache.training.settings import TrainSettings

FULL = TrainSettings(
    model="cnn",
    epochs=3,
    batch_size=32,
    accumulate=2,
    steps_per_execution=2,
    ema=0.9,
    clip=1.0,
    smoothing=0.1,
    augment=AugmentSettings(flip=True, shift=2, brightness=0.2, erase=0.3, mixup=0.4),
)


@pytest.mark.slow
def test_a_run_learns_and_leaves_its_report_history_and_checkpoints(cache, tmp_path):
    settings = TrainSettings(model="cnn", epochs=6, batch_size=16, lr=0.05)
    dataset = CachedDataset(cache)
    report = train_on(
        tmp_path, settings, dataset.select(range(0, 150, 2)), dataset.select(range(1, 150, 2)), replay=True
    )
    assert report.epochs[-1]["valid_accuracy"] > 0.6
    assert report_of(tmp_path)["losses"] == report.losses
    assert report.pace.steps == len(report.losses) - 2
    assert 0 <= report.pace.waited <= 1
    assert report.pace.ceiling_images_per_second > 0
    rows = rows_of(tmp_path / "history.csv")
    assert [int(row["step"]) for row in rows] == [4, 8, 12, 16, 20, 24]
    assert best_of(tmp_path)["classes"] == ["ant", "bee", "cat", "dog"]


@pytest.mark.slow
def test_parts_of_a_batch_learn_what_the_whole_batch_does(cache, tmp_path):
    # Without BatchNorm, whose statistics would be those of the parts.
    runs = {}
    for parts in (1, 3):
        settings = TrainSettings(model="tiny_tasks:linear", epochs=1, batch_size=30, accumulate=parts)
        runs[parts] = train_on(tmp_path / str(parts), settings, CachedDataset(cache)).losses
    assert runs[3] == pytest.approx(runs[1], rel=1e-5)


class StoppingDevice(CpuDevice):
    """Plain torch that does something after a number of executions of training steps have been sent."""

    def __init__(self, executions, action):
        super().__init__()
        self._left, self._action, self._is_training = executions, action, False

    def step_begin(self, seed):
        super().step_begin(seed)
        self._is_training = True

    def step_end(self):
        super().step_end()
        self._left -= self._is_training
        if self._is_training and self._left == 0:
            self._action()
        self._is_training = False


@pytest.mark.slow
def test_a_signal_saves_after_the_step_and_the_run_continues_from_there(cache, tmp_path):
    dataset = CachedDataset(cache)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="step 4 of 12"):
        train_on(
            tmp_path, FULL, dataset, device=StoppingDevice(2, lambda: os.kill(os.getpid(), signal.SIGTERM)), replay=True
        )
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(train_on(tmp_path, FULL, dataset, resume=True, replay=True).losses) == 12


def test_a_time_limit_ends_the_run_with_all_it_did_saved(cache, tmp_path):
    dataset = CachedDataset(cache)
    with pytest.raises(UnfinishedError, match="--resume"):
        train_on(tmp_path, FULL, dataset, time_limit=0.0, replay=True)
    assert len(last_of(tmp_path)["stand"]["losses"]) == 2


def test_a_run_is_not_written_over_and_not_resumed_with_other_settings(cache, tmp_path):
    dataset = CachedDataset(cache)
    valid = dataset[:20]
    settings = TrainSettings(model="cnn", epochs=1, batch_size=50)
    train_on(tmp_path, settings, dataset, valid)
    with pytest.raises(UsageError, match="--resume"):
        train_on(tmp_path, settings, dataset, valid)
    other = TrainSettings(model="cnn", epochs=2, batch_size=50, augment=AugmentSettings(flip=True))
    with pytest.raises(UsageError, match=r"epochs 1, now 2; flip False, now True"):
        train_on(tmp_path, other, dataset, valid, resume=True, replay=True)
    with pytest.raises(UsageError, match="samples 150, now 60"):
        train_on(tmp_path, settings, dataset.select(range(60)), valid, resume=True, replay=True)
    with pytest.raises(UsageError, match="the validation data have changed"):
        train_on(tmp_path, settings, dataset, dataset[20:40], resume=True, replay=True)


def test_a_cache_is_no_folder_for_a_run(cache, tmp_path):
    copied = shutil.copytree(cache, tmp_path / "copy")
    before = sorted(path.name for path in copied.iterdir())
    with pytest.raises(UsageError, match="is a cache: give another folder"):
        train_on(copied, TrainSettings(model="cnn", epochs=1, batch_size=50), CachedDataset(copied), replay=True)
    assert sorted(path.name for path in copied.iterdir()) == before


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_at_its_step(cache, tmp_path):
    settings = TrainSettings(model="cnn", epochs=2, batch_size=10, lr=1e30)
    with pytest.raises(TrainingError, match=r"in step \d.*--lr"):
        train_on(tmp_path, settings, CachedDataset(cache), replay=True)


def test_data_that_does_not_fit_is_refused_before_the_first_step(cache, photos, tmp_path):
    dataset = CachedDataset(cache)
    build_cache(photos / "ant", tmp_path / "flat", Recipe(size=16), jobs=1)
    flat = CachedDataset(tmp_path / "flat")
    with pytest.raises(UsageError, match="labels"):
        train_on(tmp_path, TrainSettings(batch_size=4), flat, replay=True)
    with pytest.raises(UsageError, match="validation data"):
        train_on(tmp_path, TrainSettings(batch_size=4), dataset, flat, replay=True)
    device = CpuDevice()
    device.cores = 8
    with pytest.raises(UsageError, match="divide over 8 cores"):
        train_on(tmp_path, TrainSettings(batch_size=20), dataset, device=device, replay=True)
