"""A run begins with the weights of another, keeps what is frozen, and needs that other one no more after its start."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from running import EndAfter, best_of, last_of, learner_on, predictor_of, train_on
from stopping import differences, results

from tpucache import CachedDataset, UsageError
from tpucache.training.evaluation import evaluate
from tpucache.training.settings import TrainSettings

TINY = {"model": "tiny_models:tiny", "epochs": 1, "batch_size": 16, "lr": 0.05}


def run(folder, dataset, *, stop_after=None, **settings):
    """Train on 40 samples and validate on 20, from the beginning to the end or to a number of steps."""

    parts = dataset.select(range(40)), dataset.select(range(100, 120))
    settings, ending = TrainSettings(**{**TINY, **settings}), [EndAfter(stop_after)]
    try:
        return train_on(folder, settings, *parts, resume=True, watchers=ending, checkpoint_every=1)
    except KeyboardInterrupt:
        return None


@pytest.fixture(scope="module")
def dataset(cache):
    return CachedDataset(cache)


@pytest.fixture(scope="module")
def first(dataset, tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("first")
    run(folder, dataset)
    return folder


@pytest.mark.slow
def test_a_run_begins_with_the_best_weights_of_another_and_says_so(dataset, first, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "tpucache"):
        report = run(tmp_path / "second", dataset, weights=str(first), lr=1e-9, freeze=["[01]"])
    assert "9 of the model's 9 tensors are taken over" in caplog.text
    model = best_of(tmp_path / "second")["model"]
    expected = best_of(first)["model"]
    assert all(torch.allclose(model[name], expected[name], atol=1e-6) for name in expected)
    learner = learner_on(TrainSettings(**TINY), dataset)
    learner.model.load_state_dict(expected)
    loss = evaluate(learner, dataset.select(range(100, 120)))["loss"]
    assert report.epochs[-1]["valid_loss"] == pytest.approx(loss, abs=1e-5)


def test_what_is_frozen_keeps_its_weights_and_statistics_and_has_no_state(dataset, first, tmp_path):
    run(tmp_path / "second", dataset, weights=str(first), freeze=["0", "1"], ema=0.5, optimizer="adamw")
    before = best_of(first)["model"]
    last = last_of(tmp_path / "second")["learner"]
    best = best_of(tmp_path / "second")["model"]
    for name in before:
        assert torch.equal(last["model"][name], before[name]) == (not name.startswith("5."))
        assert torch.equal(best[name], before[name]) == (not name.startswith("5."))
    assert len(last["optimizer"]["state"]) == 2


@pytest.mark.slow
def test_a_fine_tuning_that_was_killed_needs_the_first_weights_no_more(dataset, first, tmp_path):
    source = shutil.copytree(first, tmp_path / "source")
    settings = {"weights": str(source), "freeze": ["0"], "layer_decay": 0.5, "epochs": 2}
    run(tmp_path / "whole", dataset, **settings)
    run(tmp_path / "killed", dataset, stop_after=1, **settings)
    shutil.rmtree(source)
    run(tmp_path / "killed", dataset, **settings)
    assert differences(results(tmp_path / "whole"), results(tmp_path / "killed")) == []
    assert predictor_of(tmp_path / "killed").runs == 1


def test_more_epochs_of_a_finished_run_are_a_new_run_from_its_weights(dataset, first):
    with pytest.raises(UsageError, match=f"epochs 1, now 2. The run is finished.*--run OTHER --weights {first}"):
        run(first, dataset, epochs=2)
