"""The module that finishes the packed images of a cache: what a training step begins with."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from tpucache.errors import UsageError
from tpucache.ondevice.decode import CoefficientDecoder, Yuv420Decoder
from tpucache.store.codecs import CODECS
from tpucache.store.codecs.base import PackedCodec
from tpucache.store.codecs.coefficients import layout_of
from tpucache.store.fields import IMAGE, Field


class HasFields(Protocol):
    """A CachedDataset, or anything else with a manifest."""

    @property
    def manifest(self) -> Any:
        """The manifest; of it, `fields` is used."""
        ...


def decoder(dataset: HasFields) -> nn.Module:
    """Return the module that makes uint8 (B, channels, height, width) of the images of `CachedLoader(finish="device")`.

    It consists of plain torch operators with static shapes and has no parameters; `.to(device)` moves its constants.
    Images of a codec without a packed form pass through it as they are. Raises UsageError for a cache without images.
    """
    fields = {field.name: field for field in dataset.manifest.fields}
    if IMAGE not in fields:
        raise UsageError("a cache without images has nothing to decode")
    return field_decoder(fields[IMAGE])


def field_decoder(field: Field) -> nn.Module:
    """Return the decoder of a field's packed form."""
    if not isinstance(CODECS[field.codec], PackedCodec):
        return _AsItIs()
    if field.quality is None:
        return Yuv420Decoder(*field.shape[:2])
    return CoefficientDecoder(layout_of(field.shape, field.quality, field.chroma))


class _AsItIs(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images
