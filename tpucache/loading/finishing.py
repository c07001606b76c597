"""BatchFinish: uploads a CachedLoader's batches to a torch device, which decodes, normalises and augments them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tpucache.errors import DependencyError, UsageError
from tpucache.loading.indices import to_integer
from tpucache.loading.tensors import HAS_TORCH
from tpucache.ondevice.augment import check_fields, check_labels
from tpucache.ondevice.draws import draw
from tpucache.ondevice.settings import AugmentSettings
from tpucache.store.fields import IMAGE, LABEL, Field

if TYPE_CHECKING:
    import torch

    from tpucache.loading.augment import HostCrop
    from tpucache.ondevice.modules import Augment

#: A device as torch takes it: "cuda", "cpu", "xla" or a torch.device.
Device = Any


class Fields(Protocol):
    """A CachedDataset, or the mixed samples of several caches: their manifest and the fields of their records."""

    @property
    def manifest(self) -> Any:
        """The manifest of the cache; for mixed samples, that of the first cache."""
        ...

    @property
    def record_fields(self) -> Sequence[Field]:
        """The fields of a record as the loader reads them."""
        ...


@dataclass(frozen=True)
class FinishSettings:
    """How a loader finishes its batches: on which device, by its name in torch, and with which augmentation.

    `augment` is None if images are neither normalised nor augmented. `size` is the height and width of random crops;
    None for the size of the images.
    """

    device: str
    augment: AugmentSettings | None
    size: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, augment: AugmentSettings | None, normalise: bool, device: Device, size: Any = None
    ) -> FinishSettings | None:
        """Make the settings from a CachedLoader's arguments; None if none of them is given.

        Raises UsageError for invalid arguments, and DependencyError without torch.
        """
        if augment is not None and not isinstance(augment, AugmentSettings):
            raise UsageError(f"augment is an AugmentSettings, such as AugmentSettings(flip=True), not {augment!r:.60}")
        if augment is None and not normalise and device is None and size is None:
            return None
        settings = AugmentSettings() if augment is None and normalise else augment
        return cls(_usable("cpu" if device is None else device), settings, None if size is None else _to_size(size))

    @property
    def is_on_cpu(self) -> bool:
        """Whether the finished batches are in the host's memory."""
        return self.device.startswith("cpu")


class BatchFinish:
    """Turns a loader's batches into the input of a model, on the device."""

    def __init__(self, settings: FinishSettings, dataset: Fields, crop: HostCrop | None = None) -> None:
        """Upload the constants to the device. Raises UsageError if the records' fields do not fit the settings.

        If `crop` is given, the batches have the images that `crop` reads: already decoded and cropped, and normalised
        if nothing else is left to do.
        """
        import torch

        from tpucache.ondevice.modules import Augment, decoder

        self._device, augment = torch.device(settings.device), settings.augment
        manifest = dataset.manifest
        fields: dict[str, Field] = {field.name: field for field in manifest.fields}
        shapes = {field.name: field.shape for field in dataset.record_fields}
        check_fields(augment, fields)
        if crop is not None:
            augment = crop.left
        self._draws = None if augment == AugmentSettings() else augment
        self._classes = len(manifest.classes)
        self._decode = None
        if len(shapes.get(IMAGE, ())) == 1 and crop is None:
            self._decode = decoder(dataset).to(self._device)
        self._augment: Augment | None = None
        if augment is not None:
            image, statistics = fields[IMAGE], manifest.statistics
            self._size = height, width = (image.shape[0], image.shape[1]) if crop is None else crop.size
            self._augment = Augment(augment, statistics.mean, statistics.std, height, width, self._device, image.dtype)

    def __call__(self, batch: Any, seed: int, step: int, rows: int, own: slice) -> Any:
        """Finish a batch, (images, labels) or a dict. Normalised images are float32.

        The random numbers follow from (seed, step). The global batch has `rows` rows, and this batch is the slice `own`
        of them.
        """
        import torch

        named = dict(batch) if isinstance(batch, Mapping) else dict(zip((IMAGE, LABEL), batch, strict=True))
        check_labels(named[LABEL].numpy(), self._draws, named)
        with torch.no_grad():
            fields = {name: self._put(tensor) for name, tensor in named.items()}
            if self._decode is not None:
                fields[IMAGE] = self._decode(fields[IMAGE])
            if self._augment is not None:
                draws = None if self._draws is None else draw(self._draws, seed, step, rows, self._size)[own]
                fields = self._augmented(self._augment, fields, draws)
        return fields if isinstance(batch, Mapping) else (fields[IMAGE], fields[LABEL])

    def _augmented(
        self, augment: Augment, fields: dict[str, torch.Tensor], drawn: npt.NDArray[np.float32] | None
    ) -> dict[str, torch.Tensor]:
        import torch

        labels = fields.pop(LABEL)
        draws = None if drawn is None else self._put(torch.from_numpy(np.ascontiguousarray(drawn)))
        # The loader reads images with channels last, so this view is contiguous.
        changed = augment.fields({**fields, IMAGE: fields[IMAGE].permute(0, 2, 3, 1)}, draws)
        if draws is not None:
            labels = augment.views(labels)
            if augment.settings.mixes:
                targets = labels if labels.ndim > 1 else torch.nn.functional.one_hot(labels, self._classes)
                changed[IMAGE], labels = augment.mix(changed[IMAGE], targets.float(), draws)
        return {**changed, LABEL: labels}

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        # On CUDA, a copy from page-locked memory is asynchronous, and a copy from other memory is not.
        return tensor.to(self._device, non_blocking=self._device.type == "cuda")


def _to_size(size: Any) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise UsageError(f"size is the size of the crops in pixels, such as 224 or (160, 224), not {size!r:.60}")
    height, width = (to_integer("size", side, 1) for side in sides)
    return height, width


def _usable(device: Device) -> str:
    if not HAS_TORCH:
        raise DependencyError(
            "augment, normalise and device need torch, which is not installed: use tpucache.jax.feed, or install torch"
        )
    import torch

    try:
        torch.empty(1, device=device)
        return str(torch.device(device))
    except Exception as error:  # torch's exception depends on the device, and on how torch was built
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"device {device!r} cannot be used: {reason}") from error
