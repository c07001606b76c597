"""Code of users that fails, or returns something else, is reported in one line that says where."""

from __future__ import annotations

import dataclasses

import pytest

from tpucache import CachedDataset, Recipe, TrainingError, UsageError, build_cache
from tpucache.cli import main
from tpucache.training.device import CpuDevice
from tpucache.training.loop import train
from tpucache.training.options import RunOptions
from tpucache.training.settings import TrainSettings

LINEAR = TrainSettings(model="tiny_tasks:linear", epochs=1, batch_size=50, lr=0.01)
QUICK = RunOptions(replay=False)


def train_with(cache, run, valid=False, **settings):
    dataset = CachedDataset(cache)
    made = dataclasses.replace(LINEAR, **settings)
    return train(run, made, dataset, dataset if valid else None, CpuDevice(), QUICK)


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
        train_with(cache, tmp_path, valid=True, **settings)
    message = str(caught.value)
    assert f"{kind.__name__} in {function} (" in message
    assert "failing_code.py:" in message
    assert words in message
    assert isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
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
)
def test_what_code_must_not_return_is_refused(cache, tmp_path, settings, words):
    with pytest.raises(UsageError, match=words):
        train_with(cache, tmp_path, valid=True, **settings)


@pytest.mark.slow
def test_a_command_prints_one_line_and_with_traceback_the_whole_way(cache, tmp_path, capfd):
    arguments = ["train", cache, "--run", tmp_path / "run", "--backend", "eager", "--model", "tiny_tasks:linear"]
    arguments += ["--loss", "failing_code:failing_loss", "--batch-size", 50]
    arguments = [str(argument) for argument in arguments]
    assert main(arguments) == 1
    error = capfd.readouterr().err
    assert "ZeroDivisionError in failing_loss" in error
    assert "Traceback" not in error
    assert main(["--traceback", *arguments]) == 1
    error = capfd.readouterr().err
    assert 'raise ZeroDivisionError("nobody was there")' in error
    assert error.splitlines()[-1].startswith("tpucache: the loss 'failing_code:failing_loss' raised")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "tiny_tasks:doubled_loss", "train_step": "tiny_tasks:doubled_step"}, "would not be used"),
        ({"mask_classes": 3}, "leave --mask-classes out"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(cache, tmp_path, settings, words):
    with pytest.raises(UsageError, match=words):
        train_with(cache, tmp_path, **settings)


@pytest.mark.slow
def test_a_step_of_ones_own_gets_the_mask_where_its_image_is(tmp_path, monkeypatch):
    build_cache("failing_data:labelled_squares", tmp_path / "cache", Recipe(size=16), jobs=1)
    augment = dataclasses.replace(LINEAR.augment, flip=True, vertical_flip=True, shift=3, rotate=True)
    train_with(tmp_path / "cache", tmp_path / "run", train_step="failing_code:square_mask_step", augment=augment)


@pytest.mark.slow
def test_moving_images_away_from_their_boxes_is_refused(tmp_path):
    build_cache("failing_data:boxed", tmp_path / "cache", Recipe(size=16), jobs=1)
    augment = dataclasses.replace(LINEAR.augment, flip=True)
    step = {"train_step": "tiny_tasks:doubled_step"}
    with pytest.raises(UsageError, match="moves images and masks, not boxes"):
        train_with(tmp_path / "cache", tmp_path / "run", **step, augment=augment)
    train_with(tmp_path / "cache", tmp_path / "run", **step)
