"""train: what a cache is for."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.cli.options import add_cache, add_command, add_device, add_reading, in_memory, positive, seconds, staged
from tpucache.cli.terminal import note, show

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.records.reader import InMemory
    from tpucache.training.interrupt import StopRequest
    from tpucache.training.run.report import TrainReport
    from tpucache.training.settings import TrainSettings
    from tpucache.training.watch.tensorboard import TensorBoard


FIND: Final = "find"


def train(options: argparse.Namespace) -> int:
    """Train a model on a cache."""
    from tpucache.errors import UnfinishedError
    from tpucache.training.interrupt import StopRequest
    from tpucache.training.run.report import ensure_report

    try:
        # The time limit is the whole command's: it also counts copying, the range test and compiling.
        report = _run(options, StopRequest(options.time_limit))
    except (UnfinishedError, KeyboardInterrupt):
        report = ensure_report(options.run, options.backend, options.cores)
        if options.json:
            show(options, report.to_dict(), report.lines())
        raise
    show(options, report.to_dict(), report.lines())
    return 0


def _run(options: argparse.Namespace, stop: StopRequest) -> TrainReport:
    from tpucache.loading.dataset import CachedDataset
    from tpucache.training.device import open_device
    from tpucache.training.loop import train as run_training
    from tpucache.training.lr_finder import PNG_NAME, find_lr
    from tpucache.training.options import RunOptions

    settings = _settings(options)
    held = in_memory(options)
    data = CachedDataset(staged(options, lambda: stop.check(f"while copying to {options.stage}")), in_memory=held)
    train_set, valid_set = _split(data, options.valid, options.seed, held)
    device = open_device(options.backend, options.cores)
    if options.lr == FIND:
        settings = find_lr(options.run, settings, train_set, device, options.resume, stop)
        note(f"the highest learning rate is {settings.peak_lr:.3g}; {PNG_NAME} in {options.run} shows why")
    with contextlib.ExitStack() as stack:
        watchers = [stack.enter_context(_tensorboard(options.run))] if options.tensorboard else []
        run_options = RunOptions(
            resume=options.resume,
            checkpoint_every=options.checkpoint_every,
            stop=stop,
            curves=True,
            profile=options.profile,
            watchers=watchers,
        )
        return run_training(options.run, settings, train_set, valid_set, device, run_options)


def _tensorboard(run: Path) -> TensorBoard:
    from tpucache.training.watch.tensorboard import TensorBoard

    return TensorBoard(run / "tensorboard")


def _settings(options: argparse.Namespace) -> TrainSettings:
    """Return the settings that the options of the same names make."""
    from dataclasses import fields

    from tpucache.ondevice.augment import AugmentSettings
    from tpucache.training.settings import TrainSettings

    given = vars(options)
    augment = AugmentSettings(**{item.name: given[item.name] for item in fields(AugmentSettings)})
    named = {item.name: given[item.name] for item in fields(TrainSettings) if item.name != "augment"}
    if options.lr == FIND:
        del named["lr"]  # until it is found
    if options.per_core:
        named["batch_size"] *= options.cores
    return TrainSettings(**named, augment=augment)


def rate(text: str) -> float | str:
    """Read "find" or a number."""
    return text if text == FIND else float(text)


def _split(
    data: CachedDataset, valid: str | None, seed: int, held: InMemory
) -> tuple[CachedDataset, CachedDataset | None]:
    """Return what trains (every epoch another variant, where there are any) and what validates (the clean one)."""
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.samples.split import fold_split, stratified_split

    augmented = CachedDataset(data.directory, "epoch", in_memory=held) if data.manifest.augmented else data
    if valid is None:
        return augmented, None
    if valid.startswith("fold="):
        fold = fold_split(data.table, valid.removeprefix("fold="))
        return augmented.select(fold.train), data.select(fold.valid)
    try:
        fraction = float(valid)
    except ValueError:
        return augmented, CachedDataset(valid, in_memory=held)
    split = stratified_split(data.labels.numpy(), fraction, seed)
    return augmented.select(split.train), data.select(split.valid)


def add(commands: Any) -> None:
    """Add train."""
    command = add_command(commands, train, "cache/train --run runs/first --valid 0.2 --backend xla --cores 8")
    add_cache(command)
    command.add_argument("--run", type=Path, required=True, metavar="RUN", help="the folder for what the run leaves")
    command.add_argument("--valid", metavar="CACHE|FRACTION|fold=N", help="what to validate on after each epoch")
    add_device(command)
    command.add_argument("--resume", action="store_true", help="continue the run in RUN, if there is one")
    command.add_argument("--checkpoint-every", type=positive, metavar="N", help="steps, beside each epoch's end")
    command.add_argument("--time-limit", type=seconds, metavar="8h", help="save and stop before; --resume continues")
    command.add_argument("--tensorboard", action="store_true", help="write scalars to RUN/tensorboard")
    command.add_argument("--profile", type=Path, metavar="DIR", help="trace a few steps after the warm-up there")
    _add_learning(command)
    _add_augmentation(command)
    add_reading(command)


def _add_learning(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("what is learned, and how")
    add = group.add_argument
    add(
        "--model",
        default="resnet18",
        metavar="NAME",
        help="cnn, resnet18 …, timm:NAME, or module:callable of a number of outputs",
    )
    add(
        "--task",
        choices=["auto", "classes", "multilabel", "regression", "mask"],
        default="auto",
        help="what labels mean; auto: by what they are",
    )
    add("--mask-classes", type=positive, metavar="N", help="classes of the masks, for the task mask")
    add("--epochs", type=positive, default=5, metavar="N", help="times through the data")
    add("--batch-size", type=positive, default=128, metavar="B", help="samples a step, all cores' together")
    add("--per-core", action="store_true", help="--batch-size is one core's")
    add("--accumulate", type=positive, default=1, metavar="N", help="send each batch in N parts, to save memory")
    add("--steps-per-execution", type=positive, default=1, metavar="K", help="make K steps one graph")
    add("--optimizer", choices=["sgd", "adamw"], default="sgd", help="SGD has Nesterov momentum")
    add(
        "--schedule",
        choices=["one-cycle", "warmup-cosine", "constant"],
        default="one-cycle",
        help="of rate, momentum",
    )
    add("--lr", type=rate, default=0.1, metavar="X|find", help="the highest learning rate; find: by a range test")
    add(
        "--scale",
        choices=["none", "linear", "sqrt"],
        default="none",
        help="how --lr grows with the batch, from what is right for 256",
    )
    add(
        "--warmup",
        type=float,
        metavar="SHARE",
        help="of the steps in which the rate rises",
    )
    add("--weight-decay", type=float, default=5e-4, metavar="X", help="not of biases and norms")
    add("--smoothing", type=float, default=0.0, metavar="X", help="of labels")
    add("--class-weights", choices=["none", "balanced"], default="none", help="balanced: rare classes count more")
    add("--clip", type=float, metavar="NORM", help="largest norm of all gradients together")
    add("--ema", type=float, metavar="DECAY", help="evaluate averaged weights, such as of decay 0.999")
    add("--bf16", action="store_true", help="matrix products in bfloat16")
    add("--normalise", choices=["cache", "imagenet"], default="cache", help="by whose mean and deviation")
    add("--loss", metavar="module:name", help="of (outputs, labels); labels are soft where they are smoothed or mixed")
    add("--train-step", metavar="module:name", help="of (model, batch), a dict of tensors: the loss of one batch")
    add("--eval-step", metavar="module:name", help="of (model, batch): the outputs for one batch")
    add("--seed", type=int, default=0, metavar="N", help="of weights, order, split and augmentation")


def _add_augmentation(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("augmentation", "done on the device to whole batches, anew in every step")
    add = group.add_argument
    add("--flip", action="store_true", help="left and right")
    add("--vertical-flip", action="store_true", help="top and bottom")
    add("--shift", type=int, default=0, metavar="PIXELS", help="each way, the border reflected")
    add("--rotate", action="store_true", help="by right angles")
    add("--brightness", type=float, default=0.0, metavar="X", help="a factor between 1 - X and 1 + X")
    add("--contrast", type=float, default=0.0, metavar="X", help="likewise")
    add("--saturation", type=float, default=0.0, metavar="X", help="likewise")
    add("--erase", type=float, default=0.0, metavar="P", help="probability of a rectangle of the mean colour")
    add("--mixup", type=float, default=0.0, metavar="ALPHA", help="mix images of a batch")
    add("--cutmix", type=float, default=0.0, metavar="ALPHA", help="put a piece of one image into another")
