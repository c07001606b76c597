"""A model with everything that changes while it learns, and the two things done with it: a step, and predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tpucache.callables import load_callable
from tpucache.errors import TrainingError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.training.augment import Augment
from tpucache.training.device import Device
from tpucache.training.ema import Ema
from tpucache.training.feeder import IMAGE, LABEL, DeviceBatch
from tpucache.training.models import build_model
from tpucache.training.optimizers import clip_gradients, make_optimizer, set_rates
from tpucache.training.schedule import Rates
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks import Task

#: ImageNet's channels, in 0..255: what weights from elsewhere were mostly trained with.
IMAGENET: Final = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
TARGET: Final = "target"
MASK: Final = "mask"

Inputs = dict[str, torch.Tensor]


class Learner:
    """One model learning one task on one device.

    `step` is one step of the optimizer, `predict` the outputs for a batch. A batch's images come to the model as
    float32 (batch, channels, height, width); a model of records without an image gets their fields by name.
    """

    def __init__(self, settings: TrainSettings, dataset: CachedDataset, task: Task, device: Device) -> None:
        """Make the model, its weights from the seed alone, and what goes with it. Raises UsageError."""
        self.settings, self.task, self.device = settings, task, device
        torch.manual_seed(settings.seed)  # weights are made on the host, so that they are the same on every backend
        model = build_model(settings.model, task.outputs)
        self.mean, self.std = channel_statistics(settings, dataset)
        self._augment = _augment(settings, dataset, self.mean, self.std, device)
        weights = (
            None
            if settings.class_weights == "none"
            else task.weights(settings.class_weights, host_labels(task, dataset))
        )
        self._weights = None if weights is None else weights.to(device.torch_device)
        self._loss = named_callable(settings.loss)
        self._train_step, self._eval_step = named_callable(settings.train_step), named_callable(settings.eval_step)
        if self._eval_step is None:
            self._check(model, dataset)
        self.model = device.place(model)
        self.optimizer = make_optimizer(self.model, settings.optimizer, settings.peak_lr, settings.weight_decay)
        self.ema = None if settings.ema is None else Ema(self.model, settings.ema)
        device.wait()  # or the first graph would also hold the making of weights and buffers, and be used only once

    def step(self, batches: Sequence[DeviceBatch], rates: Rates, number: int) -> torch.Tensor:
        """Learn from the parts of one batch; return their mean loss, on the device. `number` seeds what is random.

        The step is recorded, not sent: `device.step_end` does that, once or once for several steps.
        """
        self.device.step_begin(step_seed(self.settings.seed, number))
        set_rates(self.optimizer, rates)
        total: torch.Tensor | None = None
        for batch in batches:
            loss = self._batch_loss(batch) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total = loss.detach() if total is None else total + loss.detach()
        if total is None:
            raise UsageError("a step needs a batch")
        if self.settings.clip is not None:
            clip_gradients(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        return total

    def predict(self, batch: DeviceBatch) -> torch.Tensor:
        """Return the model's outputs for a batch as it is in the cache: float32, the batch first."""
        normalise = None if self._augment is None else self._augment.plain
        return outputs_of(self.model, batch, self.device, self.settings.bf16, normalise, self._eval_step)

    def labels(self, batch: DeviceBatch) -> torch.Tensor:
        """Return what a batch's outputs are held against."""
        return class_map(batch.fields[MASK]) if self.task.name == MASK else batch.labels

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes: model, optimizer, averaged weights."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state if self.ema is None else {**state, "ema": self.ema.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the learner whose state this was, exactly. Raises TrainingError when it was another model's."""
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise TrainingError(f"the checkpoint does not fit this model: {error}") from error
        if self.ema is not None:
            self.ema.load_state_dict(state.get("ema", {}))
        self.device.wait()

    def best_weights(self) -> dict[str, torch.Tensor]:
        """Return a copy, on the host, of the weights that are evaluated."""
        with self.evaluated() as model:
            return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """Give the model in evaluation, with the averaged weights where there are any."""
        with contextlib.ExitStack() as stack:
            if self.ema is not None:
                stack.enter_context(self.ema.applied())
            self.model.eval()
            try:
                yield self.model
            finally:
                self.model.train()

    def _batch_loss(self, batch: DeviceBatch) -> torch.Tensor:
        inputs, labels = {**batch.fields}, self.labels(batch)
        augment, draws = self._augment, batch.draws
        if augment is not None and draws is not None:
            inputs[IMAGE] = augment.images(batch.images, draws)
            if self.task.name == MASK:
                labels = inputs[MASK] = augment.masks(labels, draws)
        elif augment is not None:
            inputs[IMAGE] = augment.plain(batch.images)
        soft = self._loss is None or bool(self.settings.smoothing) or self.settings.augment.mixes
        targets = self.task.targets(labels, self.settings.smoothing) if soft else labels
        if augment is not None and draws is not None:
            inputs[IMAGE], targets = augment.mix(inputs[IMAGE], targets, draws)
            inputs[IMAGE] = self.device.laid_out(inputs[IMAGE])
        with self.device.autocast(self.settings.bf16):
            if self._train_step is not None:
                loss: torch.Tensor = self._train_step(self.model, {**inputs, LABEL: batch.labels, TARGET: targets})
                return loss.float()
            outputs = forward(self.model, inputs).float()
        if self._loss is not None:
            return self._loss(outputs, targets)  # type: ignore[no-any-return]  # somebody's own function
        return self.task.loss(outputs, targets, self._weights)

    def _check(self, model: nn.Module, dataset: CachedDataset) -> None:
        """Run two samples through the model on the host, to tell in words what would be a shape error in a graph."""
        sample = {
            field.name: dataset.as_tensor(field.name, np.zeros((2, *field.shape), field.dtype))
            for field in dataset.manifest.fields
        }
        if IMAGE in sample:
            sample[IMAGE] = sample[IMAGE].float()
        model.eval()
        try:
            with torch.no_grad():
                outputs = forward(model, sample)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            told = ", ".join(f"{name} {tuple(tensor.shape[1:])}" for name, tensor in sample.items())
            raise UsageError(f"the model {self.settings.model!r} cannot take this cache's {told}: {error}") from error
        finally:
            model.train()
        check_outputs(self.settings.model, self.task, outputs)


def check_outputs(model: str, task: Task, outputs: Any) -> None:
    """Raise UsageError unless a model's outputs for two samples are what the task's labels ask for."""
    shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else None
    if shape is None or shape[:2] != (2, task.outputs) or len(shape) != (4 if task.name == MASK else 2):
        told = type(outputs).__name__ if shape is None else shape
        each = "a pixel" if task.name == MASK else "a sample"
        raise UsageError(
            f"the model {model!r} gives {told} for 2 samples, the labels ask for {task.outputs} numbers {each}: "
            "use a model with so many outputs"
        )


def host_labels(task: Task, dataset: CachedDataset) -> npt.NDArray[Any]:
    """Return all labels of a dataset, or all its masks: (n, …)."""
    if task.name != MASK:
        return dataset.labels.numpy()
    return np.stack([class_map(dataset[position][MASK]).numpy() for position in range(len(dataset))])


def class_map(mask: torch.Tensor) -> torch.Tensor:
    """Return masks (…, height, width) of those in a cache, which have one channel: (…, height, width, 1)."""
    return mask[..., 0]


def forward(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Call a model with the image, or, without one, with all fields by name."""
    outputs: torch.Tensor = model(inputs[IMAGE]) if IMAGE in inputs else model(**inputs)
    return outputs


def outputs_of(
    model: nn.Module,
    batch: DeviceBatch,
    device: Device,
    bf16: bool,
    normalise: Callable[[torch.Tensor], torch.Tensor] | None,
    eval_step: Callable[..., torch.Tensor] | None,
) -> torch.Tensor:
    """Return what a model in evaluation gives for a batch as it is in the cache: float32, the batch first."""
    inputs = {**batch.fields}
    if normalise is not None:
        inputs[IMAGE] = normalise(batch.images)
    with device.autocast(bf16):
        outputs = forward(model, inputs) if eval_step is None else eval_step(model, {**inputs, LABEL: batch.labels})
    return outputs.float()


def step_seed(seed: int, number: int) -> int:
    """Return what seeds the device's generator in one step."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def channel_statistics(settings: TrainSettings, dataset: CachedDataset) -> tuple[list[float], list[float]]:
    """Return mean and deviation of the channels, in 0..255: the cache's own or ImageNet's. Raises UsageError."""
    statistics = dataset.manifest.statistics
    if settings.normalise == "cache" or IMAGE not in dataset.names:
        return list(statistics.mean), list(statistics.std)
    mean, std = IMAGENET
    if len(statistics.mean) != len(mean):
        raise UsageError(f"ImageNet's statistics are of 3 channels, the cache's images have {len(statistics.mean)}")
    return list(mean), list(std)


def _augment(
    settings: TrainSettings, dataset: CachedDataset, mean: Sequence[float], std: Sequence[float], device: Device
) -> Augment | None:
    if IMAGE not in dataset.names:
        if settings.augment != type(settings.augment)():
            raise UsageError("the cache has no images to augment: leave the augmentations out")
        return None
    height, width = dataset.manifest.fields[dataset.names.index(IMAGE)].shape[:2]
    return Augment(settings.augment, mean, std, height, width, device.torch_device)


def named_callable(name: str | None) -> Callable[..., Any] | None:
    """Return the callable that a setting names, if it names one. Raises UsageError."""
    return None if name is None else load_callable(name)
