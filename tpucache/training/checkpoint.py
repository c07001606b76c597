"""What a run leaves behind: loadable by plain torch on any machine."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from tpucache.errors import TrainingError
from tpucache.store.files import write_atomically

CHECKPOINT_NAME: Final = "last.pt"


def save_checkpoint(run: Path, content: Mapping[str, Any]) -> Path:
    """Write tensors and plain values as `last.pt`, on the host, whole or not at all. Raises TrainingError."""
    target = io.BytesIO()
    torch.save(_to_host(dict(content)), target)
    path = run / CHECKPOINT_NAME
    try:
        write_atomically(path, target.getvalue())
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}") from error
    return path


def load_checkpoint(run: Path) -> dict[str, Any]:
    """Read a run's checkpoint onto the host, without pickle's code. Raises TrainingError."""
    path = run / CHECKPOINT_NAME
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(f"{path} is no checkpoint that can be read: {error}") from error
    return content


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_host(item) for item in value)
    return value
