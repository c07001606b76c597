"""Names, keys and the index's dtype: what the format promises byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.store import format as fmt

NUMBERS = st.integers(0, 2**64 - 1)


@pytest.mark.slow
@given(NUMBERS)
def test_a_key_is_the_eight_big_endian_bytes_of_its_number(number: int) -> None:
    assert fmt.encode_key(number) == number.to_bytes(8, "big")


@pytest.mark.slow
@given(st.integers(0, fmt.MAX_VARIANTS), st.integers(0, fmt.MAX_SHARDS))
def test_every_shard_name_is_one_that_readers_accept_and_tells_variant_and_block(variant: int, block: int) -> None:
    match = fmt.SHARD_NAME.fullmatch(fmt.shard_name(variant, block))
    assert match is not None
    assert (int(match[1]), int(match[2])) == (variant, block)


@pytest.mark.parametrize(
    ("variant", "block", "name"),
    [(0, 0, "v00-00000.lmdb"), (1, 2, "v01-00002.lmdb"), (1000, 123456, "v1000-123456.lmdb")],
)
def test_shards_keep_the_names_they_had(variant: int, block: int, name: str) -> None:
    assert fmt.shard_name(variant, block) == name


def test_an_index_row_is_twenty_little_endian_bytes_in_this_order() -> None:
    row = np.array([(0x0102030405060708, 0x11121314, 0x21222324, 0x31323334)], fmt.INDEX_DTYPE)
    assert row.tobytes().hex() == "0807060504030201141312112423222134333231"
    assert fmt.INDEX_DTYPE.names == ("offset", "length", "crc32", "shard")


def test_the_files_of_a_cache_keep_their_names() -> None:
    assert (fmt.MANIFEST_NAME, fmt.INDEX_NAME, fmt.SAMPLES_NAME) == ("manifest.json", "index.npy", "samples.npz")
    assert (fmt.FORMAT, fmt.VERSION) == ("tpucache", 6)


def test_the_files_of_a_cache_are_known_by_their_names_and_no_others() -> None:
    names = ["manifest.json", "times.json", "version-3.json", "index-1.npy", "samples.npz", "v01-00002.lmdb"]
    names.append(f"hashes-{'0a' * 32}.npz")
    assert all(fmt.is_cache_file(name) and fmt.is_cache_file(f".{name}.123.tmp") for name in names)
    others = ["thesis.tmp", ".thesis.7.tmp", ".manifest.json.tmp", "manifest.json.7.tmp", ".warmup", "", "hashes-1.npz"]
    assert not any(map(fmt.is_cache_file, others))
