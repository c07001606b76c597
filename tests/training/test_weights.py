"""Weights are found, read without running code, and taken over where they fit."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import struct
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
from stopping import differences
from torch import nn

from tpucache import DependencyError, TrainingError, UsageError
from tpucache.training.model import DENSE_MODELS, MODELS, build_model
from tpucache.training.settings import TrainSettings
from tpucache.training.weights import (
    find_weights,
    initial_weights,
    load_checkpoint,
    load_matching,
    read_weights,
    save_checkpoint,
)


def make_model(outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, outputs))


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


def resnet18(outputs):
    """Return a ResNet-18 with torchvision's names, with other running statistics than new ones."""

    def block(inputs, outputs):
        stride = 1 if inputs == outputs else 2
        parts = {
            "conv1": nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            "bn1": nn.BatchNorm2d(outputs),
            "conv2": nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            "bn2": nn.BatchNorm2d(outputs),
        }
        if stride > 1:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            parts["downsample"] = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))
        return nn.ModuleDict(parts)

    widths = (64, 64, 128, 256, 512)
    layers = {
        f"layer{at + 1}": nn.Sequential(block(*pair), block(pair[1], pair[1]))
        for at, pair in enumerate(itertools.pairwise(widths))
    }
    stem = {"conv1": nn.Conv2d(3, 64, 7, 2, 3, bias=False), "bn1": nn.BatchNorm2d(64)}
    model = nn.ModuleDict({**stem, **layers, "fc": nn.Linear(512, outputs)}).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model


def scores(model, x):
    """Return what torchvision's resnet18 does."""
    x = nn.functional.max_pool2d(torch.relu(model["bn1"](model["conv1"](x))), 3, 2, 1)
    for layer in range(1, 5):
        for block in model[f"layer{layer}"]:
            past = block["downsample"](x) if "downsample" in block else x
            x = torch.relu(block["bn1"](block["conv1"](x)))
            x = torch.relu(block["bn2"](block["conv2"](x)) + past)
    return model["fc"](x.mean((2, 3)))


def test_torchvisions_resnet18_fits_ours_and_gives_the_same():
    torch.manual_seed(0)
    theirs, ours = resnet18(3), build_model("resnet18", 3).eval()
    matched = load_matching(ours, theirs.state_dict(), "file")
    assert (matched.resized, matched.missing, matched.unused) == ([], [], [])
    assert len(matched.matched) == len(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), scores(theirs, images))
    wrapped = {"module." + name: tensor for name, tensor in theirs.state_dict().items()}
    other = load_matching(build_model("resnet18", 5), wrapped, "file")
    assert [name for name, *_ in other.resized] == ["13.weight", "13.bias"]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "module.model.", "model._orig_mod."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equal_models_take_over_everything_whatever_a_wrapper_has_named_it(prefix, dtype):
    ours, theirs = make_model(), make_model(seed=1).to(dtype).state_dict()
    weights = {prefix + name: tensor for name, tensor in theirs.items()}
    if prefix == "model.":
        weights["loss.weight"] = torch.ones(3)  # as in Lightning's checkpoints: not all names have the prefix
    matched = load_matching(ours, weights, "file")
    assert list(matched.matched) == list(ours.state_dict())
    assert (matched.resized, matched.missing) == ([], [])
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == (torch.float32 if tensor.is_floating_point() else torch.int64)
        assert torch.equal(tensor, theirs[name].to(tensor.dtype))


def test_weights_of_what_the_model_contains_match():
    ours, theirs = nn.ModuleDict({"inner": make_model(), "head": nn.Linear(2, 2)}), make_model(seed=1)
    matched = load_matching(ours, theirs.state_dict(), "file")
    assert list(matched.missing) == ["head.weight", "head.bias"]
    assert torch.equal(ours["inner"][0].weight, theirs[0].weight)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"0.bias": torch.full((5,), torch.nan)}, r"not finite, such as in 0\.bias"),
        (None, r"file has no weights for this model: the model has 0\.weight.*a\.weight"),
    ],
)
def test_weights_that_match_nothing_or_have_diverged_are_refused(changed, words):
    none = {"1.num_batches_tracked": torch.tensor(3), "a.weight": torch.zeros(2)}
    with pytest.raises(UsageError, match=words):
        load_matching(make_model(), {**make_model(seed=1).state_dict(), **changed} if changed else none, "file")


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


def test_other_convolutions_are_not_adapted_to_channels():
    def make(width):
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, 2, 3), nn.BatchNorm2d(2))

    matched = load_matching(make(4), make(3).state_dict(), "file")
    assert not matched.adapted
    assert [name for name, *_ in matched.resized] == ["0.weight", "0.bias", "1.weight"]


WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}


@pytest.mark.parametrize(
    "content",
    [
        WEIGHTS,
        {"state_dict": WEIGHTS, "epoch": 3},
        {"model": WEIGHTS, "optimizer": {"state": {}, "param_groups": []}},
        {"net": {"state_dict": WEIGHTS}, "best": 0.5},
        {"version": 1, "model": WEIGHTS, "mean": [0.0]},
    ],
)
def test_a_state_dict_is_found_in_what_torch_saved(tmp_path, content):
    torch.save(content, tmp_path / "best.pt")
    for place in (tmp_path, tmp_path / "best.pt"):
        found = read_weights(place)
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def write(path, content):
    """Write bytes as they are, nothing for None, and what else there is as torch saves it."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)


OBJECTS = "objects that are neither tensors"


@pytest.mark.parametrize(
    ("read", "content", "error", "words"),
    [
        (read_weights, {"weights": 3}, UsageError, "has no weights by name: save them by"),
        (read_weights, [torch.ones(2)], UsageError, "has no weights by name"),
        (read_weights, {"model": nn.Linear(2, 2)}, UsageError, f"{OBJECTS} nor plain values"),
        (read_weights, b"no checkpoint", UsageError, "its first bytes are not those of a zip archive"),
        (read_weights, None, UsageError, "there are no weights at"),
        (read_weights, {"a": torch.zeros(1).expand(1 << 40)}, UsageError, "'a' has more values than the file"),
        (load_checkpoint, b"", TrainingError, r"file\.pt.*cannot be read"),
        (load_checkpoint, b"no zip", TrainingError, r"file\.pt.*cannot be read"),
        (load_checkpoint, None, TrainingError, r"file\.pt.*cannot be read"),
        (load_checkpoint, {"run": Path("anything")}, TrainingError, OBJECTS),
        (load_checkpoint, [1, 2], TrainingError, "holds a list, not a dict"),
        (load_checkpoint, torch.ones(2), TrainingError, "holds a Tensor, not a dict"),
    ],
)
def test_what_has_no_weights_is_an_error_without_advice_to_run_its_code(tmp_path, read, content, error, words):
    write(tmp_path / "file.pt", content)
    with pytest.raises(error, match=words) as raised:
        read(tmp_path / "file.pt")
    assert "file.pt" in str(raised.value)
    assert "weights_only" not in str(raised.value)


def test_a_folder_without_a_run_and_the_new_runs_own_folder_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has no best\.pt"):
        read_weights(tmp_path)
    torch.save({"model": WEIGHTS}, tmp_path / "best.pt")
    for source in (tmp_path, tmp_path / "best.pt"):
        with pytest.raises(UsageError, match="in the folder of the new run"):
            initial_weights(tmp_path, TrainSettings(weights=str(source)), 3)
    assert initial_weights(tmp_path, TrainSettings(), 3) == (TrainSettings(), None)


def test_safetensors_are_read_by_their_package_and_missing_it_is_one_clear_error(tmp_path, monkeypatch):
    header = json.dumps({"b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.5, 2.5))
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(DependencyError, match=r"pip install safetensors"):
        read_weights(path)
    stub = types.ModuleType("safetensors")
    inner = types.ModuleType("safetensors.torch")
    inner.load_file = lambda file: {"b": torch.frombuffer(bytearray(file.read_bytes()[-8:]), dtype=torch.float32)}
    monkeypatch.setitem(sys.modules, "safetensors", stub)
    monkeypatch.setitem(sys.modules, "safetensors.torch", inner)
    assert read_weights(path)["b"].tolist() == [1.5, 2.5]


def with_two_lists(packed: bytes, where: str) -> bytes:
    """Return an archive whose list of compressed members torch finds, and Python one of stored members."""
    end = packed.rindex(b"PK\5\6")
    count, length, start = struct.unpack_from("<HLL", packed, end + 10)
    stored = bytearray(packed[start:end])
    at = 0
    while at < length:
        struct.pack_into("<H", stored, at + 10, zipfile.ZIP_STORED)
        struct.pack_into("<2L", stored, at + 20, 1, 1)
        at += 46 + sum(struct.unpack_from("<3H", stored, at + 28))
    if where == "before the end":
        return packed[:end] + stored + packed[end:]

    def end_of(place: int) -> bytes:
        return b"PK\6\6" + struct.pack("<Q2H2L4Q", 44, 45, 45, 0, 0, count, count, length, place)

    locator = b"PK\6\7" + struct.pack("<LQL", 0, end, 1)
    shown = end_of(start) + stored + end_of(end + 56)
    return packed[:end] + shown + locator + b"PK\5\6" + struct.pack("<4H2LH", 0, 0, count, count, length, end + 56, 0)


def test_weights_take_no_more_memory_than_their_file(tmp_path):
    saved = io.BytesIO()
    torch.save({"a": torch.zeros(1 << 16)}, saved)
    with zipfile.ZipFile(saved) as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(UsageError, match=r"packed\.pt cannot be read as weights: it has compressed members"):
        read_weights(tmp_path / "packed.pt")
    for where in ("before the end", "in a record of 64 bits"):
        (tmp_path / "two.pt").write_bytes(with_two_lists((tmp_path / "packed.pt").read_bytes(), where))
        assert torch.load(tmp_path / "two.pt")["a"].shape == (1 << 16,)  # it follows the other list
        with pytest.raises(UsageError, match=r"two\.pt cannot be read as weights: its list of members is not where"):
            read_weights(tmp_path / "two.pt")


def test_the_format_of_before_archives_is_refused_also_where_an_archive_follows_it(tmp_path):
    old, archive = tmp_path / "old.pth", io.BytesIO()
    torch.save(WEIGHTS, old, _use_new_zipfile_serialization=False)
    torch.save(WEIGHTS, archive)
    for data in (old.read_bytes(), old.read_bytes() + archive.getvalue()):
        (tmp_path / "file.pth").write_bytes(data)
        with pytest.raises(UsageError, match=r"torch before 1\.6, which may run code.* safetensors"):
            read_weights(tmp_path / "file.pth")


def test_a_pipe_has_no_weights_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    keep = os.open(tmp_path / "pipe.pt", os.O_RDWR | os.O_NONBLOCK)
    os.write(keep, b"no weights")  # a reader that opens it does not wait
    try:
        with pytest.raises(UsageError, match="there are no weights at"):
            read_weights(tmp_path / "pipe.pt")
    finally:
        os.close(keep)


def test_a_folder_has_the_file_that_the_hub_stores_or_its_only_one(tmp_path):
    torch.save(WEIGHTS, tmp_path / "swin.pth")
    assert read_weights(tmp_path).keys() == WEIGHTS.keys()
    torch.save(WEIGHTS, tmp_path / "other.pth")
    with pytest.raises(UsageError, match=r"2 other files of weights, other\.pth, swin\.pth"):
        read_weights(tmp_path)
    torch.save({"hub": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert read_weights(tmp_path).keys() == {"hub"}


def test_a_new_run_is_normalised_as_the_run_whose_weights_it_begins_with(tmp_path):
    torch.save({"model": WEIGHTS, "mean": [1.0, 2.0, 3.0], "std": [4.0, 5.0, 6.0]}, tmp_path / "best.pt")
    settings = TrainSettings(weights=str(tmp_path))

    def begun(channels=3, **changes):
        return initial_weights(tmp_path / "new", dataclasses.replace(settings, **changes), channels).settings

    assert (begun().mean, begun().std) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    for given in ({"mean": (9.0, 9.0, 9.0)}, {"channels": 1}):
        assert begun(**given).mean == given.get("mean")
    for bad in (None, [1.0, 2.0], [1.0, float("nan"), 1.0], [0.0, 1.0, 1.0], "123"):
        torch.save({"model": WEIGHTS, "mean": [1.0, 2.0, 3.0], "std": bad}, tmp_path / "best.pt")
        assert begun().mean is None


def test_weights_of_a_run_with_as_many_other_classes_are_taken_with_a_warning(tmp_path, caplog):
    settings = TrainSettings(weights=str(tmp_path))
    for learned, now, words in (
        (("a", "b", "c"), ("a", "c", "b"), "in another order: output 1 was 'b' and is now 'c'"),
        (("a", "b", "c"), ("a", "b", "d"), "classes: output 2 was 'c' and is now 'd'"),
        (("a", "b", "c"), ("a", "b", "c"), ""),
        (("a", "b", "c"), ("b", "c"), ""),  # the last layer has another size, and is created anew
    ):
        torch.save({"model": WEIGHTS, "classes": list(learned)}, tmp_path / "best.pt")
        caplog.clear()
        initial_weights(tmp_path / "new", settings, 3, now)
        assert words in caplog.text
        assert bool(words) == bool(caplog.text)


def test_pretrained_weights_are_of_models_of_timm(tmp_path, monkeypatch):
    assert find_weights(str(tmp_path), "cnn") == tmp_path
    monkeypatch.setitem(sys.modules, "timm", None)
    for model, error, words in (
        ("cnn", UsageError, "is for models of timm, and 'cnn' is not one"),
        ("timm:resnet18", DependencyError, "pip install timm"),
    ):
        with pytest.raises(error, match=words):
            find_weights("pretrained", model)


def test_a_checkpoint_comes_back_as_it_was_saved_and_a_failed_save_leaves_it(tmp_path, monkeypatch):
    content = {"model": {"w": torch.arange(6.0).view(2, 3)}, "list": [torch.ones(1), {"n": 3}], "name": "x"}
    path = tmp_path / "last.pt"
    save_checkpoint(path, content)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(TrainingError, match="No space left"):
            save_checkpoint(path, {"step": 2})
    assert differences(load_checkpoint(path), content) == []
    assert [each.name for each in tmp_path.iterdir()] == ["last.pt"]
