"""Checkpoints are whole, on the host, and free of code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tpucache import TrainingError
from tpucache.training.run.checkpoint import load_checkpoint, save_checkpoint


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    content = {"model": {"w": torch.arange(6.0).view(2, 3)}, "list": [torch.ones(1), {"n": 3}], "name": "x"}
    path = tmp_path / "last.pt"
    save_checkpoint(path, content)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded["model"]["w"], content["model"]["w"])
    assert torch.equal(loaded["list"][0], torch.ones(1))
    assert loaded["list"][1] == {"n": 3}
    assert loaded["name"] == "x"
    assert torch.load(path, weights_only=True).keys() == content.keys()


def test_a_failed_save_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "last.pt", {"step": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TrainingError, match="No space left"):
        save_checkpoint(tmp_path / "last.pt", {"step": 2})
    monkeypatch.undo()
    assert load_checkpoint(tmp_path / "last.pt") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("data", [b"", b"no zip", None])
def test_what_is_no_checkpoint_is_named(tmp_path, data):
    if data is not None:
        (tmp_path / "last.pt").write_bytes(data)
    with pytest.raises(TrainingError, match=r"last\.pt"):
        load_checkpoint(tmp_path / "last.pt")


def test_a_checkpoint_that_would_run_code_is_refused_without_advice_to_run_it(tmp_path):
    torch.save({"run": Path("anything")}, tmp_path / "last.pt")
    with pytest.raises(TrainingError, match="objects that are neither tensors") as raised:
        load_checkpoint(tmp_path / "last.pt")
    assert "weights_only" not in str(raised.value)


@pytest.mark.parametrize("content", [[1, 2], torch.ones(2), "text", 3, None])
def test_a_file_that_holds_no_values_by_name_is_named(tmp_path, content):
    torch.save(content, tmp_path / "last.pt")
    with pytest.raises(TrainingError, match=r"last\.pt is no checkpoint of a run: it holds a \w+, not a dict"):
        load_checkpoint(tmp_path / "last.pt")


def test_a_checkpoint_in_the_old_format_is_refused(tmp_path):
    torch.save({"model": {}}, tmp_path / "last.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(TrainingError, match=r"torch before 1\.6, which may run code"):
        load_checkpoint(tmp_path / "last.pt")


def test_whatever_torch_raises_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "last.pt", {"step": 1})

    def fail(*_):
        raise RuntimeError("no storage\nfor it")

    monkeypatch.setattr("torch.save", fail)
    with pytest.raises(TrainingError, match="torch raised RuntimeError: no storage for it"):
        save_checkpoint(tmp_path / "last.pt", {"step": 2})
    assert load_checkpoint(tmp_path / "last.pt") == {"step": 1}
