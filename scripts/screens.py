"""Draw the pictures of docs/pages.md: a contact sheet, and the pages of a cache and a run.

They show scikit-learn's scanned digits. It needs a browser, and takes some minutes for the training.

    python -m scripts.screens --folder docs/images
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from PIL import Image

from scripts.browser import open_browser
from scripts.commands import ROOT, make_parser, say
from scripts.digits import write_digits

_COLOURS: Final = 128  # of a picture: pages are drawn in few, and such files are small
_DIGITS: Final = 600  # of 1,797


def main() -> None:
    """Draw them as the command line asks."""
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/images", help="where to write (%(default)s)")
    folder = parser.parse_args().folder.absolute()
    with tempfile.TemporaryDirectory() as work:
        place = Path(work)
        make_pages(place)
        with Image.open(place / "sheet.png") as sheet:
            save(sheet, folder / "sheet.png")
        with open_browser() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 960}, color_scheme="light")
            for name in ("cache", "run"):
                page.goto((place / f"{name}.html").as_uri())
                page.wait_for_timeout(500)  # until pictures are decoded
                save(Image.open(io.BytesIO(page.screenshot())), folder / f"page-{name}.png")


def make_pages(place: Path) -> None:
    """Write `sheet.png` and two pages into a folder, by the commands that a user types there."""
    write_digits(place / "digits")
    for path in (place / "digits").glob("*/*.png"):
        if int(path.stem) >= _DIGITS:
            path.unlink()
    training = "--backend torch --model cnn --epochs 5 --batch-size 32 --lr 0.1 --valid 0.2 --augment shift=2"
    for words in (
        "warmup digits cache/digits --size 32 --variants 3 --augment affine",
        "preview cache/digits -o sheet.png --samples 10",
        "report cache/digits -o cache.html",
        f"train cache/digits --run runs/digits {training}",
        "report runs/digits -o run.html",
    ):
        say(f"tpucache {words}")
        subprocess.run([sys.executable, "-m", "tpucache", *words.split()], cwd=place, check=True, timeout=1800)


def save(picture: Any, path: Path) -> None:
    """Write a picture as a PNG of few colours."""
    picture.convert("RGB").quantize(_COLOURS).save(path, optimize=True)
    say(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
