"""Export the best weights of runs as ONNX or safetensors, with a card that says how to preprocess images."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import logging
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from tpucache.errors import DependencyError, TrainingError, UsageError, calling
from tpucache.store.fields import IMAGE
from tpucache.store.manifest import Manifest
from tpucache.training.run.report import run_folders
from tpucache.training.run.saved import SavedRun, load_run
from tpucache.training.tasks.task import Task
from tpucache.training.weights import write_result
from tpucache.version import __version__

Kind = Literal["onnx", "safetensors"]
KINDS: Final = get_args(Kind)
CARD_NAME: Final = "card.json"
_MARK: Final = "tpucache-export"
_VERSION: Final = 1


class Predicting(nn.Module):
    """A run's model from pixels to predictions: it normalises the pixels, and returns probabilities or label values."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, model: nn.Module, task: Task, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.model, self._task = model, task
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self._task.predictions(self.model((pixels - self.mean) / self.std))


def export_runs(
    runs: Sequence[str | Path],
    manifest: Manifest,
    folder: str | Path,
    kind: Kind,
    trust: Collection[str] = (),
) -> list[Path]:
    """Write the best weights of each run, and a card, to a folder; return the paths of the models' files.

    A `safetensors` file has only the network's weights, by their names in torch.
    """
    folders, folder = [each for run in runs for each in run_folders(Path(run))], Path(folder)
    check_export(folder, kind)
    _clear(folder)
    written, models = [], []
    for number, run in enumerate(folders):
        saved = load_run(run)
        saved.check_trusted(trust)
        _check_inputs(saved)
        task, model, content = saved.task, saved.load_model(), saved.content
        height, width, channels = saved.fields[IMAGE][1]
        path = folder / f"model-{number}.{kind}"
        if kind == "onnx":
            whole = Predicting(model, task, content["mean"], content["std"]).eval()
            data = _onnx(whole, torch.zeros(2, channels, height, width), run)
        else:
            data = _safetensors(model)
        write_result(path, data)
        written.append(path)
        models.append(
            {
                "file": path.name,
                "sha256": hashlib.sha256(data).hexdigest(),
                "model": saved.settings.model,
                "weight": 1 / len(folders),
                "mean": list(content["mean"]),
                "std": list(content["std"]),
                "labels": {name: list(values) for name, values in task.constants().items()},
            }
        )
    card = _card(manifest, saved, kind, models)
    write_result(folder / CARD_NAME, (json.dumps(card, indent=1) + "\n").encode())
    return written


def check_export(folder: Path, kind: Kind) -> None:
    if kind not in KINDS:
        raise UsageError(f"models are exported as {' or '.join(KINDS)}, not {kind!r}")
    names = ("onnx", "onnxscript") if kind == "onnx" else ("safetensors",)
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise DependencyError(
                f"{name} cannot be imported: {error}. Run `pip install {' '.join(names)}` to export models"
            ) from error
    try:
        if folder.exists() and any(folder.iterdir()) and not _is_export(folder):
            raise UsageError(f"{folder} has files that are no export of tpucache: give another folder")
    except OSError as error:
        raise TrainingError(f"{folder} cannot be read: {error}") from error


def _clear(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in [folder / CARD_NAME, *(each for kind in KINDS for each in folder.glob(f"model-*.{kind}"))]:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be written: {error}") from error


def _is_export(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        card = json.loads((folder / CARD_NAME).read_text())
        return isinstance(card, dict) and card.get("format") == _MARK
    return False


def _check_inputs(run: SavedRun) -> None:
    if IMAGE not in run.fields or run.settings.inputs or run.settings.eval_step:
        raise UsageError(
            f"the model of {run.folder} takes more than an image, or has an evaluation step of yours: export this "
            "model with torch yourself"
        )


def _onnx(model: nn.Module, example: torch.Tensor, run: Path) -> bytes:
    batch = torch.export.Dim("batch")
    log = logging.getLogger("torch.onnx")
    level = log.level
    try:
        log.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model,
                (example,),
                input_names=["pixels"],
                output_names=["predictions"],
                dynamic_shapes=({0: batch},),
                dynamo=True,
            )
        data: bytes = program.model_proto.SerializeToString()  # type: ignore[union-attr]  # given dynamo
    except Exception as error:  # torch's exporter raises errors of many types
        reason = " ".join(str(error).split())[:300]
        raise TrainingError(
            f"the model of {run} cannot be exported by torch {torch.__version__}: {reason}. Export it as safetensors"
        ) from error
    finally:
        log.setLevel(level)
    return data


def _safetensors(model: nn.Module) -> bytes:
    from safetensors.torch import save

    # safetensors refuses tensors that share memory.
    tensors = {name: each.detach().clone().contiguous() for name, each in model.state_dict().items()}
    with calling("safetensors", TrainingError, "Export as onnx, or install another version of safetensors"):
        data: bytes = save(tensors)
    return data


def _card(manifest: Manifest, run: SavedRun, kind: Kind, models: list[dict[str, Any]]) -> dict[str, Any]:
    dtype, (height, width, channels) = run.fields[IMAGE]
    task = run.task
    return {
        "format": _MARK,
        "version": _VERSION,
        "tpucache": __version__,
        "kind": kind,
        "task": task.name,
        "outputs": task.outputs,
        "classes": list(run.content["classes"]),
        "input": {
            "size": [height, width],
            "channels": channels,
            "colours": {1: "grey", 3: "RGB"}.get(channels, "as stored"),
            "layout": "batch, channels, height, width",
            "dtype": "float32",
            "range": [0, 255] if dtype == "|u1" else "as stored",
            "fit": run.images.get("fit", manifest.recipe.get("fit", "crop")),
            "filter": "lanczos",
        },
        "normalised_inside": kind == "onnx",
        "predictions": {
            "values": "probabilities" if task.name != "regression" else "in the labels' unit",
            "of_outputs": _of_outputs(task),
        },
        "models": models,
    }


def _of_outputs(task: Task) -> str:
    if task.name == "regression":
        return "the outputs, times `std` and plus `mean` of `labels` where the model has some"
    if task.name == "multilabel":
        return "their sigmoid"
    return "their sigmoid, divided by its sum" if getattr(task, "loss_name", "") == "bce" else "their softmax"
