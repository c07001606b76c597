"""Metrics and losses of one's own are computed over all validation samples, chosen by, and end a run."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_metrics
import torch
from running import EndAfter, best_of, learner_on, train_on

from tpucache import CachedDataset, TrainingError, UsageError
from tpucache.training.evaluation import evaluate, results
from tpucache.training.settings import TrainSettings

TINY = {"model": "tiny_models:tiny", "batch_size": 16, "lr": 0.05}


def learner_for(dataset, **settings):
    return learner_on(TrainSettings(**{**TINY, **settings}), dataset)


def run(cache, folder, values, stop_after=None, on_epoch=None, **settings):
    """Train two steps an epoch, where the metric `scripted` gives these values; return the report."""
    dataset = CachedDataset(cache)
    parts = dataset.select(range(32)), dataset.select(range(100, 110))

    tiny_metrics.STEPS[:] = values
    settings = TrainSettings(**{**TINY, "epochs": 6, "metric": ["tiny_metrics:scripted"], **settings})
    watchers = [EndAfter(stop_after)]
    return train_on(folder, settings, *parts, resume=True, checkpoint_every=1, watchers=watchers, on_epoch=on_epoch)


@pytest.mark.slow
def test_own_metrics_are_of_all_samples_and_cannot_change_them(cache):
    dataset = CachedDataset(cache)
    learner = learner_for(dataset, metric=["tiny_metrics:second_share", "tiny_metrics:scripted"])
    tiny_metrics.STEPS[:] = [np.float32(0.25)]
    found = evaluate(learner, dataset)
    predictions = [part for (part,) in results(learner, dataset, lambda o, _: (learner.task.predictions(o),))]
    assert found["second_share"] == pytest.approx(np.concatenate(predictions)[:, 1].mean())
    assert found["scripted"] == 0.25
    assert found["accuracy"] == pytest.approx((np.concatenate(predictions).argmax(1) == dataset.labels.numpy()).mean())


def test_metrics_of_tensors_are_computed_too(cache):
    dataset = CachedDataset(cache)
    found = evaluate(learner_for(dataset, metric=["tiny_metrics:of_tensors"]), dataset)
    assert found["of_tensors"] == pytest.approx(found["accuracy"])


@pytest.mark.parametrize("samples", [5, 16, 40])
def test_validation_is_by_the_loss_of_training_without_the_padding(cache, samples):
    dataset = CachedDataset(cache)
    learner, part = learner_for(dataset, loss="tiny_metrics:squared"), dataset.select(range(samples))
    outputs = np.concatenate([values for (values,) in results(learner, part, lambda o, _: (o,))])
    expected = np.square(outputs - np.eye(outputs.shape[1])[part.labels.numpy()]).mean()
    assert evaluate(learner, part)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("accuracy", UsageError, "there is a metric accuracy already"),
        ("nothing", UsageError, "cannot be imported"),
        ("failing", TrainingError, r"metric 'failing' raised IndexError in failing .*predictions float32 \(150, "),
        ("matrix", UsageError, "a metric is one number"),
        ("of_neither", TrainingError, "'of_neither' raised AttributeError in of_neither .*'numpy.ndarray' object"),
    ],
)
def test_a_metric_that_cannot_be_used_is_one_clear_error(cache, name, error, message):
    dataset = CachedDataset(cache)
    with pytest.raises(error, match=message) as raised:
        evaluate(learner_for(dataset, metric=[f"tiny_metrics:{name}"]), dataset)
    if name == "failing":
        assert isinstance(raised.value.__cause__, IndexError)


@pytest.mark.slow
@pytest.mark.parametrize(("watch", "best"), [("scripted", 2), ("scripted:max", 2), ("scripted:min", 3)])
def test_the_best_epoch_is_that_of_the_watched_metric(cache, tmp_path, watch, best):
    report = run(cache, tmp_path, [1.0, 3.0, 0.5, 2.0], watch=watch, epochs=4)
    assert (report.watched, report.best_epoch, report.stopped_early) == ("scripted", best, False)
    assert [row["valid_scripted"] for row in report.epochs] == [1.0, 3.0, 0.5, 2.0]
    assert any(line.startswith(f"best       epoch {best}, by scripted") for line in report.lines())


@pytest.mark.slow
def test_patience_ends_a_run_the_same_way_when_it_was_stopped_between(cache, tmp_path):
    values, settings = [1.0, 2.0, 2.0, 1.5, 3.0, 4.0], {"watch": "scripted", "patience": 2}
    whole = run(cache, tmp_path / "whole", values, **settings)
    assert (len(whole.epochs), whole.best_epoch, whole.stopped_early, whole.finished) == (4, 2, True, True)
    assert "best       epoch 2, by scripted; stopped early after epoch 4" in whole.lines()
    with pytest.raises(KeyboardInterrupt):
        run(cache, tmp_path / "parts", values, stop_after=3, **settings)
    parts = run(cache, tmp_path / "parts", values[2:], **settings)
    assert (parts.epochs, parts.losses, parts.best_epoch) == (whole.epochs, whole.losses, 2)
    best = [best_of(tmp_path / name)["model"] for name in ("whole", "parts")]
    assert all(torch.equal(best[0][name], best[1][name]) for name in best[0])
    assert run(cache, tmp_path / "parts", [], **settings).stopped_early  # finished: nothing is computed again


def test_each_epoch_is_a_line_when_it_ends_and_a_resumed_run_begins_with_those_before(cache, tmp_path):
    lines, at = [], []

    def on_epoch(line):
        lines.append(line)
        at.append(len(tiny_metrics.STEPS))

    with pytest.raises(KeyboardInterrupt):
        run(cache, tmp_path / "run", [1.0, 2.0], stop_after=2, on_epoch=on_epoch, epochs=3)
    assert [line[:10] for line in lines] == ["epoch   1 "]  # the second one was not over
    first = lines.pop()
    report = run(cache, tmp_path / "run", [2.0, 3.0], on_epoch=on_epoch, epochs=3)
    assert lines[0] == first
    assert lines == [line for line in report.lines() if line.startswith("epoch ")]
    assert "scripted 3.0000" in lines[-1]
    assert "samples" not in lines[-1]
    assert at[-2:] == [1, 0]  # values that are left: the second epoch's line came before the third was evaluated
    assert not any(line.startswith("epoch ") for line in report.lines(epochs=False))
    lines.clear()
    run(cache, tmp_path / "run", [], on_epoch=on_epoch, epochs=3)  # nothing is left to do
    assert len(lines) == 3
