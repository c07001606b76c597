"""Checkpoints, which plain torch can load on any machine, and files of weights to begin from."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from tpucache.errors import DependencyError, TrainingError, UsageError
from tpucache.runs import BEST_NAME
from tpucache.store.files import check_is_local, check_stored, open_file, write_atomically
from tpucache.training.device.tensors import to_host
from tpucache.training.settings import TrainSettings

_SHOWN: Final = 200  # characters of a library's message, at most


def save_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain values atomically, the tensors as on the host. Raises TrainingError."""
    target = io.BytesIO()
    torch.save(to_host(dict(content)), target)
    try:
        write_atomically(Path(path), target.getvalue())
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}; the checkpoint before it is kept") from error


def is_stored_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense and in memory with all of its values, so that a copy takes no more than it."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the host, without pickle's code. Raises TrainingError."""
    try:
        with open_file(path) as file:
            check_stored(file)
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to run the file's code
        raise TrainingError(
            f"{path} is no checkpoint: it holds something else than tensors and plain values. Copy it again, or train "
            "again"
        ) from error
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # torch raises whatever a broken file makes it raise
        reason = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        raise TrainingError(f"{path} cannot be read: {reason}. Copy it again, or train again") from error
    return content


Weights = dict[str, torch.Tensor]

#: Where checkpoints of other programs keep the weights of the model.
_CONTAINERS: Final = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params", "state_dict_ema")
_SAFETENSORS: Final = ".safetensors"


def read_weights(source: str | Path) -> Weights:
    """Return tensors by name, on the host: of a `.safetensors` file, a state dict saved by torch, or a run's folder.

    A checkpoint that holds a state dict among other things is one, too. No code in the file is run. Raises UsageError
    when there are no such weights, DependencyError for a `.safetensors` file without safetensors.
    """
    check_is_local(source)
    path = Path(source)
    if path.is_dir():
        path /= BEST_NAME
        if not path.exists():
            raise UsageError(
                f"{source} has no {BEST_NAME}: give a file of weights, or a run of which an epoch has ended"
            )
    if not path.is_file():
        raise UsageError(f"there are no weights at {source}: give a file of weights, or the folder of a run")
    content = _read_safetensors(path) if path.suffix == _SAFETENSORS else _read_torch(path)
    weights = _find_tensors(content)
    if not weights:
        raise UsageError(
            f"{path} has no weights by name: save them by `torch.save(model.state_dict(), FILE)` or safetensors"
        )
    for name, tensor in weights.items():
        if not is_stored_whole(tensor):
            raise UsageError(
                f"{path}: {name[:60]!r} has more values than the file: save it as a dense tensor, after `.contiguous()`"
            )
    return weights


def initial_weights(run: str | Path, settings: TrainSettings) -> Weights | None:
    """Return the weights that a new run begins with, None for random ones. Raises as `read_weights` does."""
    if settings.weights is None:
        return None
    check_is_local(settings.weights)
    source = Path(settings.weights)
    if source.resolve() in (Path(run).resolve(), (Path(run) / BEST_NAME).resolve()):
        raise UsageError(f"--weights {source} is in the folder of the new run: give another folder as --run")
    return read_weights(source)


def _read_safetensors(path: Path) -> Any:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise DependencyError(
            f"{path} cannot be read without safetensors: {error}. `pip install safetensors`, or save the "
            "weights by torch"
        ) from error
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is no safetensors file that can be read: {error}. Copy it again") from error


def _read_torch(path: Path) -> Any:
    try:
        with open_file(path) as file:
            if zipfile.is_zipfile(file):  # torch before 1.6 wrote no archive
                check_stored(file)
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to run the file's code
        raise UsageError(
            f"{path} is no file of weights alone: it is something else, or holds objects whose code would be run. Save "
            "the weights by `torch.save(model.state_dict(), FILE)` or safetensors"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} cannot be read as weights: {error}. Copy it again") from error


def _find_tensors(content: Any) -> Weights:
    """Return the tensors of a mapping, or those of the first mapping in it that a checkpoint keeps weights in."""
    if not isinstance(content, Mapping):
        return {}
    for name in _CONTAINERS:
        if isinstance(content.get(name), Mapping) and (found := _find_tensors(content[name])):
            return found
    return {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
