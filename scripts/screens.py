"""Draw the pictures of docs/pages.md: a contact sheet, and the pages of a cache and a run.

They show scikit-learn's scanned digits. A few of these are written a second time into the folder of another digit, so
that there is something to find. It needs a browser, and takes some minutes for the training.

    python -m scripts.screens --folder docs/images
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from PIL import Image

from scripts.browser import open_browser
from scripts.commands import ROOT, say
from scripts.digits import write_digits

_SIZE: Final = (1280, 960)  # of a window
_COLOURS: Final = 128  # of a picture: pages are drawn in few, and such files are small
_DIGITS: Final = 600  # of 1,797
_COPIES: Final = ((3, "0003.png", 8), (1, "0001.png", 7), (4, "0004.png", 9), (5, "0005.png", 6))  # from, file, to


def main() -> None:
    """Draw them as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/images", help="where to write (%(default)s)")
    folder = parser.parse_args().folder.absolute()
    with tempfile.TemporaryDirectory() as work:
        place = Path(work)
        make_pages(place)
        with Image.open(place / "sheet.png") as sheet:
            save(sheet, folder / "sheet.png")
        for name, picture in screenshots(place, ("cache", "run")):
            save(picture, folder / f"page-{name}.png")


def make_pages(place: Path) -> None:
    """Write `sheet.png` and two pages into a folder, by the commands that a user types there."""
    write_digits(place / "digits")
    for path in (place / "digits").glob("*/*.png"):
        if int(path.stem) >= _DIGITS:
            path.unlink()
    for source, name, target in _COPIES:
        shutil.copy(place / "digits" / str(source) / name, place / "digits" / str(target) / f"copy-{name}")
    training = "--backend torch --model cnn --epochs 5 --batch-size 32 --lr 0.1 --valid 0.2 --shift 2"
    for words in (
        "warmup digits cache/digits --size 32 --variants 3 --augment affine",
        "preview cache/digits -o sheet.png --samples 10",
        "report cache/digits -o cache.html",
        f"train cache/digits --run runs/digits {training}",
        "report runs/digits -o run.html",
    ):
        say(f"tpucache {words}")
        subprocess.run([sys.executable, "-m", "tpucache", *words.split()], cwd=place, check=True, timeout=1800)


def screenshots(place: Path, names: Sequence[str]) -> list[tuple[str, Image.Image]]:
    """Return what a browser shows of pages in a window of 1280 pixels."""
    found: list[tuple[str, Image.Image]] = []
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": _SIZE[0], "height": _SIZE[1]}, color_scheme="light")
        for name in names:
            page.goto((place / f"{name}.html").as_uri())
            page.wait_for_timeout(500)  # until pictures are decoded
            found.append((name, Image.open(io.BytesIO(page.screenshot()))))
    return found


def save(picture: Any, path: Path) -> None:
    """Write a picture as a PNG of few colours."""
    picture.convert("RGB").quantize(_COLOURS).save(path, optimize=True)
    say(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
