"""The reference networks, and networks of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tpucache import UsageError
from tpucache.training.models import MODELS, build_model


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_give_a_score_a_class_at_any_size(name):
    model = build_model(name, 7).eval()
    for side in (32, 65):
        assert model(torch.zeros(2, 3, side, side)).shape == (2, 7)


def test_resnet18_has_the_parameters_of_the_paper():
    assert sum(parameter.numel() for parameter in build_model("resnet18", 1000).parameters()) == 11_689_512


def test_a_callable_makes_a_model_and_what_makes_none_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert build_model("tiny_models:tiny", 3)(torch.zeros(2, 3, 8, 8)).shape == (2, 3)
    for name in ("tiny_models:no_model", "tiny_models:missing", "nowhere:tiny", "resnet1"):
        with pytest.raises(UsageError):
            build_model(name, 3)
