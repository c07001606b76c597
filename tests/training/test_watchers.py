"""What a run shows of itself: curves, scalars, and a trace."""

from __future__ import annotations

import sys

import pytest
from PIL import Image
from running import report_of, train_on
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tpucache import CachedDataset, DependencyError, TrainingError
from tpucache.cli import main
from tpucache.training.settings import TrainSettings
from tpucache.training.watch import TensorBoard, drawn_curves, fitting_decay, save_curves, save_figure

pytestmark = pytest.mark.slow

SETTINGS = TrainSettings(model="cnn", epochs=2, batch_size=16, lr=0.02)


@pytest.fixture(autouse=True)
def curves(monkeypatch):
    """Runs draw their curves, as outside of tests."""
    monkeypatch.setattr("tpucache.training.loop.drawn_curves", drawn_curves)


def sizes(path):
    with Image.open(path) as image:
        image.load()
        return image.size


def scalars(folder):
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_a_run_of_the_command_leaves_curves_and_scalars(cache, tmp_path):
    run = tmp_path / "run"
    arguments = ["train", cache, "--run", run, "--backend", "eager", "--model", "cnn", "--epochs", 2, "--valid", 0.2]
    arguments += ["--batch-size", 16, "--lr", 0.02, "--tensorboard", "--json"]
    assert main([str(argument) for argument in arguments]) == 0
    report = report_of(run)
    assert min(sizes(run / "curves.png")) > 500
    found = scalars(run / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == list(range(1, 15))
    assert [value for _, value in found["train/loss"]] == pytest.approx(report["losses"])
    accuracies = [(row["step"], row["valid_accuracy"]) for row in report["epochs"]]
    assert found["valid/accuracy"] == [(step, pytest.approx(value)) for step, value in accuracies]
    assert {"epoch/lr", "epoch/images_per_second", "epoch/waited", "epoch/train_loss"} < found.keys()


def test_the_rows_of_a_run_hold_no_times(cache, tmp_path):
    report = train_on(tmp_path, SETTINGS, CachedDataset(cache))
    assert [set(row) for row in report.epochs] == [{"epoch", "step", "lr", "train_loss"}] * 2
    assert not (tmp_path / "curves.png").exists()


def test_curves_are_left_by_a_run_that_fails(cache, tmp_path):
    settings = TrainSettings(model="cnn", epochs=4, batch_size=10, lr=1e30)
    with pytest.raises(TrainingError, match="the loss is"):
        train_on(tmp_path, settings, CachedDataset(cache), curves=True, replay=True)
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("epochs", [0, 1, 30])
def test_curves_are_drawn_of_any_run(tmp_path, epochs):
    rows = [
        {"epoch": n, "step": 10 * n, "valid_loss": 1 / n, "valid_rmse": 2 / n, "valid_samples": 5}
        for n in range(1, epochs + 1)
    ]
    save_curves(tmp_path, [1.0] * max(3, 10 * epochs), [0.1] * max(3, 10 * epochs), rows)
    width, height = sizes(tmp_path / "curves.png")
    assert width > 500
    assert height == pytest.approx(120 * (8.8 if epochs else 6.6), abs=2)


def test_a_resumed_run_takes_back_scalars_of_steps_that_it_takes_again(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.losses(0, [1.0, 2.0, 3.0, 4.0])
    with TensorBoard(tmp_path) as board:
        board.losses(2, [7.0, 8.0])
        board.epoch({"epoch": 1, "step": 4, "valid_loss": 0.5})
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 7.0), (4, 8.0)]
    assert scalars(tmp_path)["valid/loss"] == [(4, 0.5)]


def test_an_epoch_whose_evaluation_is_made_up_for_is_written_before_any_loss(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.losses(0, [1.0, 2.0])
    with TensorBoard(tmp_path) as board:
        board.epoch({"epoch": 1, "step": 2, "valid_loss": 0.5})
        board.losses(2, [3.0])
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert scalars(tmp_path)["valid/loss"] == [(2, 0.5)]


def test_tensorboard_that_is_missing_is_an_error_in_words(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(DependencyError, match=r"pip install tensorboard"):
        TensorBoard(tmp_path)


def test_a_run_goes_on_where_matplotlib_fails(tmp_path, caplog):
    def paint(_):
        raise RuntimeError("no font")

    save_figure(tmp_path / "curves.png", paint)
    assert "curves.png is left out: matplotlib raised RuntimeError: no font" in caplog.text
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("steps", "window"), [(0, 1), (20, 1), (40, 2), (100, 5), (1000, 50), (100_000, 50)])
def test_a_curve_is_smoothed_over_a_share_of_its_run(steps, window):
    assert 1 / (1 - fitting_decay(steps)) == pytest.approx(window)
