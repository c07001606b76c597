"""Training from Python takes models and optimizers as objects, and returns the model with its best weights."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import tiny_models
import torch
from running import plain_outputs, predictor_of

from tpucache import CachedDataset, UsageError
from tpucache.loading.columns import stratified_split
from tpucache.training import RunOptions, TrainSettings, train

SETTINGS = TrainSettings(epochs=2, batch_size=50, lr=0.01)
QUICK = RunOptions(replay=False)


@pytest.mark.slow
def test_a_function_a_module_and_a_name_give_the_same_run(cache, tmp_path):
    torch.manual_seed(SETTINGS.seed)
    module = tiny_models.tiny(len(CachedDataset(cache).classes))
    results = [
        train(model, cache, 0.2, SETTINGS, options=QUICK, run=tmp_path / name)
        for name, model in (("function", tiny_models.tiny), ("module", module), ("name", "tiny_models:tiny"))
    ]
    for result in results[1:]:
        assert result.report.losses == results[0].report.losses
        assert result.history == results[0].history
    assert predictor_of(tmp_path / "function").runs == 1
    with pytest.raises(UsageError, match="Sequential was given as an object"):
        predictor_of(tmp_path / "module")


def test_a_fraction_is_validated_on_clean_images_whatever_is_trained_on(cache, tmp_path):
    settings = dataclasses.replace(SETTINGS, epochs=1)
    chosen = CachedDataset(cache, "epoch")[::-1]
    for name, data in (("cache", cache), ("dataset", chosen)):
        train(tiny_models.tiny, data, 0.2, settings, options=QUICK, run=tmp_path / name)
        info = json.loads((tmp_path / name / "run.json").read_text())
        assert (info["training"]["variant"], info["validation"]["variant"]) == ("epoch", 0)
    held = chosen.positions[stratified_split(chosen.labels.numpy(), 0.2, settings.seed).valid]
    assert np.load(tmp_path / "dataset" / "validation.npz")["positions"].tolist() == held.tolist()


@pytest.mark.slow
def test_the_model_that_is_returned_has_the_best_weights(cache):
    dataset = CachedDataset(cache)
    parts = dataset.select(range(100)), dataset.select(range(100, 150))
    result = train(tiny_models.tiny, *parts, SETTINGS, options=QUICK)
    best = result.history[result.report.best_epoch - 1]
    assert not result.model.training
    statistics = dataset.manifest.statistics
    outputs = plain_outputs(result.model, parts[1], statistics.mean, statistics.std)
    accuracy = (outputs.argmax(1) == parts[1].labels).float().mean().item()
    assert accuracy == pytest.approx(best["valid_accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["torch.optim:RMSprop", "sgd", lambda groups, lr: torch.optim.Adagrad(groups, lr=lr)]
)
def test_any_optimizer_takes_steps_at_the_rates_of_the_schedule(cache, optimizer):
    result = train(tiny_models.tiny, cache, None, SETTINGS, optimizer=optimizer, options=QUICK)
    assert len(result.report.losses) == 6
    assert result.report.losses[-1] < result.report.losses[0]


def test_what_is_no_optimizer_is_refused(cache):
    with pytest.raises(UsageError, match="no optimizer 'nosuch': use sgd"):
        train(tiny_models.tiny, cache, None, SETTINGS, optimizer="nosuch", options=QUICK)
    with pytest.raises(UsageError, match="the optimizer is a list"):
        train(tiny_models.tiny, cache, None, SETTINGS, optimizer=lambda *_, **__: [], options=QUICK)
