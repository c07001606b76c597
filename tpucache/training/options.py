"""How a run is carried out, as opposed to what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpucache.errors import UsageError
from tpucache.training.interrupt import StopRequest
from tpucache.training.run.history import Watcher
from tpucache.training.settings import TrainSettings


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out; none of it changes a number.

    `checkpoint_every` is in steps, beside the end of every epoch. `time_limit` is in seconds from the start of
    training; a `stop` that exists already takes its place. `replay` measures, after training, how fast it could have
    been. `curves` leaves them as a picture, however the run ends. `profile` is the folder for a trace of a few
    executions after the warm-up, which are slower and count all the same.
    """

    resume: bool = False
    checkpoint_every: int | None = None
    time_limit: float | None = None
    stop: StopRequest | None = None
    replay: bool = True
    curves: bool = False
    profile: str | Path | None = None
    watchers: Sequence[Watcher] = ()

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise UsageError(f"checkpoint_every is at least 1 step, not {self.checkpoint_every}")

    def needs_checkpoint(self, step: int, settings: TrainSettings) -> bool:
        """Return whether a checkpoint fell due in the execution that ended with this step."""
        return self.checkpoint_every is not None and step % self.checkpoint_every < settings.steps_per_execution
