"""Decoders of packed images written from docs/format.md alone give the pixels that ours give."""

from __future__ import annotations

import json
import math
import zlib

import lz4.block
import numpy as np
import pytest
import zstandard

from tpucache import Recipe, build_cache
from tpucache.store.codecs import coefficients, yuv420
from tpucache.store.codecs.coefficients import CoefficientLayout

# ITU-T T.81, tables K.1 and K.2, in the zigzag order in which JPEG files store them.
LUMA = """16 11 12 14 12 10 16 14 13 14 18 17 16 19 24 40 26 24 22 22 24 49 35 37 29 40 58 51 61 60 57 51
          56 55 64 72 92 78 64 68 87 69 55 56 80 109 81 87 95 98 103 104 103 62 77 113 121 112 100 120 92 101 103 99"""
CHROMA = "17 18 18 24 21 24 47 26 26 47 99 66 56 66" + " 99" * 50


def table_of(numbers, quality):
    """Return Q[u, v] of a table in zigzag order."""
    places = sorted(np.ndindex(8, 8), key=lambda at: (sum(at), at[0] if sum(at) % 2 else at[1]))
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    table = np.zeros((8, 8), np.int64)
    for at, number in zip(places, numbers.split(), strict=True):
        table[at] = min(255, max(1, (int(number) * scale + 50) // 100))
    table[0, 0] = max(2, table[0, 0])
    return table


def doubled(plane):
    """Return a plane with twice as many rows."""
    padded = np.pad(plane, ((1, 1), (0, 0)), mode="edge")
    return np.stack([3 * plane + padded[:-2], 3 * plane + padded[2:]], 1).reshape(-1, plane.shape[1]) / 4


def to_pixels(values):
    return np.clip(np.rint(values), 0, 255)


def to_colours(luma, chroma):
    blue, red = (plane[: luma.shape[0], : luma.shape[1]] for plane in chroma)
    return to_pixels(np.stack([luma + 1.402 * red, luma - 0.344136 * blue - 0.714136 * red, luma + 1.772 * blue], 2))


def decode_coefficients(packed, height, width, channels, quality, chroma):
    step = 2 if channels == 3 and chroma == "420" else 1
    rows, columns = (-(-side // (8 * step)) for side in (height, width))
    planes = [(rows * step, columns * step, table_of(LUMA, quality))]
    planes += [(rows, columns, table_of(CHROMA, quality))] * (channels - 1)
    bounds = np.cumsum([64 * rows * columns for rows, columns, _ in planes])
    *lows, rest = np.split(np.frombuffer(packed, np.uint8), bounds)
    nibbles = (np.concatenate([rest & 15, rest >> 4]) ^ 8) - np.int64(8)
    samples, used = [], 0
    wave = np.cos((2 * np.arange(8)[:, None] + 1) * np.arange(8) * math.pi / 16) / 2
    wave[:, 0] = math.sqrt(1 / 8)
    for (rows, columns, table), low in zip(planes, lows, strict=True):
        c = low.view(np.int8).astype(np.int64).reshape(8, rows, 8, columns)
        for u in range(8):
            w = 1 + max((v for v in range(8) if table[u, v] <= (16 if u == v == 0 else 8)), default=-1)
            end = used + rows * w * columns
            c[u, :, :w] += 256 * nibbles[used:end].reshape(rows, w, columns)
            used = end
        c[0, :, 0] = c[0, :, 0].cumsum(1)
        samples.append(np.einsum("yu,xv,uv,uivj->iyjx", wave, wave, table, c).reshape(8 * rows, 8 * columns))
    assert len(rest) == (used + 1) // 2
    luma = samples[0][:height, :width] + 128
    if channels == 1:
        return to_pixels(luma)[..., None]
    return to_colours(luma, [doubled(doubled(plane).T).T if step == 2 else plane for plane in samples[1:]])


def decode_sparse(form, size, packing):
    """Return the packed bytes of a sparse form."""

    def take(count):
        nonlocal form
        taken, form = np.split(form, [count])
        return taken

    def spread(bits, values):
        found = np.zeros(len(bits), np.uint8)
        found[bits == 1] = values
        return found

    form = np.frombuffer(form, np.uint8)
    bits = np.unpackbits(take(-(-size // 64)), bitorder="little")
    bits = np.unpackbits(spread(bits, take(bits.sum())), bitorder="little")
    count = int(bits.sum())
    if packing == "nibbles":
        pairs = take(-(-count // 2))
        nibbles = np.stack([pairs & 15, pairs >> 4], 1).ravel()[:count]
        values = np.where(nibbles > 7, nibbles + 240, nibbles)
        values[nibbles == 0] = take((nibbles == 0).sum())
    else:
        values = take(count)
    assert not len(form)
    return spread(bits, values)[:size].tobytes()


def decode_planes(packed, height, width):
    half = -(-height // 2), -(-width // 2)
    area, part = height * width, half[0] * half[1]
    luma, *chroma = np.split(np.frombuffer(packed, np.uint8).astype(float), [area, area + part])
    chroma = [doubled(doubled(plane.reshape(half) - 128).T).T for plane in chroma]
    return to_colours(luma.reshape(height, width), chroma)


def image_of(height, width, channels):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (-(-height // 5), -(-width // 5), channels), np.uint8)
    return blocks.repeat(5, 0).repeat(5, 1)[:height, :width]


@pytest.mark.parametrize(
    ("shape", "quality", "chroma"),
    [((20, 9, 3), 90, "420"), ((9, 20, 3), 98, "444"), ((8, 17, 1), 40, "420"), ((16, 16, 3), 100, "420")],
)
def test_packed_coefficients_are_as_the_page_says(shape, quality, chroma):
    height, width, channels = shape
    layout = CoefficientLayout(height, width, channels, quality, chroma)
    packed = coefficients.pack(image_of(*shape), layout)
    decoded = decode_coefficients(packed, height, width, channels, quality, chroma)
    assert np.abs(decoded - coefficients.unpack(packed, layout)).max() <= 1


@pytest.mark.parametrize(("codec", "packing"), [("dct-zstd", "sparse"), ("dct-lz4", "nibbles")])
def test_a_cache_is_as_the_page_says(tmp_path, codec, packing):
    """Manifest, index and shards are read with json, numpy and pread alone."""
    images = image_of(20, 9, 3), image_of(20, 9, 3)[::-1].copy()
    recipe = Recipe(size=(20, 9), codec=codec)
    build_cache([(image, 0) for image in images], tmp_path / "cache", recipe, jobs=1)
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    index = np.load(tmp_path / "cache" / "index.npy")
    (field,) = manifest["fields"]
    assert manifest["version"] == 6
    assert len(index) == 2
    layout = CoefficientLayout(20, 9, 3, field["quality"], field["chroma"])
    for (offset, length, crc, shard), image in zip(index.tolist(), images, strict=True):
        data = (tmp_path / "cache" / manifest["shards"][shard]["name"]).read_bytes()[offset : offset + length]
        assert zlib.crc32(data) == crc
        assert int.from_bytes(data[:4], "little") == length - 4
        form = (
            zstandard.ZstdDecompressor().decompress(data[4:])
            if codec == "dct-zstd"
            else lz4.block.decompress(data[4:], uncompressed_size=2 * layout.nbytes)
        )
        packed = decode_sparse(form, layout.nbytes, packing)
        assert packed == coefficients.pack(image, layout)
        ours = coefficients.unpack(packed, layout)
        assert np.abs(decode_coefficients(packed, 20, 9, 3, field["quality"], field["chroma"]) - ours).max() <= 1


@pytest.mark.parametrize(("height", "width"), [(8, 6), (7, 5)])
def test_planes_are_as_the_page_says(height, width):
    packed = yuv420.pack(image_of(height, width, 3))
    assert np.abs(decode_planes(packed, height, width) - yuv420.unpack(packed, height, width)).max() <= 1
