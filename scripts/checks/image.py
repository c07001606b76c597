"""Builds the Docker image of `scripts/Dockerfile`, and warms up and verifies a cache in it.

It ends in status 0 and says so where there is no Docker that can be used. Building needs a registry of images and a
package index, as Docker and pip are configured.

    python -m scripts.checks image
    python -m scripts.checks image --base python:3.11-slim
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from scripts.commands import ROOT

TAG: Final = "tpucache-warmup-check"


def has_docker() -> bool:
    """Return whether Docker is here and answers."""
    words = ["docker", "info"]
    return bool(shutil.which("docker")) and not subprocess.run(words, capture_output=True, check=False).returncode


def check(place: Path, base: str | None) -> None:
    """Build the image, and make a cache of a few pictures in it as the user of this process."""
    options = [] if base is None else ["--build-arg", f"BASE={base}"]
    file = ROOT / "scripts" / "Dockerfile"
    subprocess.run(["docker", "build", "--file", file, "--tag", TAG, *options, ROOT], check=True, timeout=1800)
    rng = np.random.default_rng(0)
    for number in range(20):
        path = place / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (48, 64, 3), np.uint8)).save(path)
    user = f"{os.getuid()}:{os.getgid()}"
    run = ["docker", "run", "--rm", "--network", "none", "--user", user, "--volume", f"{place}:/data", TAG]
    subprocess.run([*run, "warmup", "photos", "cache", "--size", "32", "--variants", "2"], check=True, timeout=600)
    subprocess.run([*run, "verify", "cache"], check=True, timeout=600)
    subprocess.run([sys.executable, "-m", "tpucache", "verify", place / "cache"], check=True, timeout=600)


def main() -> None:
    """Run the check as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="IMAGE", help="the image to begin with (default: the Dockerfile's)")
    options = parser.parse_args()
    if not has_docker():
        print("image: there is no Docker here that answers, so nothing was built")
        return
    with tempfile.TemporaryDirectory() as name:
        try:
            check(Path(name), options.base)
        except subprocess.CalledProcessError as error:
            sys.exit(f"image: the command above failed with status {error.returncode}")
    print("image: it builds a cache that is sound in it and here")


if __name__ == "__main__":
    main()
