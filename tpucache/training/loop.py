"""The training loop, to be read once from top to bottom."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from tpucache.errors import TrainingError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.progress import Progress
from tpucache.store.files import write_atomically
from tpucache.training.augment import Normalise
from tpucache.training.checkpoint import save_checkpoint
from tpucache.training.device import Device
from tpucache.training.evaluate import Metrics, evaluate
from tpucache.training.feeder import Feeder
from tpucache.training.idle import Pace, PaceMeter
from tpucache.training.models import build_model
from tpucache.training.schedule import Rates, one_cycle

REPORT_NAME: Final = "report.json"


@dataclass(frozen=True)
class TrainSettings:
    """What a run is made of beside its data and its device. `batch_size` is global: all cores' together."""

    model: str = "resnet18"
    epochs: int = 5
    batch_size: int = 128
    lr: float = 0.1
    weight_decay: float = 5e-4
    bf16: bool = False
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch_size", 1), ("threads", 1), ("seed", 0)):
            if getattr(self, name) < low:
                raise UsageError(f"{name} is at least {low}, not {getattr(self, name)}")
        if not self.lr > 0:
            raise UsageError(f"lr is above 0, not {self.lr}")


@dataclass(frozen=True)
class TrainReport:
    """How a run went: losses step by step, the metrics after each epoch, and the pace after the warm-up."""

    backend: str
    cores: int
    losses: list[float]
    validation: list[Metrics]
    pace: Pace

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "validation": [metrics._asdict() for metrics in self.validation]}

    def lines(self) -> list[str]:
        """Return the report as lines for people."""
        pace = self.pace
        lines = [
            f"epoch {epoch:>3}  loss {metrics.loss:.4f}  accuracy {metrics.accuracy:.4f}  of {metrics.samples:,}"
            for epoch, metrics in enumerate(self.validation, 1)
        ]
        return [
            *lines,
            f"backend    {self.backend}, {self.cores} core{'s' * (self.cores > 1)}",
            f"rate       {pace.images_per_second:,.0f} images/s",
            f"step       {pace.step_seconds * 1e3:.1f} ms, mean of {pace.steps}",
            f"waited     {pace.waited:.1%} of that time for data",
            f"compiles   {pace.compiles} after the warm-up",
        ]


def train(
    run: Path, settings: TrainSettings, train_set: CachedDataset, valid_set: CachedDataset | None, device: Device
) -> TrainReport:
    """Train a model on a cache, evaluate it after each epoch, and leave a checkpoint and a report in `run`.

    Raises UsageError when data, batch and device do not fit, TrainingError when the loss is not finite; whatever the
    data raises in the middle of an epoch is raised here.
    """
    _check(settings, train_set, valid_set, device)
    run.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings.seed)  # the model's first weights, made on the host, are the same on every backend
    model = build_model(settings.model, len(train_set.classes)).to(device.torch_device)
    optimizer = make_optimizer(model, settings)
    statistics = train_set.manifest.statistics
    device.wait()  # or the first graph would also hold the making of weights and buffers, and be used only once
    normalise = Normalise(statistics.mean, statistics.std, device.torch_device)
    loader = CachedLoader(
        train_set, settings.batch_size, shuffle=True, seed=settings.seed, drop_last=True, threads=settings.threads
    )
    steps = settings.epochs * len(loader)

    def predict(images: torch.Tensor) -> torch.Tensor:
        with device.autocast(settings.bf16):
            scores: torch.Tensor = model(normalise(images))
        return scores

    def step(images: torch.Tensor, labels: torch.Tensor, rates: Rates) -> torch.Tensor:
        for group in optimizer.param_groups:
            group.update(lr=rates.lr, momentum=rates.momentum)
        loss = functional.cross_entropy(predict(images).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        device.step_end()
        return loss.detach()

    def validate(data: CachedDataset) -> Metrics:
        model.eval()
        metrics = evaluate(
            predict, CachedLoader(data, settings.batch_size, threads=settings.threads), device, settings.batch_size
        )
        model.train()
        return metrics

    if valid_set is not None:
        validate(valid_set.select(range(1)))  # compiles its graph, and fails before the first step if it fails at all
    losses: list[torch.Tensor] = []
    validation: list[Metrics] = []
    with (
        Feeder(_epochs(loader, settings.epochs), device) as feeder,
        Progress(steps * settings.batch_size, "train", "images") as progress,
    ):
        meter = PaceMeter(device, feeder, settings.batch_size)
        batches = iter(feeder)
        for epoch in range(settings.epochs):
            meter.resume()
            for batch in itertools.islice(batches, len(loader)):
                rates = one_cycle(len(losses), steps, settings.lr)
                losses.append(step(batch.images, batch.labels, rates))
                meter.step()
                progress.advance(settings.batch_size, f"epoch {epoch + 1} of {settings.epochs}")
            meter.pause()  # a sync point
            _check_finite(losses[-1], epoch)
            if valid_set is not None:
                validation.append(validate(valid_set))
    report = TrainReport(device.name, device.cores, [float(loss) for loss in losses], validation, meter.pace())
    save_checkpoint(
        run,
        {
            "settings": asdict(settings),
            "classes": list(train_set.classes),
            "mean": list(statistics.mean),
            "std": list(statistics.std),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "steps": steps,
        },
    )
    write_atomically(run / REPORT_NAME, json.dumps(report.to_dict(), indent=1).encode())
    return report


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Return SGD with Nesterov momentum whose buffers exist already: one step graph to compile instead of two."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=0.9, nesterov=True, weight_decay=settings.weight_decay
    )
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _epochs(loader: CachedLoader, epochs: int) -> Iterator[Any]:
    """Yield the batches of all epochs, so that the next epoch's first ones are uploaded while the last is evaluated."""
    for _ in range(epochs):
        yield from loader


def _check(settings: TrainSettings, train_set: CachedDataset, valid_set: CachedDataset | None, device: Device) -> None:
    if not train_set.classes:
        raise UsageError("the cache has no labels to train on: warm it up from a folder with one subfolder a class")
    if valid_set is not None and valid_set.classes != train_set.classes:
        raise UsageError(
            f"the validation cache has the classes {', '.join(valid_set.classes)}, "
            f"the training cache {', '.join(train_set.classes)}: they must be the same in the same order"
        )
    if valid_set is not None and valid_set.manifest.fields != train_set.manifest.fields:
        raise UsageError("the validation cache's images have another size than the training cache's")
    if len(train_set) < settings.batch_size:
        raise UsageError(f"{len(train_set)} training samples make no batch of {settings.batch_size}: give --batch-size")
    if settings.batch_size % device.cores:
        raise UsageError(f"a batch of {settings.batch_size} does not divide over {device.cores} cores")


def _check_finite(loss: torch.Tensor, epoch: int) -> None:
    if not bool(torch.isfinite(loss.cpu())):
        raise TrainingError(
            f"the loss is {float(loss)} at the end of epoch {epoch + 1}: try a lower --lr, or without --bf16"
        )
