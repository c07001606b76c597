"""dct-zstd and dct-lz4: each has one packing, and its records are what a repair would make again."""

from __future__ import annotations

import lz4.block
import numpy as np
import pytest

from tpucache import FormatError
from tpucache.store.codecs import CODECS, coefficients, encode, sparse
from tpucache.store.codecs.coefficients import layout_of
from tpucache.store.fields import Field, check_field

PACKINGS = {"dct-zstd": "sparse", "dct-lz4": "nibbles"}


def test_records_of_a_form_keep_their_bytes() -> None:
    """A repair makes the very bytes that the manifest has the SHA-256 of."""
    image = np.random.default_rng(0).normal(128, 30, (64, 64, 3)).clip(0, 255).astype(np.uint8)
    field = Field("image", "dct-lz4", "|u1", image.shape, 90, "420", "nibbles")
    form = b"".join(sparse.squeeze(coefficients.pack(image, layout_of(image.shape, 90, "420")), "nibbles"))
    assert encode(field, image) == lz4.block.compress(form, store_size=False)


@pytest.mark.parametrize("codec", PACKINGS)
@pytest.mark.parametrize("packing", [None, "sparse", "nibbles", "dense", ""])
def test_a_dct_field_has_the_packing_of_its_codec(codec: str, packing: str | None) -> None:
    field = Field("image", codec, "|u1", (8, 8, 3), 90, "420", packing)
    if packing == PACKINGS[codec]:
        check_field(field)
    else:
        with pytest.raises(FormatError, match=f"the packing of {codec} is '{PACKINGS[codec]}'.* wrote {packing!r}"):
            check_field(field)


@pytest.mark.parametrize("codec", sorted({*CODECS} - {*PACKINGS}))
@pytest.mark.parametrize("packing", ["sparse", "dense", ""])
def test_other_codecs_refuse_every_packing(codec: str, packing: str) -> None:
    shape = () if codec == "bytes" else (8, 8, 3)
    with pytest.raises(FormatError, match=f"{codec} has no packing, and no release wrote '{packing}'"):
        check_field(Field("picture", codec, "|u1", shape, packing=packing))
