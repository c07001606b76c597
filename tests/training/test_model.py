"""The reference networks, and networks of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tpucache import DependencyError, UsageError
from tpucache.training.model import DENSE_MODELS, MODELS, build_model


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_give_a_score_a_class_at_any_size(name):
    model = build_model(name, 7).eval()
    for side in (32, 65):
        assert model(torch.zeros(2, 3, side, side)).shape == (2, 7)


@pytest.mark.parametrize("name", DENSE_MODELS)
@pytest.mark.parametrize(("height", "width"), [(32, 48), (13, 9), (1, 1)])
def test_models_for_masks_give_a_score_a_class_and_pixel_at_any_size(name, height, width):
    model = build_model(name, 4).eval()
    assert model(torch.zeros(2, 3, height, width)).shape == (2, 4, height, width)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *DENSE_MODELS])
def test_every_parameter_gets_a_gradient(name):
    model = build_model(name, 3)
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_callable_makes_a_model_and_what_makes_none_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    assert build_model("tiny_models:tiny", 3)(torch.zeros(2, 3, 8, 8)).shape == (2, 3)
    for name in ("tiny_models:no_model", "tiny_models:missing", "nowhere:tiny", "resnet1"):
        with pytest.raises(UsageError):
            build_model(name, 3)


def test_timm_makes_its_models_from_random_weights(monkeypatch):
    made = timm_stub(monkeypatch)
    assert build_model("timm:resnet10t", 5).out_features == 5
    assert made == [("resnet10t", {"num_classes": 5, "pretrained": False})]
    with pytest.raises(UsageError, match="did you mean resnet10t"):
        build_model("timm:resnet10", 5)


def test_keywords_after_a_timm_model_reach_it(monkeypatch):
    made = timm_stub(monkeypatch)
    build_model("timm:resnet10t?drop_path_rate=0.1&depth=3&global_pool=avg&act='swish'&bias=false&scale=1e-3", 5)
    expected = {"drop_path_rate": 0.1, "depth": 3, "global_pool": "avg", "act": "swish", "bias": False, "scale": 1e-3}
    assert made == [("resnet10t", {"num_classes": 5, "pretrained": False, **expected})]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrained=True", "pretrained.*--weights"), ("pretrained_cfg_overlay=x", "pretrained_cfg_overlay"),
        ("checkpoint_path=x", "checkpoint_path"), ("features_only=True", "features_only"), ("num_classes=3", "num_cl"),
        ("in_chans=1", "in_chans"), ("cache_dir=x", "cache_dir"), ("a=(1,2)", "plain"), ("a=None", "plain"),
        ("a=__import__('os')", "plain"), ("a=[1]", "plain"), ("a", "keyword"), ("a=", "keyword"), ("", "keyword"),
        ("a=1&a=2", "keyword"), ("a b=1", "keyword"), ("unknown=1", "resnet10t.*unknown"),
    ],
)  # fmt: skip
def test_other_keywords_of_a_timm_model_are_refused(monkeypatch, words, message):
    made = timm_stub(monkeypatch)
    with pytest.raises(UsageError, match=message):
        build_model(f"timm:resnet10t?{words}", 5)
    assert not made


def timm_stub(monkeypatch):
    """Replace timm by one that has a single model; return the list of those that it makes."""
    made = []

    def create_model(name, **options):
        if "unknown" in options:
            raise TypeError("ResNet.__init__() got an unexpected keyword argument 'unknown'")
        made.append((name, options))
        return nn.Linear(1, options["num_classes"])

    stub = SimpleNamespace(
        is_model=lambda name: name == "resnet10t", list_models=lambda _: ["resnet10t"], create_model=create_model
    )
    monkeypatch.setitem(sys.modules, "timm", stub)
    return made


def test_a_timm_model_without_timm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(DependencyError, match=r"`pip install timm`"):
        build_model("timm:resnet10t", 5)
