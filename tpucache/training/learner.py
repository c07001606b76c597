"""A model with everything that changes during training. It takes optimizer steps and computes predictions."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from tpucache.errors import TrainingError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.ondevice.modules import Augment
from tpucache.plugins import load_callable
from tpucache.store.fields import IMAGE, LABEL
from tpucache.training.defaults import Decided, decide_settings
from tpucache.training.device import Device
from tpucache.training.device.base import DeviceBatch
from tpucache.training.device.tensors import to_host
from tpucache.training.forward import (
    FinishBatch,
    autocast,
    check_model,
    describe_differences,
    forward,
    has_given_up,
    make_augment,
    make_finish,
    make_scaler,
    model_name,
    outputs_of,
)
from tpucache.training.metrics import MORE_IS_BETTER
from tpucache.training.optimizers import (
    Ema,
    buffers_of_steps,
    clip_gradients,
    freeze,
    load_optimizer,
    make_optimizer,
    scale_gradients,
    set_rates,
)
from tpucache.training.schedule import Rates, make_schedule
from tpucache.training.settings import TrainSettings, in_size
from tpucache.training.tasks.find import find_watched
from tpucache.training.tasks.regression import Regression, describe_labels
from tpucache.training.tasks.task import Task
from tpucache.training.user_code import check_loss, load_metrics, user_code
from tpucache.training.weights import MatchedWeights, load_matching

TARGET: Final = "target"
_LEAST_SHARE: Final = 1e-9  # avoids a division by 0: without targets the loss is 0
DIVERGED_ADVICE: Final = "Try a lower --lr, --clip 1, or --precision float32"


class Learner:
    """One model that learns one task on one device.

    `step` takes one step of the optimizer; `predict` returns a batch's outputs. The model gets a batch's images as
    float32 (batch, channels, height, width); with records that have no image, it gets their fields by name.
    """

    def __init__(
        self,
        settings: TrainSettings | Decided,
        dataset: CachedDataset,
        task: Task,
        device: Device,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Make a model, its optimizer and, if the settings ask for it, its moving average.

        Settings without a value are decided; `Decided` settings come with their model. `weights`, if given, are loaded
        into the model. Raises UsageError if settings, data, task and model do not fit together.
        """
        self.device = device
        decided = settings if isinstance(settings, Decided) else decide_settings(settings, dataset, task, device)
        self.decided, self.settings = decided, decided.settings
        settings, model = decided.settings, decided.model
        #: The task, and advice for training that diverges.
        self.task, self.advice = _find_learned(settings, dataset, task)
        #: Which of the given weights the model has taken, and how the images differ from those of these weights'
        #: training.
        self.matched: MatchedWeights | None = None
        self.image_differences = ""
        if weights is not None:
            self.matched = load_matching(model, weights, str(settings.weights))
            self.image_differences = describe_differences(settings, dataset, model)
        self._frozen_norms = freeze(model, settings.freeze)
        self.mean, self.std = [*(settings.mean or ())], [*(settings.std or ())]
        self._dataset = dataset
        self._finishing: dict[int | None, tuple[FinishBatch, Augment | None]] = {}
        for size in dict.fromkeys(settings.sizes.epochs):  # impossible sizes raise errors now, not after hours
            self.resize(size)
        self.resize(settings.sizes.at(0))
        self._steps = 0
        self._loss = named_callable(settings.own_loss)
        self.watched = find_watched(task, settings)
        #: The metrics of `--metric` by name.
        self.metrics = load_metrics(settings.metric, (*MORE_IS_BETTER, "samples"))
        self._train_step, self._eval_step = named_callable(settings.train_step), named_callable(settings.eval_step)
        if self._eval_step is None:
            check_model(model, settings, task, dataset)
        self._finite = [name for name, tensor in model.state_dict().items() if tensor.isfinite().all()]
        self.model = device.place(model)
        self._train_mode()
        self.optimizer = self._make_optimizer()
        self._scaler = make_scaler(device, settings.precision)
        self._shared_loss = device.processes.replicate(self.model, self._loss_of)
        self.ema = None if settings.ema is None else Ema(self.model, settings.ema)
        device.wait()  # otherwise the first graph would also make the weights, and be used only once

    def resize(self, size: int | None) -> None:
        """From now on take batches of images of this size, in pixels; None is the dataset's own size."""
        if size not in self._finishing:
            shown = in_size(self._dataset, size)
            finish = make_finish(shown, self.device)
            self._finishing[size] = finish, make_augment(self.settings, shown, self.mean, self.std, self.device)
        self._finish, self._augment = self._finishing[size]

    def step(self, batches: Sequence[DeviceBatch], rates: Rates, number: int) -> torch.Tensor:
        """Take one optimizer step on the parts `batches` of a batch; return their mean loss, a scalar on the device.

        The step's `number` in the run seeds the random numbers. The step is only recorded; `device.step_end` sends it.
        Several processes average the gradients; the parts and the loss are this process's. If a loss counts only some
        targets, such as pixels that have a class, each part is weighted by their number, so that the step equals that
        of the whole batch. Raises UsageError for no part, or a part without samples.
        """
        self._steps, processes = number + 1, self.device.processes
        self.device.step_begin(step_seed(self.settings.seed, number, processes.program))
        set_rates(self.optimizer, rates)
        total: torch.Tensor | None = None
        weighs, shares = len(batches) * processes.world_size > 1, []
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            if not len(batch.labels):
                raise UsageError("a step needs samples, and this batch has none: its loss would be NaN")
            loss, share = self._shared_loss(self._finish(batch.gathered()), left == 0)
            loss = loss / len(batches)
            if weighs and share is not None:
                shares.append(share)
                loss = loss * share
            with user_code(f"the gradient of {model_name(self.settings)}", batch.fields), processes.explained():
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch does not type it
            total = loss.detach() if total is None else total + loss.detach()
        if total is None:
            raise UsageError("a step needs at least one part of a batch, and none was given")
        if shares:
            factor = 1 / processes.mean_on_device(torch.stack(shares).mean()).clamp(min=_LEAST_SHARE)
            scale_gradients(self.model.parameters(), factor)
            total = total * factor
        processes.check_gradients(self.model)
        processes.share_buffers(buffers_of_steps(self.model))
        if self.settings.clip is not None:
            self._scaler.unscale_(self.optimizer)
            clip_gradients(self.model.parameters(), self.settings.clip)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        return total

    def predict(self, batch: DeviceBatch) -> torch.Tensor:
        """Return the model's outputs, float32 (batch, …), for a batch of decoded images."""
        normalise = None if self._augment is None else self._augment.plain
        if self._eval_step is not None:
            batch = replace(batch, labels=self.task.as_stored(batch.labels))
        return outputs_of(self.model, batch, self.device, self.settings, self.task, normalise, self._eval_step)

    @functools.cached_property
    def schedule(self) -> Callable[[int], Rates]:
        """The function that returns the rates of a step, given the step's number in the run."""
        settings = self.settings
        steps = settings.passes * settings.steps_per_epoch(len(self._dataset))
        return make_schedule(str(settings.schedule), steps, settings.peak_lr)

    @property
    def part_size(self) -> int:
        """The number of samples that this process sends to its device at once."""
        return self.settings.part_size // self.device.processes.world_size

    def losses(self, outputs: torch.Tensor, labels: torch.Tensor, rows: int) -> torch.Tensor:
        """Return each sample's loss, float32 (batch,); the rows after the first `rows` are padding.

        A user's loss is one number for a batch; each sample of the batch gets that number.
        """
        if self._loss is None:
            return self.task.losses(outputs, labels)
        targets = self.task.targets(labels) if self._is_soft else labels
        name, outputs, targets = f"the loss {self.settings.loss!r}", outputs[:rows], targets[:rows]
        with autocast(self.device, self.settings.precision), user_code(name, {"outputs": outputs, TARGET: targets}):
            loss = self._loss(outputs, targets)
        return check_loss(loss, name, learns=False).repeat(len(labels))

    def labels(self, batch: DeviceBatch) -> torch.Tensor:
        """Return the labels to compare a batch's outputs with."""
        return self.task.labels(batch.fields, batch.labels)

    @property
    def position(self) -> str:
        """Where in the run the learner is, for messages: after which step, or where the run was continued."""
        return f"after step {self._steps:,}" if self._steps else "where the run was continued"

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes during training, by name, and the constants that the task has from the labels."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self._scaler.is_enabled():
            state["scaler"] = self._scaler.state_dict()
        if constants := self.task.constants():
            state["labels"] = constants
        return state if self.ema is None else {**state, "ema": self.ema.state_dict()}

    def checked_state(self) -> dict[str, Any]:
        """Return `state_dict`, copied to the host.

        Raises TrainingError when training has diverged: weights are infinite or NaN, or gradients stay so however small
        fp16's losses are scaled.
        """
        state: dict[str, Any] = to_host(self.state_dict(), copy=True)
        self._check_finite(state["model"])
        if has_given_up(state.get("scaler", {})):
            raise TrainingError(
                f"the gradients are not finite {self.position}, however small the loss is scaled: nothing is learned. "
                f"{self.advice}. Earlier checkpoints are kept"
            )
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises TrainingError for the state of another model, or with other labels.
        """
        try:
            self.task = self.task.with_constants(state.get("labels", {}))
            self.model.load_state_dict(state["model"])
            load_optimizer(self.optimizer, state["optimizer"])
            if self._scaler.is_enabled():
                self._scaler.load_state_dict(state["scaler"])
        except (RuntimeError, ValueError, KeyError, UsageError) as error:
            raise TrainingError(
                f"the checkpoint does not fit this model: {error}. Resume with the settings of the checkpoint"
            ) from error
        if self.ema is not None:
            self.ema.load_state_dict(state.get("ema", {}))
        self.device.wait()

    def best_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that `evaluated` uses, copied to the host.

        Raises TrainingError when training has diverged.
        """
        with self.evaluated() as model:
            weights: dict[str, torch.Tensor] = to_host(model.state_dict(), copy=True)
        self._check_finite(weights)
        return weights

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """Return a context with the model in evaluation mode, and with the averaged weights if there are any."""
        with contextlib.ExitStack() as stack:
            if self.ema is not None:
                stack.enter_context(self.ema.applied())
            self.model.eval()
            try:
                yield self.model
            finally:
                self._train_mode()

    def _train_mode(self) -> None:
        self.model.train()
        for norm in self._frozen_norms:
            norm.eval()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        settings = self.settings
        return make_optimizer(
            self.model,
            self.decided.optimizer,
            settings.peak_lr,
            settings.weight_decay or 0.0,
            layer_decay=settings.layer_decay,
            fused=self.device.has_fused_optimizers,
            capturable=self.device.name == "xla",
        )

    def _check_finite(self, weights: Mapping[str, torch.Tensor]) -> None:
        bad = [name for name in self._finite if not weights[name].isfinite().all()]
        if bad:
            raise TrainingError(
                f"{len(bad)} of the model's tensors, such as {bad[0]!r}, are not finite {self.position}: training has "
                f"diverged. {self.advice}. Earlier checkpoints are kept"
            )

    def _loss_of(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The share is None if all targets count, and for the user's loss or step."""
        inputs, labels, targets = self._augmented(batch)
        with autocast(self.device, self.settings.precision):
            if self._train_step is not None:
                inputs = {**inputs, LABEL: labels, TARGET: targets}
                name = f"the step {self.settings.train_step!r}"
                return _call_loss(name, self._train_step, self.model, inputs, inputs), None
            with user_code(model_name(self.settings), inputs):
                outputs = forward(self.model, inputs).float()
        if self._loss is None:
            return self.task.loss(outputs, targets), self.task.share(targets)
        values = {"outputs": outputs, TARGET: targets}
        return _call_loss(f"the loss {self.settings.loss!r}", self._loss, outputs, targets, values), None

    @property
    def _is_soft(self) -> bool:
        return self._loss is None or bool(self.settings.smoothing) or self.settings.augment.mixes

    def _augmented(self, batch: DeviceBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        augment, draws, settings = self._augment, batch.draws, self.settings
        inputs = {**batch.fields} if augment is None else augment.fields(batch.fields, draws)
        given = batch.labels if augment is None or draws is None else augment.views(batch.labels)
        labels = self.task.labels(inputs, given)
        targets = self.task.targets(labels, settings.smoothing) if self._is_soft else labels
        if augment is not None and draws is not None:
            images, targets = augment.mix(inputs[IMAGE], targets, draws, self.device.processes.roll)
            inputs[IMAGE] = self.device.to_layout(images)
        return inputs, given, targets


@contextlib.contextmanager
def preserved(learner: Learner) -> Iterator[None]:
    with learner.device.preserve_rng():  # before anything else: on XLA, even waiting advances the generator
        learner.device.wait()
        state = copy.deepcopy(to_host(learner.state_dict()))
        try:
            yield
        finally:
            learner.device.wait()
            learner.load_state_dict(state)


def _find_learned(settings: TrainSettings, dataset: CachedDataset, task: Task) -> tuple[Task, str]:
    # The user's own loss or step gets the labels as they are stored.
    is_own = settings.own_loss is not None or settings.train_step is not None
    stored = dataset.table.labels
    labels = dataset.labels.numpy() if stored is None else stored[dataset.positions]
    advice = DIVERGED_ADVICE
    if isinstance(task, Regression):
        advice += f" ({describe_labels(labels)}{'; divide them in your own loss' * is_own})"
    return task if is_own else task.learned_from(labels), advice


def _call_loss(
    name: str, compute: Callable[..., object], first: object, second: object, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    with user_code(name, values):
        loss = compute(first, second)
    return check_loss(loss, name)


def step_seed(seed: int, number: int, rank: int = 0) -> int:
    """Return the seed of the device's random number generator for step `number`; it differs between ranks."""
    return int(np.random.SeedSequence((seed, number, *([rank] if rank else []))).generate_state(1)[0])


def named_callable(name: str | None) -> Callable[..., Any] | None:
    return None if name is None else load_callable(name)
