"""How a run is carried out, and what is predicted. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpucache.ondevice.settings import ResidentChoice
from tpucache.options import check_options, option
from tpucache.training.interrupt import StopRequest
from tpucache.training.pace import Account
from tpucache.training.run.state import Watcher
from tpucache.training.settings import TrainSettings


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out; no option changes a result.

    `checkpoint_every` is in steps; each epoch also ends in a checkpoint. `time_limit` is in seconds from the start of
    training; a given `stop` replaces it. `account` has counted the time before training. `resident` says whether
    records stay on the device. `replay`: when training has ended, repeat some steps on data that is already on the
    device, for at most 2 % of the run's time or 2 s, whichever is longer, to measure how fast they could have been.
    `curves` writes the curves as a picture, however the run ends. `watchers` are notified of losses and
    epochs. `on_epoch` is called with a line of text when an epoch has ended; a resumed run first repeats the lines of
    its earlier epochs. Progress is shown under the run's `name`. `following` is the number of runs of the same length
    that come after this one. `chosen` is the reason why this backend was chosen, for the report.
    """

    resume: bool = option(False, "continue the run in RUN, if there is one")
    checkpoint_every: int | None = option(
        None, "save a checkpoint every N steps, in addition to the end of each epoch", metavar="N", minimum=1
    )
    time_limit: float | None = option(None, "save and stop before this time is over; --resume continues", metavar="8h")
    stop: StopRequest | None = None
    account: Account | None = None
    resident: ResidentChoice = option(
        "auto",
        "keep the records in the device's memory, so that each is uploaded once; auto: if they fit into the memory "
        "that the first steps leave free",
    )
    replay: bool = True
    curves: bool = False
    tensorboard: bool = option(False, "also write losses and metrics for TensorBoard, to RUN/tensorboard")
    watchers: Sequence[Watcher] = ()
    on_epoch: Callable[[str], None] | None = None
    name: str = "train"
    following: int = 0
    chosen: str = ""

    def __post_init__(self) -> None:
        check_options(self)

    def needs_checkpoint(self, step: int, settings: TrainSettings) -> bool:
        """Return whether a checkpoint is due after a step, counted from 1.

        If several steps are one call of the device, it is due if `checkpoint_every` divides the number of any of them.
        """
        return self.checkpoint_every is not None and step % self.checkpoint_every < settings.steps_per_execution


@dataclass(frozen=True)
class PredictOptions:
    """What is predicted, and from which views of the images. `logits` and `features` are averaged over the views."""

    flip_tta: bool = option(False, "average with the predictions of images that are mirrored left to right")
    logits: bool = option(
        False, "also write each run's outputs before they become probabilities: out_logits.npy for out.csv"
    )
    features: bool = option(False, "also write the input of each run's last layer: out_features.npy for out.csv")
