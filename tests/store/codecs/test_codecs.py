"""Arrays become record bytes and come back; bytes that are not theirs are refused."""

from __future__ import annotations

import contextlib
import io
import struct
import sys
import tracemalloc
import warnings
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from thorough import examples

from tpucache.errors import DamageError, DependencyError, UsageError
from tpucache.store.codecs import CODECS, encode, pictures
from tpucache.store.fields import DTYPES, Field, RecordLayout

Array = npt.NDArray[np.generic]

QUICK = settings(max_examples=40)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
IMAGES = st.tuples(st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 3])).flatmap(
    lambda shape: hnp.arrays(np.uint8, shape)
)
CODED = ("jpeg", "png", "zstd")


def field_of(array: Array, codec: str) -> Field:
    return Field("image", codec, array.dtype.str, array.shape)


def decode(field: Field, data: bytes) -> Array:
    out = np.zeros(field.shape, field.dtype)
    CODECS[field.codec].decode_into(field, memoryview(data), out)
    return out


def noise(*shape: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def smooth(height: int, width: int, channels: int) -> npt.NDArray[np.uint8]:
    rows, columns = np.mgrid[:height, :width]
    return np.repeat((rows * 3 + columns * 2)[..., None], channels, axis=2).astype(np.uint8)


def same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.slow
@QUICK
@given(st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(np.dtype(dtype), SHAPES)), IMAGES)
def test_lossless_codecs_keep_every_array_bit_by_bit(array: Array, image: Array) -> None:
    assert encode(field_of(array, "raw"), array) == array.tobytes()
    for each, codec in ((array, "raw"), (array, "zstd"), (image, "png")):
        field = field_of(each, codec)
        assert same(decode(field, encode(field, each)), each)


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_comes_close_by_either_decoder(channels: int, request: pytest.FixtureRequest) -> None:
    image = smooth(20, 30, channels)
    field = field_of(image, "jpeg")
    data = encode(field, image)
    fast = decode(field, data)
    assert np.abs(fast.astype(int) - image).max() <= 4
    request.getfixturevalue("without_simplejpeg")
    assert np.abs(decode(field, data).astype(int) - fast).max() <= 2


@pytest.mark.parametrize("codec", ["jpeg", "pillow's jpeg", "yuv420", "dct-zstd", "dct-lz4"])
def test_luma_by_itself_is_that_of_the_decoded_image(codec: str, request: pytest.FixtureRequest) -> None:
    if codec == "pillow's jpeg":
        request.getfixturevalue("without_simplejpeg")
        codec = "jpeg"
    grey = smooth(22, 30, 1)[..., 0]
    image = np.stack([grey + 20, grey, 150 - grey], -1)
    packing, chroma = (CODECS[codec].packing, "444") if codec.startswith("dct") else (None, None)
    field = Field("image", codec, "|u1", image.shape, 95 if chroma else None, chroma, packing)
    data, luma = encode(field, image), np.zeros((2, 22, 30), np.uint8)
    CODECS[codec].decode_luma(field, [memoryview(data)] * 2, luma)
    assert CODECS[codec].has_luma
    assert np.abs(luma - decode(field, data) @ np.array([0.299, 0.587, 0.114])).max() < 2
    with pytest.raises(DamageError, match=f"'image' does not (decode|unpack) as {codec}"):
        CODECS[codec].decode_luma(field, [memoryview(data), memoryview(data[:-9])], luma)
    if CODECS[codec].has_half_luma:
        half = np.zeros((2, 11, 15), np.uint8)
        CODECS[codec].decode_luma(field, [memoryview(data)] * 2, half)
        assert np.abs(half - luma.reshape(2, 11, 2, 15, 2).mean((2, 4))).max() <= 1
    else:
        assert not codec.startswith("dct")


def test_a_codec_that_has_no_luma_says_so() -> None:
    with pytest.raises(UsageError, match="png does not decode luma"):
        CODECS["png"].decode_luma(field_of(noise(4, 4, 3), "png"), [memoryview(b"")], np.zeros((1, 4, 4), np.uint8))


@pytest.mark.usefixtures("without_simplejpeg")
def test_without_simplejpeg_pillow_decodes_after_one_hint(caplog: pytest.LogCaptureFixture) -> None:
    field = Field("image", "jpeg", "|u1", (4, 4, 3))
    for _ in range(3):
        decode(field, encode(field, smooth(4, 4, 3)))
    (record,) = caplog.records
    assert "pip install simplejpeg" in record.message


@pytest.mark.parametrize("codec", ["raw", *CODED])
def test_the_same_array_makes_the_same_bytes_however_it_lies_in_memory(codec: str) -> None:
    image = noise(12, 10, 3)
    field = field_of(image, codec)
    strided = np.zeros((12, 20, 3), np.uint8)[:, ::2]
    strided[...] = image
    assert encode(field, image) == encode(field, strided) == encode(field, np.asfortranarray(image))


@pytest.mark.parametrize("codec", ["raw", *CODED])
@pytest.mark.parametrize("array", [noise(3, 4, 3), noise(4, 3), noise(4, 3, 3).astype(np.int8), noise(4, 3, 1)])
def test_an_array_that_is_not_the_fields_is_refused(codec: str, array: Array) -> None:
    with pytest.raises(UsageError, match="'image' takes"):
        encode(Field("image", codec, "|u1", (4, 3, 3)), array)


@pytest.fixture
def without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JPEG is decoded by Pillow."""
    pictures._simplejpeg.cache_clear()
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    yield
    pictures._simplejpeg.cache_clear()


@pytest.mark.parametrize("codec", CODED)
def test_bytes_of_another_shape_are_damage(codec: str) -> None:
    data = encode(Field("image", codec, "|u1", (6, 4, 3)), noise(6, 4, 3))
    for shape in ((4, 4, 3), (6, 5, 3), (24, 5, 1), (8, 8, 3)):
        with pytest.raises(DamageError, match="image"):
            decode(Field("image", codec, "|u1", shape), data)


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(st.sampled_from(CODED), st.data())
def test_damaged_bytes_decode_or_are_damage(codec: str, data: st.DataObject) -> None:
    image = smooth(12, 10, 3)
    field = field_of(image, codec)
    encoded = bytearray(encode(field, image))
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(encoded) - 1), st.integers(0, 255)), max_size=3)):
        encoded[at] = value
    length = data.draw(st.one_of(st.just(len(encoded)), st.integers(0, len(encoded))))
    with contextlib.suppress(DamageError):
        decode(field, bytes(encoded[:length]))


def test_a_png_of_sixteen_bits_is_damage() -> None:
    target = io.BytesIO()
    Image.fromarray(np.full((2, 2), 300, np.uint16)).save(target, "PNG")
    with pytest.raises(DamageError):
        decode(Field("image", "png", "|u1", (2, 2, 1)), target.getvalue())


def test_a_zstd_frame_that_announces_a_petabyte_is_damage() -> None:
    frame = zstandard.MAGIC_NUMBER.to_bytes(4, "little") + b"\xe0" + struct.pack("<Q", 1 << 50) + b"\x01\x00\x00"
    with pytest.raises(DamageError):
        decode(Field("image", "zstd", "|u1", (2, 2)), frame)


def test_a_zstd_frame_that_needs_a_large_window_is_damage() -> None:
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27, write_content_size=1)
    )
    frame = bytearray(compressor.compress(bytes(1 << 28)))
    size = frame.index(struct.pack("<I", 1 << 28))
    frame[size : size + 4] = struct.pack("<I", 4)
    with pytest.raises(DamageError, match="a frame of 4 bytes"):
        decode(Field("image", "zstd", "|u1", (2, 2)), bytes(frame[:-1]))


EXPANDING = b"x\0\0" + zlib.compress(bytes(1 << 26), 1)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(height: int, width: int, *parts: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes((1 + 3 * 4) * 4)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(parts) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data",
    [
        png(30_000, 30_000),
        png(12_000, 12_000),
        png(4, 4, chunk(b"iCCP", b"")),
        png(4, 4, chunk(b"iCCP", EXPANDING)),
        png(4, 4, chunk(b"zTXt", EXPANDING)),
        png(4, 4, chunk(b"tEXt", b"")),
        png(4, 4, chunk(b"gAMA", b"")),
        png(4, 4, chunk(b"eXIf", b"Exif")),
        png(4, 4, struct.pack(">I", (1 << 32) - 1) + b"IDAT"),
        png(4, 4)[:40],
    ],
)
def test_a_hostile_png_is_damage_without_a_warning_or_much_memory(data: bytes) -> None:
    field = Field("image", "png", "|u1", (4, 4, 3))
    decode(field, png(4, 4))  # imports what decodes
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(DamageError, match="does not decode as png"):
                decode(field, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def jpeg_of(*segments: bytes, size: tuple[int, int] = (4, 4), **options: object) -> bytes:
    target = io.BytesIO()
    Image.fromarray(smooth(4, 4, 3)).save(target, "JPEG", **options)
    data = target.getvalue()
    at = data.index(b"\xff\xc2" if options else b"\xff\xc0") + 5
    data = data[:at] + struct.pack(">HH", *size) + data[at + 4 :]
    return data[:2] + b"".join(segments) + data[2:]


@pytest.mark.parametrize("decoder", ["simplejpeg", "pillow"])
@pytest.mark.parametrize(
    "data",
    [
        jpeg_of(size=(30_000, 30_000)),
        jpeg_of(progressive=True),
        jpeg_of(b"\xff\xe1\0\x08Exif\0\0"),
        jpeg_of(b"\xff\xe2\0\x10ICC_PROFILE\0\1"),
        jpeg_of(b"\xff\xe2\0\x06MPF\0"),
        jpeg_of(b"\xff\xe0\xff\xff"),
    ],
)
def test_a_hostile_jpeg_is_damage_without_a_warning(data: bytes, decoder: str, request: pytest.FixtureRequest) -> None:
    if decoder == "pillow":
        request.getfixturevalue("without_simplejpeg")
    field = Field("image", "jpeg", "|u1", (4, 4, 3))
    decode(field, jpeg_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DamageError, match="does not decode as jpeg"):
            decode(field, data)


@pytest.mark.parametrize("codec", ["raw", "png", "jpeg", "zstd", "yuv420", "dct-zstd", "dct-lz4"])
@pytest.mark.parametrize("shape", [(1, 1, 3), (17, 9, 3), (64, 80, 3)])
def test_no_encoded_image_is_longer_than_the_codec_says(codec: str, shape: tuple[int, ...]) -> None:
    for quality in (1, 100):
        packing, chroma = (CODECS[codec].packing, "444") if codec.startswith("dct") else (None, None)
        field = Field("image", codec, "|u1", shape, quality if chroma else None, chroma, packing)
        given = min(quality, (CODECS[codec].quality_range or (0, 100))[1])
        assert len(encode(field, noise(*shape), given)) <= field.largest_bytes <= 16 * field.nbytes + (96 << 10)


@pytest.mark.usefixtures("without_simplejpeg")
@pytest.mark.parametrize(
    ("codec", "module", "package"),
    [("zstd", "zstandard", "zstandard"), ("jpeg", "PIL", "pillow"), ("png", "PIL", "pillow")],
)
def test_without_its_library_a_codec_says_what_to_install(
    codec: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = Field("image", codec, "|u1", (4, 4, 3))
    data = encode(field, noise(4, 4, 3))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DependencyError, match=f"pip install {package}"):
        decode(field, data)
    with pytest.raises(DependencyError if codec == "zstd" else ImportError):  # `build` asks for Pillow before
        encode(field, noise(4, 4, 3))


IMAGE = Field("image", "raw", "|u1", (2, 1))
MASK = Field("mask", "raw", "<u2", (1,))
PHOTO = Field("photo", "jpeg", "|u1", (8, 8, 3))
TOKENS = Field("tokens", "bytes", "|u1", ())


def test_a_record_begins_with_the_lengths_of_its_variable_fields() -> None:
    layout = RecordLayout((TOKENS, IMAGE, PHOTO))
    assert not layout.is_plain
    assert layout.join([b"xyz", b"ab", b"photo"]) == b"\x03\0\0\0\x05\0\0\0xyzabphoto"


@st.composite
def layouts(draw: st.DrawFn) -> tuple[RecordLayout, list[bytes]]:
    fields = tuple(draw(st.lists(st.sampled_from([IMAGE, MASK, PHOTO, TOKENS]), min_size=1, max_size=5)))
    sizes = {True: st.just(2), False: st.integers(0, 40)}
    return RecordLayout(fields), [bytes([draw(st.integers(0, 255))]) * draw(sizes[field.is_plain]) for field in fields]


@settings(max_examples=100)
@given(layouts(), st.binary(max_size=60), st.integers(0, 60))
def test_a_record_splits_into_what_was_joined_or_is_damage(
    layout_and_parts: tuple[RecordLayout, list[bytes]], other: bytes, stop: int
) -> None:
    layout, parts = layout_and_parts
    joined = layout.join(parts)
    assert [bytes(part) for part in layout.split(memoryview(joined))] == parts
    for record in (other, joined[:stop], joined + other):
        with contextlib.suppress(DamageError):
            assert layout.join([bytes(part) for part in layout.split(memoryview(record))]) == record
