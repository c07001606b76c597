"""The way of a learner through its epochs: the steps, and what follows each epoch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.training.augment import draw
from tpucache.training.curves import save_curves
from tpucache.training.evaluate import compile_evaluation, evaluate
from tpucache.training.feeder import IMAGE, DeviceBatch, Draw
from tpucache.training.folder import Stand, save_best, save_run
from tpucache.training.history import Losses, Row, Watcher
from tpucache.training.idle import Pace
from tpucache.training.learner import Learner
from tpucache.training.schedule import make_schedule
from tpucache.training.settings import TrainSettings

#: What makes one epoch's weights better than another's, and whether more of it is better.
_WATCHED: Final = {
    "classes": ("accuracy", True),
    "multilabel": ("loss", False),
    "regression": ("rmse", False),
    "mask": ("iou", True),
}


Execution = Sequence[Sequence[DeviceBatch]]  # of each step in one graph, the parts of its batch


class Course:
    """The way of a learner through its epochs."""

    def __init__(
        self,
        run: Path,
        learner: Learner,
        train_set: CachedDataset,
        valid_set: CachedDataset | None,
        stand: Stand,
        watchers: Sequence[Watcher],
    ) -> None:
        settings = learner.settings
        self._run, self._learner, self._settings, self._watchers = run, learner, settings, watchers
        self._train_set, self._valid_set = train_set, valid_set
        self.losses = Losses(stand.losses, watchers)
        self.rows, self.best, self.done = list(stand.rows), stand.best, stand.steps
        self.per_epoch = steps_per_epoch(len(train_set), settings)
        self.steps = settings.epochs * self.per_epoch
        self._schedule = make_schedule(settings.schedule, self.steps, settings.peak_lr, settings.warmup)
        self._last: Execution = []

    def parts(self) -> Iterator[Any]:
        """Yield all parts of all batches that are left, epoch after epoch.

        One stream, so that the next epoch's first batches are uploaded while the last one is evaluated.
        """
        settings = self._settings
        loader = CachedLoader(
            self._train_set,
            settings.part_size,
            shuffle=True,
            seed=settings.seed,
            drop_last=True,
            threads=settings.threads,
        )
        done = self.done
        for epoch in range(done // self.per_epoch, settings.epochs):
            start = max(0, done - epoch * self.per_epoch)
            loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "position": start * settings.batch_size})
            yield from itertools.islice(loader, (self.per_epoch - start) * settings.accumulate)

    def epoch(self, parts: Iterator[DeviceBatch]) -> Iterator[int]:
        """Take the steps left of an epoch, as many at a time as make one graph; yield the images they saw."""
        settings = self._settings
        end = self.done - self.done % self.per_epoch + self.per_epoch
        while self.done < end:
            self._last = [
                list(itertools.islice(parts, settings.accumulate)) for _ in range(settings.steps_per_execution)
            ]
            for batch in self._last:
                self.losses.append(self._learner.step(batch, self._schedule(self.done), self.done))
                self.done += 1
            self._learner.device.step_end()
            yield len(self._last) * settings.batch_size

    def compile_evaluation(self) -> None:
        """Compile what follows each epoch, where there is something to validate on."""
        if self._valid_set is not None:
            compile_evaluation(self._learner, self._valid_set)

    def replay(self) -> None:
        """Take the last steps once more, on batches that are on the device; the weights are no longer needed."""
        for batch in self._last:
            self._learner.step(batch, self._schedule(self.steps - 1), self.steps - 1)
        self._learner.device.step_end()

    def end_epoch(self, pace: Pace) -> None:
        """Evaluate, tell, and save what is best and what is last."""
        self.losses.settle()
        metrics = {} if self._valid_set is None else evaluate(self._learner, self._valid_set)
        row: Row = {
            "epoch": self.done // self.per_epoch,
            "step": self.done,
            "lr": self._schedule(self.done - 1).lr,
            "train_loss": sum(self.losses.values[-self.per_epoch :]) / self.per_epoch,
            **{f"valid_{name}": value for name, value in metrics.items()},
        }
        self.rows.append(row)
        # The pace is only told: a run that is resumed ends in the same rows.
        told = {**row, "images_per_second": pace.images_per_second, "waited": pace.waited}
        for watcher in self._watchers:
            watcher.epoch(told)
        value = _watched(self._learner.task.name, metrics)
        if value is None or self.best is None or value > self.best:
            self.best = value
            save_best(self._run, self._learner, self._train_set)
        self.save()

    def due(self, every: int | None) -> bool:
        """Return whether a checkpoint fell due in the last execution; the end of an epoch has one anyway."""
        ended = not self.done % self.per_epoch
        return every is not None and not ended and self.done % every < self._settings.steps_per_execution

    def save(self) -> None:
        """Write the checkpoint to go on from."""
        self.losses.settle()
        save_run(self._run, self._learner, self._train_set, Stand(self.done, self.losses.values, self.rows, self.best))

    @contextlib.contextmanager
    def drawn(self, wanted: bool) -> Iterator[None]:
        """Leave the run's curves, if they are wanted, however it ends."""
        try:
            yield
        finally:
            losses = self.losses.values
            if wanted and losses:
                save_curves(self._run, losses, [self._schedule(step).lr for step in range(len(losses))], self.rows)

    def told(self) -> str:
        """Say where the run is."""
        loss = f", loss {self.losses.values[-1]:.3f}" if self.losses.values else ""
        return f"epoch {-(-self.done // self.per_epoch)} of {self._settings.epochs}{loss}"


def drawer(settings: TrainSettings, train_set: CachedDataset) -> Draw | None:
    """Return what draws the random numbers that go up with each part of a batch; None for records without an image."""
    if IMAGE not in train_set.names:
        return None
    return lambda number: draw(settings.augment, settings.seed, number, settings.part_size)


def steps_per_epoch(samples: int, settings: TrainSettings) -> int:
    """Return an epoch's steps: whole batches only, and a whole number of executions."""
    steps = samples // settings.batch_size
    return steps - steps % settings.steps_per_execution


def _watched(task: str, metrics: dict[str, float]) -> float | None:
    """Return what is to be as high as possible; None where nothing was evaluated."""
    name, more = _WATCHED[task]
    if name not in metrics:
        return None
    return metrics[name] if more else -metrics[name]
