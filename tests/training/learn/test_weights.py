"""What fits by name and shape is taken over, whatever wrapped it; the rest is reported."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tpucache import UsageError
from tpucache.training.learn.model import DENSE_MODELS, MODELS, build_model, load_matching


def make_model(outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, outputs))


def test_equal_models_take_over_everything():
    ours, theirs = make_model(), make_model(seed=1)
    matched = load_matching(ours, theirs.state_dict(), "file")
    assert list(matched.matched) == list(ours.state_dict())
    assert (matched.resized, matched.missing, matched.unused) == ([], [], [])
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])


def test_a_head_of_another_size_keeps_its_new_values_and_is_reported():
    ours, theirs = make_model(), make_model(7, seed=1)
    head = ours[2].weight.detach().clone()
    weights = {**theirs.state_dict(), "extra": torch.zeros(2)}
    del weights["1.bias"]
    matched = load_matching(ours, weights, "file")
    assert torch.equal(ours[2].weight, head)
    assert torch.equal(ours[0].weight, theirs[0].weight)
    assert matched.resized == [("2.weight", (3, 5), (7, 5)), ("2.bias", (3,), (7,))]
    assert (matched.missing, matched.unused) == (["1.bias"], ["extra"])
    text = str(matched)
    assert text.startswith("6 of the model's 9 tensors are taken over")
    assert "2.weight (3, 5) where the weights have (7, 5)" in text
    assert "lack them: 1.bias" in text
    assert "not in the model: extra" in text


class Block(nn.Module):
    """A block of a ResNet with torchvision's names."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        """Return what torchvision's BasicBlock does."""
        past = x if self.downsample is None else self.downsample(x)
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + past)


class ResNet18(nn.Module):
    """A ResNet-18 with torchvision's names, with other running statistics than new ones."""

    def __init__(self, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = (64, 64, 128, 256, 512)
        for layer in range(1, 5):
            blocks = [Block(widths[layer - 1], widths[layer], 1 + (layer > 1)), Block(widths[layer], widths[layer], 1)]
            self.add_module(f"layer{layer}", nn.Sequential(*blocks))
        self.fc = nn.Linear(512, outputs)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        """Return what torchvision's resnet18 does."""
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for layer in range(1, 5):
            x = self.get_submodule(f"layer{layer}")(x)
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_torchvisions_resnet18_fits_ours_and_gives_the_same(prefix):
    torch.manual_seed(0)
    theirs, ours = ResNet18(3).eval(), build_model("resnet18", 3).eval()
    matched = load_matching(ours, {prefix + name: tensor for name, tensor in theirs.state_dict().items()}, "file")
    assert (matched.resized, matched.missing, matched.unused) == ([], [], [])
    assert len(matched.matched) == len(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))
    other = load_matching(build_model("resnet18", 5), theirs.state_dict(), "file")
    assert [name for name, *_ in other.resized] == ["13.weight", "13.bias"]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module.model.", "model._orig_mod."])
def test_names_from_wrappers_match(prefix):
    ours, theirs = make_model(), make_model(seed=1)
    weights = {prefix + name: tensor for name, tensor in theirs.state_dict().items()}
    if prefix == "model.":
        weights["loss.weight"] = torch.ones(3)  # as in Lightning's checkpoints: not all names have the prefix
    assert len(load_matching(ours, weights, "file").matched) == 9
    assert torch.equal(ours[0].weight, theirs[0].weight)


def test_weights_of_what_the_model_contains_match():
    ours, theirs = nn.ModuleDict({"inner": make_model(), "head": nn.Linear(2, 2)}), make_model(seed=1)
    matched = load_matching(ours, theirs.state_dict(), "file")
    assert list(matched.missing) == ["head.weight", "head.bias"]
    assert torch.equal(ours["inner"][0].weight, theirs[0].weight)


def test_weights_of_which_no_parameter_matches_are_an_error():
    weights = {"1.num_batches_tracked": torch.tensor(3), "a.weight": torch.zeros(2)}
    with pytest.raises(UsageError, match=r"file has no weights for this model: the model has 0\.weight.*a\.weight"):
        load_matching(make_model(), weights, "file")


def test_weights_that_have_diverged_are_an_error():
    weights = make_model(seed=1).state_dict()
    weights["0.bias"][2] = torch.nan
    with pytest.raises(UsageError, match=r"not finite, such as in 0\.bias"):
        load_matching(make_model(), weights, "file")


def test_half_precision_becomes_the_models_own():
    ours, theirs = make_model(), make_model(seed=1)
    load_matching(ours, {name: tensor.half() for name, tensor in theirs.state_dict().items()}, "file")
    assert ours[0].weight.dtype == torch.float32
    assert torch.equal(ours[0].weight, theirs[0].weight.half().float())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *DENSE_MODELS])
@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3)])
def test_the_first_convolution_is_adapted_to_the_channels(name, before, after):
    ours, theirs = build_model(name, 2, after), build_model(name, 2, before)
    matched = load_matching(ours, theirs.state_dict(), "file")
    (adapted,) = matched.adapted
    assert (matched.resized, matched.missing, len(matched.matched)) == ([], [], len(ours.state_dict()) - 1)
    assert adapted[1][1] == after
    assert adapted[2][1] == before
    total = len(ours.state_dict())
    assert str(matched).startswith(f"{total} of the model's {total} tensors are taken over; adapted")
    assert f"{adapted[0]} {adapted[1]} from {adapted[2]}" in str(matched)


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (1, 4), (3, 6)])
def test_an_adapted_convolution_gives_of_grey_what_it_gave_before(before, after):
    old, grey = nn.Conv2d(before, 5, 3, bias=False), torch.randn(2, 1, 8, 8)
    new = nn.Conv2d(after, 5, 3, bias=False)
    assert load_matching(nn.Sequential(new, nn.PReLU()), nn.Sequential(old, nn.PReLU()).state_dict(), "file").adapted
    torch.testing.assert_close(
        new(grey.expand(-1, after, -1, -1)), old(grey.expand(-1, before, -1, -1)), atol=1e-5, rtol=1e-5
    )


def test_other_convolutions_are_not_adapted_to_channels():
    def make(width):
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, 2, 3), nn.BatchNorm2d(2))

    matched = load_matching(make(4), make(3).state_dict(), "file")
    assert not matched.adapted
    assert [name for name, *_ in matched.resized] == ["0.weight", "0.bias", "1.weight"]
