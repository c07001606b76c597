"""The weights that a run begins with: from a file, a folder, another run, or Hugging Face's cache on this machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from tpucache.errors import DependencyError, TrainingError, UsageError, calling
from tpucache.recipe import differing_images, image_settings
from tpucache.runs import BEST_NAME
from tpucache.store.files import check_is_local
from tpucache.store.manifest import Manifest, differ_in_values
from tpucache.training.learn.model import import_timm, timm_name
from tpucache.training.learn.tasks.regression import finite_numbers
from tpucache.training.run.checkpoint import ContentError, is_stored_whole, read_saved
from tpucache.training.settings import TrainSettings

Tensors = dict[str, torch.Tensor]

_log: Final = logging.getLogger("tpucache")

#: Keys under which checkpoints of other programs keep the model's weights.
_CONTAINERS: Final = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params", "state_dict_ema")
_SAFETENSORS: Final = ".safetensors"
#: Names of weight files in a repository of the hub, in order of preference.
_HUB_NAMES: Final = (
    "model.safetensors",
    "pytorch_model.bin",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)
_SUFFIXES: Final = (_SAFETENSORS, ".bin", ".pth", ".pt")
_HUB: Final = "hub:"
_OTHER_WEIGHTS: Final = "Give a file or a folder to --weights"
#: The value of --weights that means timm's weights for the model.
PRETRAINED: Final = "pretrained"


class InitialWeights(NamedTuple):
    """The weights that a run begins with, and the run's settings.

    `weights` is None for random weights. If the weights come from a run, `settings` have that run's normalisation.
    """

    settings: TrainSettings
    weights: Tensors | None


def initial_weights(
    run: str | Path,
    settings: TrainSettings,
    channels: int,
    classes: Sequence[str] = (),
    manifest: Manifest | None = None,
) -> InitialWeights:
    """Return the weights that a new run begins with, and the run's settings.

    `channels` is the number of channels of the run's images, `classes` are the names of its classes, and `manifest` is
    that of its training cache. If the weights come from a run with as many other classes or columns of labels, whose
    last layer fits, or from a run whose images were made with another `fit` or `mode`, a warning says so. Raises
    UsageError for weights in the folder of the new run, and the errors of `find_weights` and `read_weights`.
    """
    if settings.weights is None:
        return InitialWeights(settings, None)
    source = find_weights(settings.weights, settings.model)
    if source.resolve() in (Path(run).resolve(), (Path(run) / BEST_NAME).resolve()):
        raise UsageError(f"--weights {source} is in the folder of the new run: give another folder as --run")
    path = _weights_file(source)
    content = _read(path)
    weights = _tensors(path, content)
    _warn_of_classes(source, content, tuple(classes))
    if manifest is not None and isinstance(content, Mapping):
        _warn_of_values(source, content.get("value_names"), manifest.value_names)
        _warn_of_images(source, content.get("images"), manifest)
    is_open = settings.mean is None and settings.std is None
    if is_open and path.name == BEST_NAME and isinstance(content, Mapping):
        mean, std = (finite_numbers(content.get(name), channels) for name in ("mean", "std"))
        if mean and std and min(std) > 0:
            settings = replace(settings, mean=mean, std=std)
    return InitialWeights(settings, weights)


def _warn_of_classes(source: Path, content: Any, classes: tuple[str, ...]) -> None:
    learned = content.get("classes") if isinstance(content, Mapping) else None
    if not isinstance(learned, (list, tuple)) or len(learned) != len(classes) or tuple(learned) == classes:
        return
    at = next(at for at, pair in enumerate(zip(learned, classes, strict=True)) if pair[0] != pair[1])
    order = " in another order" if {*map(str, learned)} == {*classes} else ""
    _log.warning(
        "%s has learned other classes%s: output %s was %r and is now %r. The last layer fits and begins with these "
        "weights: build the cache with --classes if the same classes are meant",
        source, order, at, str(learned[at])[:60], classes[at][:60],
    )  # fmt: skip


def _warn_of_values(source: Path, learned: object, names: Sequence[str]) -> None:
    if isinstance(learned, (list, tuple)) and len(learned) == len(names) and differ_in_values(learned, names):
        _log.warning(
            "%s has learned the columns %s, and the labels are now %s. The last layer fits and begins with these "
            "weights: relabel the cache with --label-col in the other order if the same columns are meant",
            source, ", ".join(str(name)[:60] for name in learned), ", ".join(name[:60] for name in names),
        )  # fmt: skip


def _warn_of_images(source: Path, learned: object, manifest: Manifest) -> None:
    before, now = differing_images(learned if isinstance(learned, Mapping) else {}, image_settings(manifest))
    if before:
        _log.warning(
            "%s has learned from images that were made with %s, and the images are now made with %s: warm up with the "
            "options of the run if the images should be alike", source, before, now,
        )  # fmt: skip


def find_weights(text: str, model: str) -> Path:
    """Return the path of weights; nothing is downloaded.

    `text` is a path, `hub:OWNER/NAME` or `hub:OWNER/NAME@REVISION` for a repository in the cache of the Hugging Face
    hub, or `pretrained` for timm's weights of `model`. Raises UsageError if this machine does not have the weights,
    DependencyError if huggingface_hub or timm is needed and missing.
    """
    if text.startswith(_HUB):
        name, _, revision = text.removeprefix(_HUB).partition("@")
        return _cached(name, _HUB_NAMES, revision or None)
    if text != PRETRAINED or Path(text).exists():
        check_is_local(text)
        return Path(text)
    timms = timm_name(model)
    if timms is None:
        raise UsageError(
            f"--weights pretrained is for models of timm, and {model!r} is not one: give a file or a folder"
        )
    timm = import_timm()
    with calling("timm", TrainingError, _OTHER_WEIGHTS):
        about = timm.get_pretrained_cfg(timms)
    if about is None or not (about.hf_hub_id or about.url):
        raise UsageError(f"timm has no weights for {timms}: give a file or a folder")
    downloaded = Path(torch.hub.get_dir(), "checkpoints", Path(about.url or "").name)
    if about.url and downloaded.is_file():
        return downloaded
    is_usual = about.hf_hub_filename in (None, *_HUB_NAMES)
    names = _HUB_NAMES if is_usual else (str(about.hf_hub_filename), *_HUB_NAMES)
    return _cached(about.hf_hub_id or timms, names, None)


def _cached(name: str, files: tuple[str, ...], revision: str | None) -> Path:
    """Return the path of the first of `files` that the Hugging Face hub's cache has for the repository `name`.

    Raises the errors of `find_weights`.
    """
    try:
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise DependencyError(
            f"the Hugging Face hub's cache cannot be read: {error}. Run `pip install huggingface_hub`, or give the "
            "file of the weights"
        ) from error
    with calling("huggingface_hub", TrainingError, _OTHER_WEIGHTS):
        try:
            found = [try_to_load_from_cache(name, file, revision=revision) for file in files]
        except HFValidationError as error:
            raise UsageError(f"--weights hub:{name} does not name a repository as OWNER/NAME: {error}") from error
    paths = [Path(path) for path in found if isinstance(path, str)]
    if not paths:
        raise UsageError(
            f"the Hugging Face hub's cache, {constants.HF_HUB_CACHE}, has no weights of {name}, and nothing is "
            f"downloaded: run `hf download {name}` where there is a network, or give the file or its folder to "
            "--weights"
        )
    return paths[0]


def _weights_file(source: Path) -> Path:
    """Raises UsageError if there is no file of weights, or more than one."""
    if not source.is_dir():
        if not source.is_file():
            raise UsageError(f"there are no weights at {source}: give a file of weights, or the folder of a run")
        return source
    for name in (BEST_NAME, *_HUB_NAMES):
        if (source / name).is_file():
            return source / name
    others = sorted(path for path in source.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if len(others) != 1:
        has = (
            f"{len(others)} other files of weights, {', '.join(path.name for path in others[:3])} …"
            if others
            else "no other file of weights"
        )
        raise UsageError(
            f"{source} has no {BEST_NAME}, no {_HUB_NAMES[0]}, and {has}: give a file of weights, or a run after its "
            "first epoch"
        )
    return others[0]


def read_weights(source: str | Path) -> Tensors:
    """Return tensors by name, on the host, from a `.safetensors` file, a state dict saved by torch, or a folder.

    A checkpoint may have the state dict among other things. In a folder the file is a run's `best.pt`, a name that the
    Hugging Face hub uses, or the only file of weights. No code in the file is run. Raises UsageError when there are no
    such weights, DependencyError for a `.safetensors` file without safetensors.
    """
    check_is_local(source)
    path = _weights_file(Path(source))
    return _tensors(path, _read(path))


def _read(path: Path) -> Any:
    return _read_safetensors(path) if path.suffix == _SAFETENSORS else _read_torch(path)


def _tensors(path: Path, content: Any) -> Tensors:
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


def _read_safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise DependencyError(
            f"{path} cannot be read without safetensors: {error}. Run `pip install safetensors`, or save the "
            "weights by torch"
        ) from error
    try:
        return load_file(path)
    except MemoryError:
        raise
    except Exception as error:  # the library may raise any error for a broken file
        raise UsageError(f"{path} is no safetensors file that can be read: {error}. Copy it again") from error


def _read_torch(path: Path) -> Any:
    try:
        return read_saved(path)
    except (ContentError, OSError) as error:
        raise UsageError(
            f"{path} cannot be read as weights: {error}. Copy it again, or save the weights by "
            "`torch.save(model.state_dict(), FILE)` or safetensors"
        ) from error


def _find_tensors(content: Any) -> Tensors:
    """Return the tensors in a checkpoint's content, by name; {} if there are none.

    They are in the content itself, or under the first of its keys in `_CONTAINERS` that has tensors.
    """
    if not isinstance(content, Mapping):
        return {}
    for name in _CONTAINERS:
        if isinstance(content.get(name), Mapping) and (found := _find_tensors(content[name])):
            return found
    return {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
