"""Weights come from files of torch and safetensors, from checkpoints of other programs, and from runs."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import struct
import sys
import types
import zipfile

import pytest
import torch

from tpucache import DependencyError, UsageError
from tpucache.training.run.weights import find_weights, initial_weights, read_weights
from tpucache.training.settings import TrainSettings

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}


@pytest.mark.parametrize(
    "content",
    [
        WEIGHTS,
        {"state_dict": WEIGHTS, "epoch": 3},
        {"model": WEIGHTS, "optimizer": {"state": {}, "param_groups": []}},
        {"net": {"state_dict": WEIGHTS}, "best": 0.5},
    ],
)
def test_a_state_dict_is_found_in_what_torch_saved(tmp_path, content):
    torch.save(content, tmp_path / "file.pth")
    found = read_weights(tmp_path / "file.pth")
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_run_gives_its_best_weights(tmp_path):
    torch.save({"version": 1, "model": WEIGHTS, "mean": [0.0]}, tmp_path / "best.pt")
    assert read_weights(tmp_path).keys() == read_weights(tmp_path / "best.pt").keys() == WEIGHTS.keys()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weights": 3}, "has no weights by name: save them by"),
        ([torch.ones(2)], "has no weights by name"),
        ({"model": torch.nn.Linear(2, 2)}, "objects that are neither tensors nor plain values"),
        (b"no checkpoint", "cannot be read as weights: its first bytes are not those of a zip archive"),
        (None, "there are no weights at"),
    ],
)
def test_what_has_no_weights_is_an_error(tmp_path, content, message):
    path = tmp_path / "file.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(UsageError, match=message):
        read_weights(path)


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
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "wide.pt")
    with pytest.raises(UsageError, match=r"wide\.pt: 'a' has more values than the file"):
        read_weights(tmp_path / "wide.pt")


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


def test_pretrained_weights_without_timm_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(DependencyError, match="pip install timm"):
        find_weights("pretrained", "timm:resnet18")


def test_pretrained_weights_are_of_models_of_timm(tmp_path):
    with pytest.raises(UsageError, match="is for models of timm, and 'cnn' is not one"):
        find_weights("pretrained", "cnn")
    assert find_weights(str(tmp_path), "cnn") == tmp_path
