"""X-rays as DICOM files and masks as run lengths, from their source to a step of training."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from running import command, report_of

pytestmark = pytest.mark.slow


def trained(cache: Path, run: Path, *options: str) -> list[float]:
    words = ("train", cache, "--run", run, "--backend", "eager", "--epochs", 1, "--batch-size", 4, "--flip")
    assert command(*words, *options) == 0
    return report_of(run)["losses"]


@pytest.mark.parametrize("mode", ["keep", "grey", "rgb"])
def test_dicom_files_of_two_classes_train(mode: str, tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.examples import ct  # a file that comes with pydicom

    for number in range(8):
        path = tmp_path / "source" / "ab"[number % 2] / f"{number}.dcm"
        path.parent.mkdir(parents=True, exist_ok=True)
        ct.WindowCenter, ct.WindowWidth = 40 + number, 400
        pydicom.dcmwrite(path, ct)
    cache = tmp_path / "cache"
    assert command("warmup", tmp_path / "source", cache, "--mode", mode, "--size", 32, "--jobs", 1) == 0
    assert np.isfinite(trained(cache, tmp_path / "run", "--model", "cnn")).all()


def test_masks_as_relative_run_lengths_train(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with (tmp_path / "train-rle.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ImageId", "EncodedPixels"])
        for number in range(4):
            Image.fromarray(np.random.default_rng(number).integers(0, 256, (32, 32), np.uint8)).save(
                tmp_path / "images" / f"{number}.png"
            )
            writer.writerow([number, "-1" if number % 2 else "100 20 12 20"])
    options = "--rle-col EncodedPixels --rle-relative --suffix .png --size 32 --mode grey --jobs 1 --root"
    words = [*options.split(), tmp_path / "images"]
    assert command("warmup", tmp_path / "train-rle.csv", tmp_path / "cache", *words) == 0
    losses = trained(tmp_path / "cache", tmp_path / "run", "--model", "unet", "--task", "mask", "--mask-classes", "2")
    assert np.isfinite(losses).all()
