"""What cannot be meant is refused in words, and code of users that fails is reported in one line that says where."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from running import command, train_on
from torch import nn

from tpucache import CachedDataset, Recipe, TrainingError, UsageError, build_cache
from tpucache.training import Ema, TrainSettings, clip_gradients, make_optimizer, make_schedule, make_task
from tpucache.training.optimizers import find_optimizer

LINEAR = TrainSettings(model="tiny_tasks:linear", epochs=1, batch_size=50, lr=0.01)
MODEL, FROZEN = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)


def grow(sizes: str, size: int | None = None) -> None:
    TrainSettings(grow=sizes, size=size)


def check(name: str, labels: object) -> None:
    make_task(name, 4).check(np.array(labels))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: grow("128,224"), "each size but the last has a share"),
        (lambda: grow("128:0.4"), "each size but the last"),
        (lambda: grow("128:0.7,160:0.4,224"), "shares ascend"),
        (lambda: grow("128:1.5,224"), "shares ascend"),
        (lambda: grow("128:0..4,224"), "a number from 0 to 1"),
        (lambda: grow("100:0.4,224"), "multiples of 32, and 100 is not"),
        (lambda: grow("0:0.4,224"), "multiples of 32, and 0 is not"),
        (lambda: grow("32:0.1,64:0.2,96:0.3,128:0.4,160"), "at most 4 sizes"),
        (lambda: grow("small:0.4,224"), "such as 128:0.4,176:0.7,224"),
        (lambda: grow("128:0.4,224", 96), "leave one of them out"),
        (lambda: make_schedule("cosine", 9, 0.1), "cosine"),
        (lambda: make_schedule("constant", 0, 0.1), "step"),
        (lambda: make_schedule("constant", 9, 0.0), "rate"),
        (lambda: make_schedule("constant", 9, float("nan")), "rate"),
        (lambda: Ema(MODEL, 0.0), "decay"),
        (lambda: Ema(MODEL, 1.0), "decay"),
        (lambda: Ema(MODEL, -1.0), "decay"),
        (lambda: Ema(MODEL, float("nan")), "decay"),
        (lambda: find_optimizer("lamb"), "there is no optimizer 'lamb': use sgd, adamw, or one by module:name"),
        (lambda: make_optimizer(MODEL, torch.optim.Muon, 0.1), "Muon cannot be made for this model: ValueError: .*2D"),
        (lambda: make_optimizer(MODEL, "lion", 0.1), "lion"),
        (lambda: make_optimizer(MODEL, "sgd", 0.0), "above 0"),
        (lambda: make_optimizer(MODEL, "sgd", 0.1, -1.0), "decay"),
        (lambda: make_optimizer(FROZEN, "sgd", 0.1), "nothing to train"),
        (lambda: clip_gradients([], 0.0), "above 0"),
        (lambda: make_task("classes", 1), "classes"),
        (lambda: make_task("mask", 0), "mask"),
        (lambda: make_task("regression", 0), "regression"),
        (lambda: make_task("boxes", 3), "boxes"),
        (lambda: make_task("regression", 1).targets(torch.zeros(2, 1), 0.1), "smooth"),
        (lambda: make_task("classes", 3).with_loss("dice"), "cross-entropy, focal, bce"),
        (lambda: make_task("multilabel", 3).with_loss("cross-entropy"), "bce, focal"),
        (lambda: make_task("regression", 1).with_loss("bce"), "mse, l1, huber"),
        (lambda: make_task("mask", 2).with_loss("mse"), "dice"),
        (lambda: check("classes", [0, 4]), "0 to 4"),
        (lambda: check("classes", [-1, 2]), "-1 to 2"),
        (lambda: check("classes", [0.0, 1.0]), "another task"),
        (lambda: check("classes", [[0, 1]]), "another task"),
        (lambda: check("multilabel", [0, 1]), "4 numbers"),
        (lambda: check("multilabel", [[2.0] * 4] * 2), "from 0 to 1 for each class"),
        (lambda: check("multilabel", [[0, 0, 0, 1], [0, np.nan, 1, 1]]), "position 1"),
        (lambda: check("regression", [[0, np.inf, 0, 0]]), "position 0"),
        (lambda: check("regression", [[0.0] * 3] * 2), "4 numbers"),
        (lambda: check("mask", [[0.0] * 3] * 2), "pixel"),
        (lambda: check("mask", [[[4, 4], [4, 4]]]), "4 classes"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def train_with(cache, run, valid=True, **settings):
    dataset = CachedDataset(cache)
    return train_on(run, dataclasses.replace(LINEAR, **settings), dataset, dataset if valid else None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 200}, "150 training samples do not make one execution of 1 x 200"),
        ({"task": "mask"}, "no masks"),
        ({"precision": "fp16"}, "'cpu' does not train in fp16: give --precision float32 or bf16"),
        ({"epochs": "auto"}, "give --time-limit, too"),
        ({"loss": "dice"}, "cross-entropy, focal, bce"),
        ({"loss": "tiny_tasks:doubled_loss", "train_step": "tiny_tasks:doubled_step"}, "would not be used"),
        ({"mask_classes": 3}, "leave --mask-classes out"),
        ({"freeze": ["2", "layer9"]}, "--freeze layer9 fits no parameter of the model: its modules are 2"),
        ({"freeze": ["*"]}, "freezes all parameters"),
        ({"mean": (1.0,)}, "--mean is one number for each of 3 channels, not 1"),
        ({"std": (1.0,) * 4}, "--std is one number for each of 3 channels, not 4"),
        ({"mean": (0.485, 0.456, 0.406)}, "0 to 255.*multiply it by 255"),
        ({"mean": (1.0, float("nan"), 1.0)}, "finite"),
        ({"std": (1.0, 0.0, 1.0)}, "above 0"),
        (
            {"metric": ["tiny_metrics:scripted"], "watch": "f2"},
            "is one of loss, accuracy, f1, auc, scripted, with :min",
        ),
        ({"watch": "loss:up"}, "--watch is one of"),
        ({"valid": False, "watch": "loss"}, "needs validation samples, and there are none: add --valid"),
        ({"valid": False, "patience": 1}, "needs validation samples, and there are none: add --valid"),
        ({"valid": False, "metric": ["tiny_metrics:scripted"]}, "needs validation samples, and there are none"),
        ({"model": "failing_code:seven"}, r"\(50, 7\)|, 7"),
        ({"model": "failing_code:flat"}, "cannot take"),
        ({"model": "failing_code:dense"}, "labels ask for 4"),
        ({"model": "failing_code:make_nothing"}, r"make_nothing \(.*failing_code.py:.*no weights"),
        ({"model": "failing_code:Fixed"}, "no parameter that requires gradients"),
        ({"loss": "failing_code:unreduced_loss"}, r"returns torch.float32 \(50,\).*one floating-point number"),
        ({"loss": "failing_code:whole_number_loss"}, "returns torch.int64"),
        ({"loss": "failing_code:detached_loss"}, "without a gradient"),
        ({"loss": "failing_code:item_loss"}, "returns a float"),
        ({"train_step": "failing_code:nothing_step"}, "returns a NoneType"),
        ({"eval_step": "failing_code:narrow_eval"}, r"gives \(50, 1\) for 50 samples, the labels ask for 4 numbers"),
        ({"eval_step": "failing_code:number_eval"}, "gives torch.int64"),
    ],
    ids=str,
)
def test_a_run_that_cannot_be_meant_is_refused_before_its_first_step(cache, tmp_path, settings, words):
    with pytest.raises(UsageError, match=words):
        train_with(cache, tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "last.pt").exists()


@pytest.mark.parametrize(
    ("settings", "function", "kind", "words"),
    [
        ({"model": "failing_code:Forgetful"}, "forward", RuntimeError, "image float32 (50, 3, 16, 16)"),
        ({"loss": "failing_code:failing_loss"}, "failing_loss", ZeroDivisionError, "outputs float32 (50, 4)"),
        ({"train_step": "failing_code:failing_step"}, "failing_step", KeyError, "label int64 (50,)"),
        ({"eval_step": "failing_code:failing_eval"}, "failing_eval", RuntimeError, "image float32 (50, 3, 16, 16)"),
    ],
)
def test_code_that_raises_is_reported_with_its_place_and_the_batch(cache, tmp_path, settings, function, kind, words):
    with pytest.raises(TrainingError) as caught:
        train_with(cache, tmp_path, **settings)
    message = str(caught.value)
    assert f"{kind.__name__} in {function} (" in message
    assert "failing_code.py:" in message
    assert words in message
    assert isinstance(caught.value.__cause__, kind)


@pytest.mark.slow
def test_a_command_prints_one_line_and_with_traceback_the_whole_way(cache, tmp_path, capfd):
    words = ["train", cache, "--run", tmp_path / "run", "--backend", "eager", "--model", "tiny_tasks:linear"]
    words += ["--loss", "failing_code:failing_loss", "--batch-size", 50]
    assert command(*words) == 1
    error = capfd.readouterr().err
    assert "ZeroDivisionError in failing_loss" in error
    assert "Traceback" not in error
    assert command("--traceback", *words) == 1
    error = capfd.readouterr().err
    assert 'raise ZeroDivisionError("nobody was there")' in error
    assert error.splitlines()[-1].startswith("tpucache: the loss 'failing_code:failing_loss' raised")


@pytest.mark.slow
def test_moving_images_away_from_their_boxes_is_refused(tmp_path):
    build_cache("failing_data:boxed", tmp_path / "cache", Recipe(size=16), jobs=1)
    augment = dataclasses.replace(LINEAR.augment, flip=True)
    step = {"train_step": "tiny_tasks:doubled_step", "valid": False}
    with pytest.raises(UsageError, match="moves images and masks, not boxes"):
        train_with(tmp_path / "cache", tmp_path / "run", **step, augment=augment)
    train_with(tmp_path / "cache", tmp_path / "run", **step)
