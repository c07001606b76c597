"""Write a folder of every bad and odd input that a warmup may meet, a folder a class.

- `broken` holds what no decoder can make an image of: every file of it has to be skipped.
- `fine` holds images that are unusual and right: every one has to be cached. So has each of `names`, under names that
  are hard to handle.
- `odd` holds what may go either way, by the user's rights and by the decoder's version.
- `mutants` holds valid files with bits flipped, parts cut out, put in and swapped: anything but a crash will do.

Links and special files need Linux.
"""

from __future__ import annotations

import io
import os
import random
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from hostile_bytes import GREY, RGB, mutate, png_file, resized_header, with_chunk, without_segment
from PIL import Image, features

_SIDES: Final = (64, 48)
_ORIENTATION: Final = 0x0112
#: One tag, the orientation, which is the text "up".
_EXIF_OF_TEXT: Final = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHI4sI", 1, _ORIENTATION, 2, 3, b"up", 0)
_LONGEST_NAME: Final = 255  # bytes, on nearly every file system
#: Sides of the largest square just below Pillow's limit of pixels, and of the smallest just above.
_BELOW, _ABOVE = 9459, 9460

Files = Iterator[tuple[str, bytes]]


def make_hostile(folder: Path, mutants: int) -> None:
    photo = _photograph()
    kinds: dict[str, Files] = {
        "broken": _broken(photo),
        "fine": _fine(photo),
        "names": ((name, _encoded(photo, "JPEG")) for name in _names()),
        "odd": _odd(photo),
        "mutants": _mutants(photo, mutants),
    }
    for kind, files in kinds.items():
        (folder / kind).mkdir(parents=True)
        for name, content in files:
            (folder / kind / name).write_bytes(content)
    _make_special(folder / "broken", folder / "fine", folder / "odd")


def _broken(photo: Image.Image) -> Files:
    jpeg, png = _encoded(photo, "JPEG"), _encoded(photo, "PNG")
    yield "empty.jpg", b""
    for length in (1, 2, 12, 1000, 1 << 20):
        yield f"zeros-{length}.jpg", bytes(length)
    for name, whole in (("jpg", jpeg), ("png", png), ("progressive.jpg", _encoded(photo, "JPEG", progressive=True))):
        for percent in (1, 10, 30, 50, 70, 90):
            yield f"cut-at-{percent}-percent.{name}", whole[: len(whole) * percent // 100]
    yield "text.jpg", b"This is no photograph.\n" * 50
    yield "page.png", b"<!DOCTYPE html><html><head><title>404</title></head><body>Not Found</body></html>\n"
    yield "not-found.jpg", b'{"error": 404}'
    yield "bomb.png", png_file(30_000, 30_000, 1, GREY)
    yield "claims-30000x30000.png", png_file(30_000, 30_000, 8, RGB, rows=1)
    yield "just-over-the-limit.png", png_file(_ABOVE, _ABOVE, 1, GREY)
    yield "grey-12000x9000.png", png_file(12_000, 9_000, 8, GREY)
    yield "claims-65500x65500.jpg", resized_header(jpeg, 65_500)
    yield "claims-65535x65535.gif", b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + _encoded(photo, "GIF")[10:]
    yield "no-pixels.png", png_file(0, 0, 8, RGB)
    yield "float-of-no-numbers.tif", _encoded(Image.fromarray(_no_numbers()), "TIFF")
    yield "12-bits-in-16.png", _encoded(Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 16), "PNG")
    yield "text-bomb.png", with_chunk(png, b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1 << 26)))


def _fine(photo: Image.Image) -> Files:
    cmyk = _encoded(photo.convert("CMYK"), "JPEG")
    yield "same-name.jpg", _encoded(photo, "JPEG")
    yield "progressive.jpg", _encoded(photo, "JPEG", progressive=True)
    yield "grey.jpg", _encoded(photo.convert("L"), "JPEG")
    yield "cmyk-of-adobe.jpg", cmyk
    yield "cmyk.jpg", without_segment(cmyk, 0xEE)
    for orientation in range(1, 9):
        yield f"orientation-{orientation}.jpg", _encoded(photo, "JPEG", exif=_exif(orientation))
    broken_exif = {
        "of-noise": b"Exif\0\0" + random.Random(0).randbytes(200),
        "cut": _exif(6).tobytes()[:12],
        "of-99": _exif(99).tobytes(),
        "of-text": _EXIF_OF_TEXT,
        "empty": b"Exif\0\0",
    }
    for name, content in broken_exif.items():
        yield f"exif-{name}.jpg", _encoded(photo, "JPEG", exif=content)
    yield from _fine_modes(photo)
    yield from _fine_frames(photo)
    for width, height in ((1, 1), (1, 5000), (5000, 1), (2, 3)):
        yield f"{width}x{height}.png", _encoded(photo.resize((width, height)), "PNG")
        yield f"{width}x{height}.jpg", _encoded(photo.resize((width, height)), "JPEG")
    yield "grey-just-below-the-limit.png", png_file(_BELOW, _BELOW, 8, GREY)
    yield "16-bit-just-below-the-limit.png", png_file(_BELOW, _BELOW, 16, GREY)
    yield "png-inside.jpg", _encoded(photo, "PNG")
    yield "jpeg-inside.png", _encoded(photo, "JPEG")


def _fine_modes(photo: Image.Image) -> Files:
    grey = np.asarray(photo.convert("L"))
    alpha = photo.convert("RGBA")
    alpha.putalpha(photo.convert("L"))
    palette = photo.quantize(32)
    yield "16-bit.png", _encoded(Image.fromarray(grey.astype(np.uint16) * 257), "PNG")
    yield "16-bit-colours.png", png_file(*_SIDES, 16, RGB)
    yield "1-bit.png", _encoded(photo.convert("1"), "PNG")
    yield "palette.png", _encoded(palette, "PNG")
    yield "palette-with-a-clear-colour.png", _encoded(palette, "PNG", transparency=3)
    yield "palette-with-alpha.png", _encoded(palette, "PNG", transparency=bytes(range(0, 256, 8)))
    yield "colour-with-a-clear-colour.png", _encoded(photo, "PNG", transparency=(1, 2, 3))
    yield "rgba.png", _encoded(alpha, "PNG")
    yield "la.png", _encoded(alpha.convert("LA"), "PNG")
    yield "grey.png", _encoded(photo.convert("L"), "PNG")
    yield "16-bit.tif", _encoded(Image.fromarray(grey.astype(np.uint16) * 257), "TIFF")
    yield "32-bit.tif", _encoded(Image.fromarray(grey.astype(np.int32) * 257), "TIFF")
    yield "float.tif", _encoded(Image.fromarray(grey.astype(np.float32) / 255), "TIFF")
    yield "lab.tif", _encoded(photo.convert("LAB"), "TIFF")
    yield "cmyk.tif", _encoded(photo.convert("CMYK"), "TIFF")
    for name in ("BMP", "TGA", "PPM", "ICO", "DIB"):
        yield f"plain.{name.lower()}", _encoded(photo, name)
    for name, codec in (("WEBP", "webp"), ("AVIF", "avif"), ("JPEG2000", "jpg_2000")):
        if features.check(codec):
            yield f"plain.{'jp2' if name == 'JPEG2000' else name.lower()}", _encoded(photo, name)


def _fine_frames(photo: Image.Image) -> Files:
    frames = [photo.rotate(90 * turn) for turn in range(1, 4)]
    for name in ("GIF", "PNG", "TIFF", "MPO", *(["WEBP"] if features.check("webp") else [])):
        yield f"several-frames.{name.lower()}", _encoded(photo, name, save_all=True, append_images=frames)


def _odd(photo: Image.Image) -> Files:
    jpeg = _encoded(photo, "JPEG")
    yield "without-its-last-byte.jpg", jpeg[:-1]
    yield "without-its-last-byte.png", _encoded(photo, "PNG")[:-1]
    yield "with-more-behind.jpg", jpeg + b"more" * 1000
    yield "two-in-one.jpg", jpeg + jpeg
    yield "unreadable.jpg", jpeg  # its mode is set later, and root reads it anyway
    for name in ("GIF", "TIFF", "BMP", "WEBP"):
        whole = _encoded(photo, name)
        yield f"cut-in-half.{name.lower()}", whole[: len(whole) // 2]


def _names() -> Iterator[str]:
    yield from ("same-name.jpg", "UPPER.JPG", "MiXeD.JpEg", "with space.jpg", " space first.jpg", "two  spaces .jpg")
    yield from ("größe.jpg", "\u65e5\u672c\u8a9e.jpg", "e\u0301.jpg", "\u00e9.jpg", "\U0001f600.jpg", "\u202ergnp.jpg")
    yield from ("new\nline.jpg", "tab\t.jpg", "\x1b[31mred.jpg", "\x01.jpg", "\x7f.jpg")
    yield from ("'single'.jpg", '"double".jpg', "`back`.jpg", "back\\slash.jpg", "$HOME.jpg", "%s%n.jpg", "{0}.jpg")
    yield from ("-rf.jpg", "--help.jpg", "~.jpg", "#1.jpg", "a;b.jpg", "a|b.jpg", "a&b.jpg", "*.jpg", "a,b.jpg")
    yield from ("a:b.jpg", "a#2.jpg", "..jpg.jpg", "a.png.jpg", "a..jpg", "NUL.jpg", "<a>.jpg", "?.jpg", "[a].jpg")
    yield os.fsdecode(b"not-utf-8-\xff\xfe\x80.jpg")
    yield f"{'n' * (_LONGEST_NAME - 4)}.jpg"


def _mutants(photo: Image.Image, mutants: int) -> Files:
    small = photo.resize((24, 16))
    with_exif = _encoded(small, "JPEG", exif=_exif(6), progressive=True)
    bases = [("jpg", _encoded(small, "JPEG")), ("jpg", with_exif), ("png", _encoded(small, "PNG"))]
    bases += [("png", _encoded(small.quantize(16), "PNG")), ("gif", _encoded(small, "GIF"))]
    bases += [("tif", _encoded(small, "TIFF")), ("tif", _encoded(small, "TIFF", compression="tiff_lzw"))]
    if features.check("webp"):
        bases += [("webp", _encoded(small, "WEBP")), ("webp", _encoded(small, "WEBP", lossless=True))]
    rng = random.Random(0)
    for number in range(mutants):
        suffix, content = bases[number % len(bases)]
        yield f"{number:05d}.{suffix}", mutate(content, rng)


def _make_special(broken: Path, fine: Path, odd: Path) -> None:
    (odd / "unreadable.jpg").chmod(0)
    os.mkfifo(broken / "pipe.jpg")
    os.mknod(broken / "socket.jpg", stat.S_IFSOCK | 0o600)
    (broken / "endless.jpg").symlink_to("/dev/zero")
    (broken / "dangling.jpg").symlink_to("nowhere.jpg")
    (broken / "itself.jpg").symlink_to("itself.jpg")
    (broken / "there.jpg").symlink_to("back.jpg")
    (broken / "back.jpg").symlink_to("there.jpg")
    (fine / "link.jpg").symlink_to("same-name.jpg")
    (fine / "directory.jpg").mkdir()
    (fine / "directory.jpg" / "inside.jpg").write_bytes((fine / "same-name.jpg").read_bytes())
    for name in ("one", "other"):
        (fine / name).mkdir()
        (fine / name / "inside.jpg").symlink_to("../same-name.jpg")
    (fine / "one" / "across").symlink_to("../other")
    (fine / "other" / "across").symlink_to("../one")
    (fine / "up").symlink_to("..")
    (fine / "here").symlink_to(".")
    (fine / "itself").symlink_to("itself")


def _photograph() -> Image.Image:
    grid = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(grid).resize(_SIDES, Image.Resampling.BICUBIC)


def _encoded(image: Image.Image, file_format: str, **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, file_format, **options)
    return target.getvalue()


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    return exif


def _no_numbers() -> np.ndarray[Any, Any]:
    values = np.linspace(-1, 2, _SIDES[0] * _SIDES[1], dtype=np.float32).reshape(_SIDES[::-1])
    values[0, :4] = np.nan, np.inf, -np.inf, 1e38
    return values
