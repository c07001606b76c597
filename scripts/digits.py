"""Write scikit-learn's 1,797 scanned digits as PNG files, a folder a class: real data that needs no network."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def write_digits(folder: Path) -> int:
    """Write every digit as `folder/<class>/<number>.png`, 8x8 grey, and return how many there are."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(label) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Grey levels run from 0 to 16.
        Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8)).save(path)
    return len(digits.target)


def main() -> None:
    """Write them as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write the class folders")
    folder = parser.parse_args().folder
    print(f"{folder}: {write_digits(folder):,} images")


if __name__ == "__main__":
    main()
