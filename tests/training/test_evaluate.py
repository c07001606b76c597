"""Metrics are exact for any number of samples."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tpucache import CachedDataset, CachedLoader
from tpucache.training.augment import Normalise
from tpucache.training.device import EagerDevice
from tpucache.training.evaluate import evaluate
from tpucache.training.models import build_model


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 150])
def test_metrics_equal_one_pass_of_plain_torch(cache, samples):
    dataset = CachedDataset(cache, indices=range(samples))
    model = build_model("cnn", 4).eval()
    normalise = Normalise((120.0, 110.0, 100.0), (60.0, 50.0, 40.0), torch.device("cpu"))
    found = evaluate(lambda images: model(normalise(images)), CachedLoader(dataset, 8), EagerDevice(), 8)
    images = torch.stack([dataset[index][0] for index in range(samples)]).float()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((120.0, 110.0, 100.0), (60.0, 50.0, 40.0)))
    with torch.no_grad():
        scores = model((images - mean) / std)
    assert found.samples == samples
    assert found.accuracy == pytest.approx((scores.argmax(1) == dataset.labels).float().mean().item())
    assert found.loss == pytest.approx(functional.cross_entropy(scores, dataset.labels).item(), rel=1e-5)


def test_a_channel_without_spread_is_only_centred():
    normalise = Normalise((7.0,), (0.0,), torch.device("cpu"))
    assert normalise(torch.full((1, 2, 2, 1), 7, dtype=torch.uint8)).abs().max() == 0
