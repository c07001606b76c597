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
from tpucache.warmup.sources.source import Item, Listing, Sample

# ITU-T T.81, tables K.1 and K.2, in the zigzag order in which JPEG files store them.
LUMA = """16 11 12 14 12 10 16 14 13 14 18 17 16 19 24 40 26 24 22 22 24 49 35 37 29 40 58 51 61 60 57 51
          56 55 64 72 92 78 64 68 87 69 55 56 80 109 81 87 95 98 103 104 103 62 77 113 121 112 100 120 92 101 103 99"""
CHROMA = "17 18 18 24 21 24 47 26 26 47 99 66 56 66" + " 99" * 50


def table_of(numbers, quality):
    """Return Q[u][v] of a table in zigzag order."""
    diagonals = sorted(
        ((u, v) for u in range(8) for v in range(8)), key=lambda at: (sum(at), at[0] if sum(at) % 2 else at[1])
    )
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    table = {
        at: min(255, max(1, (int(t) * scale + 50) // 100)) for at, t in zip(diagonals, numbers.split(), strict=True)
    }
    table[0, 0] = max(2, table[0, 0])
    return table


def signed(number, bits):
    return number - (1 << bits) if number >> (bits - 1) else number


def doubled(rows):
    """Return rows of samples, twice as many."""
    out = []
    for k, row in enumerate(rows):
        before, after = rows[max(k - 1, 0)], rows[min(k + 1, len(rows) - 1)]
        out.append([(3 * a + b) / 4 for a, b in zip(row, before, strict=True)])
        out.append([(3 * a + b) / 4 for a, b in zip(row, after, strict=True)])
    return out


def turned(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def to_colours(luma, blue, red, height, width):
    pixels = []
    for y in range(height):
        for x in range(width):
            a, b, c = luma[y][x], blue[y][x], red[y][x]
            pixels.append((a + 1.402 * c, a - 0.344136 * b - 0.714136 * c, a + 1.772 * b))
    return np.clip(np.rint(np.array(pixels)), 0, 255).reshape(height, width, 3)


def decode_coefficients(packed, height, width, channels, quality, chroma):
    step = 2 if channels == 3 and chroma == "420" else 1
    block_rows, block_columns = -(-height // (8 * step)), -(-width // (8 * step))
    planes = [(block_rows * step, block_columns * step, table_of(LUMA, quality))]
    planes += [(block_rows, block_columns, table_of(CHROMA, quality))] * (channels - 1)
    parts = [
        {(u, i, v, j): 0 for u in range(8) for i in range(rows) for v in range(8) for j in range(columns)}
        for rows, columns, _ in planes
    ]
    lows, highs = [], []
    for (_, _, table), c in zip(planes, parts, strict=True):
        w = [1 + max((v for v in range(8) if table[u, v] <= (16 if u == v == 0 else 8)), default=-1) for u in range(8)]
        lows += [(c, at) for at in c]
        highs += [(c, at) for at in c if at[2] < w[at[0]]]
    for (c, at), byte in zip(lows, packed, strict=False):
        c[at] = signed(byte, 8)
    rest = packed[len(lows) :]
    assert len(rest) == (len(highs) + 1) // 2
    nibbles = [byte & 15 for byte in rest] + [byte >> 4 for byte in rest]
    for (c, at), nibble in zip(highs, nibbles, strict=False):
        c[at] += 256 * signed(nibble, 4)
    samples = []
    for (rows, columns, table), c in zip(planes, parts, strict=True):
        for i in range(rows):
            for j in range(1, columns):
                c[0, i, 0, j] += c[0, i, 0, j - 1]
        wave = [
            [(0.5 if u else math.sqrt(1 / 8)) * math.cos((2 * y + 1) * u * math.pi / 16) for y in range(8)]
            for u in range(8)
        ]
        samples.append(
            [
                [
                    sum(
                        wave[u][y % 8] * wave[v][x % 8] * table[u, v] * c[u, y // 8, v, x // 8]
                        for u in range(8)
                        for v in range(8)
                    )
                    for x in range(8 * columns)
                ]
                for y in range(8 * rows)
            ]
        )
    luma = [[value + 128 for value in row] for row in samples[0]]
    if channels == 1:
        return np.clip(np.rint(np.array(luma)), 0, 255)[:height, :width, None]
    blue, red = (turned(doubled(turned(doubled(plane)))) if step == 2 else plane for plane in samples[1:])
    return to_colours(luma, blue, red, height, width)


def decode_sparse(form, size, packing):
    """Return the packed bytes of a sparse form."""
    groups = -(-size // 64)
    rest = iter(form[groups:])
    mask = [next(rest) if byte >> b & 1 else 0 for byte in form[:groups] for b in range(8)]
    bits = [byte >> b & 1 for byte in mask for b in range(8)]
    if packing == "nibbles":
        pairs = [next(rest) for _ in range(-(-sum(bits) // 2))]
        nibbles = [pairs[k // 2] >> 4 * (k % 2) & 15 for k in range(sum(bits))]
        rest = iter([signed(nibble, 4) & 255 if nibble else next(rest) for nibble in nibbles] + list(rest))
    packed = [next(rest) if bit else 0 for bit in bits]
    assert next(rest, None) is None
    return bytes(packed[:size])


def decode_planes(packed, height, width):
    half_rows, half_columns = -(-height // 2), -(-width // 2)
    luma = [list(packed[y * width : (y + 1) * width]) for y in range(height)]
    chroma, start = [], height * width
    for _ in range(2):
        rows = [
            [value - 128 for value in packed[start + y * half_columns : start + (y + 1) * half_columns]]
            for y in range(half_rows)
        ]
        chroma.append(turned(doubled(turned(doubled(rows)))))
        start += half_rows * half_columns
    blue, red = chroma
    return to_colours(luma, blue, red, height, width)


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
    build_cache(Two(images), tmp_path / "cache", Recipe(size=(20, 9), codec=codec), jobs=1)
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


class Two:
    """A source of images."""

    def __init__(self, images):
        self.images = images

    def list(self):
        return Listing([Sample(number, str(number)) for number in range(len(self.images))])

    def load(self, sample):
        return Item({"image": self.images[sample.number]})


@pytest.mark.parametrize(("height", "width"), [(8, 6), (7, 5)])
def test_planes_are_as_the_page_says(height, width):
    packed = yuv420.pack(image_of(height, width, 3))
    assert np.abs(decode_planes(packed, height, width) - yuv420.unpack(packed, height, width)).max() <= 1
