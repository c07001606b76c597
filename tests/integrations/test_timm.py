"""Models of timm are as timm means them: weights, images, layers, losses and optimizers are timm's own."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging

import pytest
import torch

from tpucache import CachedDataset, UsageError
from tpucache.training.device import CpuDevice
from tpucache.training.learner import Learner
from tpucache.training.loop import train
from tpucache.training.model import build_model
from tpucache.training.optimizers import (
    RATE_SCALE,
    find_optimizer,
    load_optimizer,
    make_optimizer,
    parameter_groups,
)
from tpucache.training.options import RunOptions
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks.find import make_task
from tpucache.training.weights import adapt_channels, find_weights, load_matching, read_weights

timm = pytest.importorskip("timm", reason="needs timm: `python -m scripts.checks integrations`")
_PARTS = ("loss", "optim", "models._hub", "models._manipulate")
timm_loss, timm_optim, timm_hub, timm_manipulate = (importlib.import_module(f"timm.{name}") for name in _PARTS)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 4), (3, 8), (4, 3), (1, 3)])
def test_channels_are_adapted_as_timm_does(before, after):
    adapt = timm_manipulate.adapt_input_conv
    for dtype in (torch.float32, torch.float16):
        weight = torch.randn(4, before, 3, 3).to(dtype)
        assert torch.equal(adapt_channels(weight, after), adapt(after, weight, base_chans=before))


def test_a_position_embedding_is_adapted_to_another_image_size_as_timm_does():
    small, large = (timm.create_model("test_vit", num_classes=2, img_size=side) for side in (64, 96))
    weights = small.state_dict()
    expected = timm.layers.resample_abs_pos_embed(weights["pos_embed"], (6, 6), verbose=False)
    matched = load_matching(large, {f"module.{name}": tensor for name, tensor in weights.items()}, "file")
    assert [name for name, *_ in matched.adapted] == ["pos_embed"]
    assert (matched.resized, matched.missing, matched.trouble) == ([], [], "")
    torch.testing.assert_close(large.pos_embed, expected)


def test_what_timm_cannot_adapt_is_created_anew_and_says_why():
    wide, square = (timm.create_model("test_vit", num_classes=2, img_size=size) for size in ((48, 64), 64))
    before = square.pos_embed.detach().clone()
    matched = load_matching(square, wide.state_dict(), "file")
    assert [name for name, *_ in matched.resized] == ["pos_embed"]
    assert torch.equal(square.pos_embed, before)
    assert "timm could not adapt the weights: RuntimeError" in str(matched)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext", "test_efficientnet"])
@pytest.mark.parametrize(("side", "channels"), [(160, 3), (96, 3), (160, 1), (96, 1)])
def test_logits_are_those_of_the_model_that_timm_loads_itself(name, side, channels, tmp_path):
    torch.manual_seed(1)
    saved = timm.create_model(name, num_classes=5)
    timm_hub.save_for_hf(saved, tmp_path, safe_serialization="both")  # a folder as the hub stores it
    size = {"img_size": side} if name == "test_vit" else {}
    overlay = {"file": str(tmp_path / "model.safetensors"), "num_classes": 5}
    expected = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=5, in_chans=channels, **size
    )
    keywords = "".join(f"?{key}={value}" for key, value in size.items())
    found = build_model(f"timm:{name}{keywords}", 5, channels)
    matched = load_matching(found, read_weights(tmp_path), "file")
    assert (matched.resized, matched.missing, matched.trouble) == ([], [], "")
    images = torch.randn(2, channels, side, side)
    with torch.no_grad():
        torch.testing.assert_close(found.eval()(images), expected.eval()(images), atol=1e-5, rtol=0)


#: Of ConvNeXt, by timm's names.
AUTHORS = {
    "stem.": "downsample_layers.0.", "head.norm.": "norm.", "head.fc.": "head.",
    ".conv_dw.": ".dwconv.", ".mlp.fc1.": ".pwconv1.", ".mlp.fc2.": ".pwconv2.",
}  # fmt: skip


def test_names_of_a_models_authors_are_translated_as_timm_does():
    model = timm.create_model("test_convnext", num_classes=3)
    translated = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    authors = {}
    for name, tensor in translated.items():
        theirs = name
        for ours, other in AUTHORS.items():
            theirs = theirs.replace(ours, other)
        for stage in range(4):
            theirs = theirs.replace(f"stages.{stage}.downsample.", f"downsample_layers.{stage}.")
            theirs = theirs.replace(f"stages.{stage}.blocks.", f"stages.{stage}.")
        authors[theirs] = tensor
    assert authors.keys() != translated.keys()
    matched = load_matching(model, authors, "file")
    assert (matched.resized, matched.missing) == ([], [])
    assert all(torch.equal(tensor, translated[name]) for name, tensor in model.state_dict().items())


def test_pretrained_weights_come_out_of_the_hubs_cache_on_this_machine(tmp_path, monkeypatch):
    from huggingface_hub import constants

    name = timm.get_pretrained_cfg("test_vit").hf_hub_id
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    for text in ("pretrained", f"hub:{name}"):
        with pytest.raises(UsageError, match="nothing is downloaded"):
            find_weights(text, "timm:test_vit?img_size=96")
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    timm_hub.save_for_hf(timm.create_model("test_vit"), repository / "snapshots" / "abc", safe_serialization="both")
    for text in ("pretrained", f"hub:{name}", f"hub:{name}@main"):
        path = find_weights(text, "timm:test_vit?img_size=96")
        assert path == repository / "snapshots" / "abc" / "model.safetensors"
    with pytest.raises(UsageError, match="does not name a repository as OWNER/NAME"):
        find_weights("hub:../x/y", "cnn")


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_layers_and_what_decays_are_timms(name):
    model = timm.create_model(name, num_classes=3)
    theirs = {}
    excepted = getattr(model, "no_weight_decay", set)()
    for group in timm_optim.param_groups_layer_decay(model, 0.05, excepted, layer_decay=0.7):
        theirs |= {id(each): (pytest.approx(group["lr_scale"]), group["weight_decay"]) for each in group["params"]}
    ours = {}
    for group in parameter_groups(model, 0.05, 0.7):
        ours |= {id(each): (group[RATE_SCALE], group["weight_decay"]) for each in group["params"]}
    assert ours == theirs


def settings_of(**changes):
    given = {"model": "timm:test_resnet", "epochs": 2, "batch_size": 50, "optimizer": "adamw"}
    return TrainSettings(**{**given, **changes})


def test_images_are_normalised_as_the_weights_have_it_and_what_differs_is_said(cache, tmp_path, caplog):
    dataset = CachedDataset(cache)
    task = make_task("classes", len(dataset.classes))
    weights = timm.create_model("test_resnet", num_classes=9).state_dict()
    about = timm.get_pretrained_cfg("test_resnet")

    def learner(**changes):
        given = settings_of(weights="file", **changes)
        return Learner(given, dataset, task, CpuDevice(), weights)

    own = learner()
    assert own.mean == pytest.approx([255 * value for value in about.mean])
    assert own.std == pytest.approx([255 * value for value in about.std])
    assert "mean" not in own.image_differences
    known = dataset.manifest.statistics
    assert "mean" in learner(mean=known.mean, std=known.std).image_differences
    fresh = Learner(settings_of(), dataset, task, CpuDevice())
    assert (fresh.mean, fresh.image_differences) == (list(known.mean), "")
    torch.save(weights, tmp_path / "file.pt")
    with caplog.at_level(logging.WARNING, "tpucache"):
        given = settings_of(weights=str(tmp_path / "file.pt"), mean=known.mean, std=known.std, epochs=1)
        train(tmp_path / "run", given, dataset, None, CpuDevice(), RunOptions(replay=False))
    assert "the weights were trained with mean" in caplog.text


def test_a_run_with_a_named_optimizer_continues_bit_by_bit(cache, tmp_path):
    dataset = CachedDataset(cache)
    settings = settings_of(optimizer="timm.optim:Lamb", lr=0.005)

    class Stop:
        def losses(self, first, values):
            pass

        def epoch(self, row):
            raise KeyboardInterrupt

    quick = RunOptions(replay=False)
    train(tmp_path / "whole", settings, dataset, None, CpuDevice(), quick)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "halves", settings, dataset, None, CpuDevice(), dataclasses.replace(quick, watchers=[Stop()]))
    train(tmp_path / "halves", settings, dataset, None, CpuDevice(), dataclasses.replace(quick, resume=True))
    whole, halves = (torch.load(tmp_path / name / "best.pt")["model"] for name in ("whole", "halves"))
    assert all(torch.equal(tensor, halves[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("name", ["Lamb", "Lion", "Adan", "RMSpropTF", "SGDW"])
def test_a_state_of_timms_optimizers_is_continued(name):
    torch.manual_seed(0)
    model, other = (torch.nn.Linear(4, 3) for _ in range(2))
    other.load_state_dict(model.state_dict())
    first, second = (make_optimizer(each, find_optimizer(f"timm.optim:{name}"), 0.01, 0.1) for each in (model, other))
    inputs = torch.randn(6, 5, 4)

    def step(each, optimizer, batch):
        each(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in inputs[:3]:
        step(model, first, batch)
    other.load_state_dict(model.state_dict())
    load_optimizer(second, copy.deepcopy(first.state_dict()))
    for batch in inputs[3:]:
        step(model, first, batch)
        step(other, second, batch)
    assert torch.equal(model.weight, other.weight)


def test_binary_cross_entropy_of_classes_is_timms():
    outputs, labels = torch.randn(6, 4), torch.randint(0, 4, (6,))
    task = make_task("classes", 4).with_loss("bce")
    for smoothing in (0.0, 0.1):
        expected = timm_loss.BinaryCrossEntropy(smoothing)(outputs, labels)
        torch.testing.assert_close(task.loss(outputs, task.targets(labels, smoothing)), expected)


def test_focal_loss_of_many_labels_is_torchvisions():
    from torchvision.ops import sigmoid_focal_loss

    outputs, labels = torch.randn(6, 4), torch.randint(0, 2, (6, 4)).float()
    expected = sigmoid_focal_loss(outputs, labels, alpha=-1, gamma=2, reduction="mean")
    torch.testing.assert_close(make_task("multilabel", 4).with_loss("focal").loss(outputs, labels), expected)
