"""Files of weights: checkpoints, what a run begins with, and how weights are fitted into a model."""

from __future__ import annotations

import io
import logging
import math
import pickle
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from tpucache.errors import DependencyError, TrainingError, UsageError, calling
from tpucache.recipe import differing_images, image_settings
from tpucache.runs import BEST_NAME
from tpucache.store.files import check_is_local, check_stored, open_file, write_atomically
from tpucache.store.manifest import Manifest, differ_in_values
from tpucache.text import named
from tpucache.training.device.tensors import to_host
from tpucache.training.model import import_timm, timm_name
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks.regression import finite_numbers

_SHOWN: Final = 200  # characters of a library's message, at most


def save_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain values atomically; tensors are copied to the host. Raises TrainingError on failure."""
    target = io.BytesIO()
    with calling("torch", TrainingError, f"{path} was not written; the checkpoint before it is kept"):
        torch.save(to_host(dict(content)), target)
    write_result(Path(path), target.getvalue())


def write_result(path: Path, data: bytes) -> None:
    """Write a file atomically, and make its folder. Raises TrainingError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}. The version before it is kept") from error


def is_stored_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense, on the host, and has all its values in memory."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


class ContentError(ValueError):
    """Raised for a file that is damaged, is in another format, or has more than tensors and plain values."""


def read_saved(path: str | Path) -> Any:
    """Return tensors and plain values, on the host, that `torch.save` has written.

    Only this function reads files of torch. It reads only the zip format: files of torch before 1.6 are pickles, which
    `weights_only` does not make safe in every version.
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
    hub, or `pretrained` for timm's weights of `model`.
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
    """Return tensors by name, on the host, from a `.safetensors` file, a state dict saved by torch, or a folder."""
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
    if not isinstance(content, Mapping):
        return {}
    for name in _CONTAINERS:
        if isinstance(content.get(name), Mapping) and (found := _find_tensors(content[name])):
            return found
    return {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}


Shape = tuple[int, ...]

Weights = Mapping[str, torch.Tensor]

#: Prefixes of weights' names from wrappers of models: DataParallel, torch.compile, Lightning and others.
_PREFIXES: Final = ("module.", "_orig_mod.", "model.", "net.", "backbone.")


#: Numbers of channels of images. A first convolution with another number is not adapted: it may work on patches.
_IMAGE_CHANNELS: Final = (1, 3, 4)

#: Names of torchvision and timm for the parts of a ResNet-18 and of its blocks, and the names in our `resnet18`.
_RESNET_PARTS: Final = {"conv1": "0.0", "bn1": "0.1", "fc": "13"}

_BLOCK_PARTS: Final = {
    "conv1": "first.0", "bn1": "first.1", "conv2": "second.0", "bn2": "second.1",
    "downsample.0": "past.0", "downsample.1": "past.1",
}  # fmt: skip

_BLOCK: Final = re.compile(r"layer([1-4])\.([01])\.(.+)")


@dataclass(frozen=True)
class MatchedWeights:
    """Which of a file's weights a model has taken, by the names of the model's tensors.

    `adapted` and `resized` tensors (name, shape in the model, shape in the file) had another shape: the former were
    made to fit, and the latter, like those `missing` from the file, keep the model's new values. `unused` tensors are
    only in the file. `trouble` is the error of timm's own adaptation, if any.
    """

    matched: Sequence[str]
    resized: Sequence[tuple[str, Shape, Shape]]
    missing: Sequence[str]
    unused: Sequence[str]
    adapted: Sequence[tuple[str, Shape, Shape]] = ()
    trouble: str = ""

    def __str__(self) -> str:
        taken = len(self.matched) + len(self.adapted)
        total = taken + len(self.resized) + len(self.missing)
        adapted = [f"{name} {ours} from {theirs}" for name, ours, theirs in self.adapted]
        resized = [f"{name} {ours} where the weights have {theirs}" for name, ours, theirs in self.resized]
        parts = (
            ("adapted to the model's image size or channels: ", adapted),
            ("created anew, as the sizes differ: ", resized),
            ("created anew, as the weights lack them: ", self.missing),
            ("not in the model: ", self.unused),
            ("timm could not adapt the weights: ", [self.trouble] if self.trouble else []),
        )
        listed = "".join(f"; {text}{named(names)}" for text, names in parts if names)
        return f"{taken:,} of the model's {total:,} tensors are taken over{listed}"


def load_matching(model: nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> MatchedWeights:
    """Load into a model, on the host, all weights that fit by name and shape; return which weights these are.

    Weights for a model of timm are adapted by timm, which knows the original authors' names and resizes position
    embeddings.
    """
    own = model.state_dict()
    parameters = {name for name, _ in model.named_parameters()}
    given = max(_renamings(model, weights), key=lambda names: _count_matches(own, names))
    renamed, trouble = _adapted_by_timm(model, own, given, weights)
    matched = {name: tensor for name, tensor in renamed.items() if _fits(own, name, tensor)}
    if not parameters & {*matched}:
        raise UsageError(
            f"{source} has no weights for this model: the model has {named([*own])}, {source} has "
            f"{named([*weights])}. Give the weights of the same --model"
        )
    before = {name: tuple(given.get(name, tensor).shape) for name, tensor in renamed.items()}
    resampled = {name: matched.pop(name) for name in [*matched] if before[name] != tuple(own[name].shape)}
    others = {name: tensor for name, tensor in renamed.items() if name in own and name not in matched}
    others |= resampled | _with_channels(model, own, others)
    adapted = {name: tensor for name, tensor in others.items() if _fits(own, name, tensor)}
    taken = matched | adapted
    bad = [name for name in parameters & {*taken} if not bool(taken[name].isfinite().all())]
    if bad:
        raise UsageError(f"{source} has values that are not finite, such as in {min(bad)}: give other weights")
    model.load_state_dict(taken, strict=False)
    shapes = {name: (name, tuple(own[name].shape), before[name]) for name in own if name in others}
    return MatchedWeights(
        matched=[name for name in own if name in matched],
        resized=[shapes[name] for name in shapes if name not in adapted],
        missing=[name for name in own if name not in renamed],
        unused=[name for name in renamed if name not in own],
        adapted=[shapes[name] for name in shapes if name in adapted],
        trouble=trouble,
    )


def adapt_channels(weight: torch.Tensor, channels: int) -> torch.Tensor:
    """Return a convolution's weight (outputs, inputs, height, width) for this number of input channels, as timm does.

    For one channel the inputs are summed: a grey image then gives the outputs that its copy in each channel gave
    before. For other numbers, the inputs are repeated in order and multiplied by inputs / `channels`.
    """
    before = weight.shape[1]
    if channels == 1:
        return weight.float().sum(1, keepdim=True).to(weight.dtype)
    repeated = weight.float().repeat(1, math.ceil(channels / before), 1, 1)[:, :channels]
    return (repeated * (before / channels)).to(weight.dtype)


def _with_channels(
    model: nn.Module, own: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    found = {}
    for name in _first_convolutions(model):
        weight = others.get(name)
        if weight is None or weight.dim() != 4 or weight.shape[1] not in _IMAGE_CHANNELS:
            continue
        outputs, channels, *sides = own[name].shape
        if (weight.shape[0], *weight.shape[2:]) == (outputs, *sides) and weight.shape[1] != channels:
            found[name] = adapt_channels(weight, channels)
    return found


def _first_convolutions(model: nn.Module) -> Iterable[str]:
    """Return the names of the weights that take the images: those that timm names, or the first convolution's."""
    convolutions = {
        f"{name}.weight".lstrip("."): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and module.groups == 1
    }
    named = getattr(model, "pretrained_cfg", {}).get("first_conv") if _is_of_timm(model) else None
    wanted = [f"{name}.weight" for name in ([named] if isinstance(named, str) else named or ())]
    return [name for name in wanted if name in convolutions] or [*convolutions][:1]


def _adapted_by_timm(
    model: nn.Module, own: Weights, given: Weights, original: Weights
) -> tuple[dict[str, torch.Tensor], str]:
    """Return a file's weights as timm adapts them to its model, and timm's error, or "", if it adapts none.

    `original` has the names of the file, which timm may know; `given` is without known prefixes.
    """
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None) if _is_of_timm(model) else None
    if adapt is None:
        return dict(given), ""
    adapted, trouble = [], ""
    for weights in (given, original):
        try:
            adapted.append(dict(adapt(dict(weights), model)))
        except Exception as error:  # noqa: BLE001  # timm raises any error, and other weights fit without it
            trouble = trouble or f"{type(error).__name__}: {' '.join(str(error).split())}"
    best = max([*adapted, dict(given)], key=lambda weights: len(own.keys() & weights.keys()))
    return best, trouble if not adapted else ""


def _is_of_timm(model: nn.Module) -> bool:
    return type(model).__module__.startswith("timm.")


def _renamings(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights under several choices of names, one of which may be the model's.

    These are: as given; without known prefixes; with the name of a child of the model in front; `resnet18`'s for
    others'.
    """
    yield dict(weights)
    for outer in _PREFIXES:
        without = {name.removeprefix(outer): tensor for name, tensor in weights.items()}
        if without.keys() != weights.keys():
            yield without
            for inner in _PREFIXES:
                yield {name.removeprefix(inner): tensor for name, tensor in without.items()}
    for child, _ in model.named_children():
        yield {f"{child}.{name}": tensor for name, tensor in weights.items()}
    for prefix in ("", *_PREFIXES):
        if f"{prefix}layer1.0.conv1.weight" in weights:
            yield {_resnet_name(name.removeprefix(prefix)): tensor for name, tensor in weights.items()}


def _resnet_name(name: str) -> str:
    """Return `resnet18`'s name for a ResNet's tensor of torchvision or timm; other names unchanged."""
    part, _, kind = name.rpartition(".")
    if found := _BLOCK.fullmatch(part):
        layer, block, inner = found.groups()
        return f"{1 + 2 * int(layer) + int(block)}.{_BLOCK_PARTS.get(inner, inner)}.{kind}"
    return f"{_RESNET_PARTS.get(part, part)}.{kind}"


def _count_matches(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> int:
    return sum(_fits(own, name, tensor) for name, tensor in weights.items())


def _fits(own: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> bool:
    return name in own and own[name].shape == tensor.shape
