"""Metrics and predictions are exact for any number of samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from running import learner_on, plain_outputs
from torch.nn import functional

from tpucache import CachedDataset
from tpucache.training.evaluation import evaluate, results
from tpucache.training.interrupt import Stopped
from tpucache.training.settings import TrainSettings


def learner_for(dataset, **settings):
    return learner_on(TrainSettings(model="cnn", batch_size=8, **settings), dataset)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 7, 8, 9, 150])
def test_metrics_and_predictions_equal_one_pass_of_plain_torch(cache, samples):
    dataset = CachedDataset(cache, indices=range(samples))
    learner = learner_for(CachedDataset(cache))
    outputs = plain_outputs(learner.model.eval(), dataset, learner.mean, learner.std)
    learner.model.train()
    found = evaluate(learner, dataset)
    assert found["samples"] == samples
    assert found["accuracy"] == pytest.approx((outputs.argmax(1) == dataset.labels).float().mean().item())
    assert found["loss"] == pytest.approx(functional.cross_entropy(outputs, dataset.labels).item(), rel=1e-5)
    parts = [part for (part,) in results(learner, dataset, lambda o, _: (learner.task.predictions(o),))]
    np.testing.assert_allclose(np.concatenate(parts), outputs.softmax(1).numpy(), atol=1e-6)


@pytest.mark.slow
def test_averaged_weights_are_what_is_evaluated_and_the_own_ones_come_back(cache):
    dataset = CachedDataset(cache)
    learner = learner_for(dataset, ema=0.5)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0.1)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    with_average = evaluate(learner, dataset)["loss"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.model.state_dict().items())
    assert learner.model.training
    learner.ema = None
    assert evaluate(learner, dataset)["loss"] != pytest.approx(with_average, rel=1e-3)


def test_an_evaluation_that_is_stopped_leaves_the_learner_as_it_was(cache):
    dataset, batches = CachedDataset(cache), []
    learner = learner_for(dataset, ema=0.5)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    with torch.no_grad():
        for average in learner.ema.state_dict()["average"].values():
            average.add_(1)

    def check():
        batches.append(1)
        if len(batches) == 3:
            raise Stopped("now")

    with pytest.raises(Stopped) as stopped:
        evaluate(learner, dataset, check)
    assert stopped.value.__traceback__ is not None  # it holds the frames, and what they hold, to the end of this test
    assert len(batches) == 3 < -(-150 // 8)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.model.state_dict().items())
    assert learner.model.training
