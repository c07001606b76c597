"""Checkpoints, which plain torch can load on any machine."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from tpucache.errors import TrainingError
from tpucache.store.files import check_stored, open_file, write_atomically
from tpucache.training.device.tensors import to_host

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
