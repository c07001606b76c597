"""Losses by name are those of their formulas, for each sample as in the mean, and each fits some tasks."""

from __future__ import annotations

import json

import pytest
import torch
from running import predictor_of, train_on
from torch.nn import functional

from tpucache import CachedDataset, UsageError
from tpucache.training.data import choose_task
from tpucache.training.settings import TASKS, TrainSettings
from tpucache.training.tasks.classes import Classes
from tpucache.training.tasks.find import make_task

NAMED = [
    ("classes", "focal"),
    ("classes", "bce"),
    ("multilabel", "focal"),
    ("regression", "l1"),
    ("regression", "huber"),
    ("mask", "focal"),
    ("mask", "dice"),
    ("mask", "dice-cross-entropy"),
]
#: The default has no name.
EACH = pytest.mark.parametrize(("task", "name"), [*((task, "") for task in TASKS), *NAMED])
K = 3


def learned_by(task, name):
    return make_task(task, K).with_loss(name) if name else make_task(task, K)


def example(task, batch=5):
    """Outputs and labels of a task with three outputs."""
    generator = torch.Generator().manual_seed(11)
    sides = (4, 6) if task == "mask" else ()
    outputs = torch.randn(batch, K, *sides, generator=generator) * 2
    if task in ("classes", "mask"):
        return outputs, torch.randint(0, K, (batch, *sides), generator=generator)
    labels = torch.randn(batch, K, generator=generator)
    return outputs, (labels > 0).float() if task == "multilabel" else labels


def dice_of(outputs, labels):
    """1 - Dice of one sample, by loops: each class's pixels, one more on both sides of the fraction."""
    probabilities, known, found = outputs.softmax(0), labels != 255, []
    for number in range(K):
        truth, predicted = (labels == number)[known].float(), probabilities[number][known]
        found.append(1 - (2 * (truth * predicted).sum() + 1) / (truth.sum() + predicted.sum() + 1))
    return torch.stack(found).mean()


def formula(task, name, outputs, labels):
    """Each sample's loss, from what torch has."""
    if name == "bce" or (task, name) == ("multilabel", ""):
        marks = functional.one_hot(labels, K).float() if task == "classes" else labels
        return functional.binary_cross_entropy_with_logits(outputs, marks, reduction="none").mean(1)
    if task == "regression":
        return getattr(functional, {"l1": "l1_loss", "huber": "smooth_l1_loss", "": "mse_loss"}[name])(
            outputs, labels, reduction="none"
        ).mean(1)
    if task == "multilabel":
        right = torch.where(labels == 1, outputs.sigmoid(), 1 - outputs.sigmoid())
        return (-((1 - right) ** 2) * right.log()).mean(1)
    pixels = functional.cross_entropy(outputs, labels, reduction="none", ignore_index=255)
    if name in ("focal", ""):
        each = (1 - (-pixels).exp()) ** 2 * pixels if name == "focal" else pixels
        return each if task == "classes" else each.mean((1, 2))
    dices = torch.stack([dice_of(*pair) for pair in zip(outputs, labels, strict=True)])
    return dices if name == "dice" else dices + pixels.mean((1, 2))


@EACH
def test_a_named_loss_is_its_formula_and_the_mean_of_each_samples(task, name):
    learned = learned_by(task, name)
    outputs, labels = example(task)
    outputs.requires_grad_()
    expected, targets = formula(task, name, outputs, labels), learned.targets(labels)
    torch.testing.assert_close(learned.losses(outputs, labels), expected)
    assert learned.loss(outputs.bfloat16(), targets).dtype == torch.float32
    assert learned.predictions(outputs.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(learned.loss(outputs, targets), expected.mean())
    learned.loss(outputs, targets).backward()
    assert outputs.grad.isfinite().all()
    assert outputs.grad.abs().sum() > 0


@EACH
def test_losses_of_certain_outputs_are_finite_and_have_finite_gradients(task, name):
    learned = learned_by(task, name)
    outputs, labels = example(task)
    outputs = (outputs * 1e4).requires_grad_()
    loss = learned.loss(outputs, learned.targets(labels))
    loss.backward()
    assert loss.isfinite()
    assert outputs.grad.isfinite().all()


@pytest.mark.parametrize("name", ["dice", "dice-cross-entropy", "focal"])
def test_pixels_and_masks_of_no_class_count_nowhere(name):
    learned = make_task("mask", K).with_loss(name)
    outputs, labels = example("mask")
    labels[:, 2:] = 255
    few, many = (learned.losses(outputs[:, :, :rows], labels[:, :rows]) for rows in (2, 4))
    torch.testing.assert_close(few, many)
    assert learned.losses(outputs, torch.full_like(labels, 255)).abs().max() < 1e-6


def test_probabilities_of_binary_cross_entropy_are_the_sigmoids_by_their_sum():
    outputs, _ = example("classes")
    found = make_task("classes", K).with_loss("bce").predictions(outputs)
    torch.testing.assert_close(found, outputs.sigmoid() / outputs.sigmoid().sum(1, keepdim=True))
    assert make_task("classes", K).with_loss("bce").predictions(torch.full((1, K), -900.0)).isfinite().all()


def test_a_task_of_ones_own_does_not_take_the_losses_of_the_task_that_it_is_made_of():
    class Own(Classes):
        """Another loss than its base's."""

    with pytest.raises(UsageError, match="only its default loss"):
        Own(3, "own").with_loss("focal")
    outputs, labels = example("classes")
    torch.testing.assert_close(Own(3, "own").losses(outputs, labels), Classes(3).losses(outputs, labels))


@pytest.mark.slow
def test_a_run_with_a_named_loss_predicts_by_it(cache, tmp_path):
    data = CachedDataset(cache)
    settings = TrainSettings(model="cnn", epochs=1, batch_size=32, loss="bce", smoothing=0.1)
    train_on(tmp_path / "run", settings, data, data)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["loss"] == "bce"
    assert predictor_of(tmp_path / "run").task == choose_task(settings, data)


STEPS = """
import json, sys
import torch
from tpucache.training.device import open_device
from tpucache.training.tasks.find import make_task

device, found = open_device("xla"), []
for kind, name, sides in json.loads(sys.argv[1]):
    task = make_task(kind, 3).with_loss(name)
    weight = torch.nn.Parameter(device.put(torch.ones(3, 1, 1) if sides else torch.ones(3)))
    for step in range(5):
        if step == 2:
            before = device.counters().compiles
        outputs = torch.randn(4, 3, *sides)
        labels = torch.randint(0, 3, (4, *sides)) if kind in ("classes", "mask") else (outputs > 0).float()
        loss = task.loss(device.put(outputs) * weight, task.targets(device.put(labels)))
        loss.backward()
        task.losses(device.put(outputs) * weight, device.put(labels)).sum()
        device.step_end()
        value = float(loss)
        expected = float(task.loss(outputs, task.targets(labels)))
        assert abs(value - expected) < 1e-5, (kind, name, value, expected)
    found.append(device.counters().compiles - before)
print(json.dumps(found))
"""


@pytest.mark.xla
def test_on_xla_each_loss_is_that_of_plain_torch_and_compiles_nothing_after_its_first_steps(on_xla):
    found = on_xla(STEPS, json.dumps([(task, name, (4, 6) if task == "mask" else ()) for task, name in NAMED]))
    assert json.loads(found) == [0] * len(NAMED)
