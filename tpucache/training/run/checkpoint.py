"""Checkpoints, which plain torch can load on any machine."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from tpucache.errors import TrainingError, calling
from tpucache.store.files import check_stored, open_file, write_atomically
from tpucache.training.device.tensors import to_host

_SHOWN: Final = 200  # characters of a library's message, at most


def save_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain values atomically; tensors are copied to the host. Raises TrainingError on failure."""
    target = io.BytesIO()
    with calling("torch", TrainingError, f"{path} was not written; the checkpoint before it is kept"):
        torch.save(to_host(dict(content)), target)
    try:
        write_atomically(Path(path), target.getvalue())
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}. The checkpoint before it is kept") from error


def is_stored_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense, on the host, and has all its values in memory.

    A copy of such a tensor takes no more memory than the tensor itself.
    """
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


class ContentError(ValueError):
    """Raised for a file that is damaged, is in another format, or has more than tensors and plain values."""


def read_saved(path: str | Path) -> Any:
    """Return tensors and plain values, on the host, that `torch.save` has written. No code in the file is run.

    Only this function reads files of torch. It reads only the zip format: files of torch before 1.6 are pickles, which
    `weights_only` does not make safe in every version. Raises ContentError for other files, and OSError for a file that
    cannot be opened.
    """
    try:
        with open_file(path) as file:
            check_stored(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except zipfile.BadZipFile as error:
        raise ContentError(
            f"{error}: it is damaged, or in the format of torch before 1.6, which may run code. If you trust it, save "
            "it again by today's `torch.save`, or as safetensors"
        ) from error
    except pickle.UnpicklingError as error:  # torch's message advises to run the file's code
        raise ContentError(
            "it holds objects that are neither tensors nor plain values, and loading them would run code"
        ) from error
    except (KeyboardInterrupt, MemoryError, OSError):
        raise
    except Exception as error:  # torch raises any error for a broken file
        raise ContentError(" ".join(str(error).split())[:_SHOWN] or type(error).__name__) from error


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint, on the host. No code in its pickles is run.

    Raises TrainingError for a file that cannot be read, or is no checkpoint.
    """
    try:
        content = read_saved(path)
    except (ContentError, OSError) as error:
        raise TrainingError(f"{path} cannot be read: {error}. Copy it again, or train again") from error
    if not isinstance(content, dict):
        raise TrainingError(
            f"{path} is no checkpoint of a run: it holds a {type(content).__name__}, not a dict. Copy it "
            "again, or train again"
        )
    return content
