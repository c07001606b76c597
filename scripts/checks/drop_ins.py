"""Trains stock loops of torchvision, timm, Hugging Face and Keras as they are, and with the one line of docs/adopt.md.

    python -m scripts.checks drop_ins --work DIR

Each loop learns scikit-learn's digits, enlarged and saved as JPEG, from the library's own data set and from tpucache's,
several seeds each. It fails where the mean accuracies are further apart than `--within`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from scripts.commands import ROOT, say
from scripts.environments import Environment, Environments

LOOPS: Final = ("torchvision", "timm", "huggingface", "keras")
_OURS, _THEIRS = "ours", "theirs"
_PACKAGES: Final = ("torchvision", "timm", "datasets", "keras", "jax")
_STORED, _SIDE, _BATCH = 36, 28, 64  # pixels of a cached picture, and of what a model is given


def main() -> int:
    """Run the check, or with `--loop` one training in its environment; 1 where accuracies are too far apart."""
    options = _parse()
    if options.loop:
        print(train(options.loop, options.data == _OURS, options.photos, options.seed, options.epochs))
        return 0
    with tempfile.TemporaryDirectory() as aside:
        work = (options.work or Path(aside)).absolute()
        _write_photos(work / "photos")
        pins = tuple(f"{name}=={version(name)}" for name in ("torch", "numpy"))
        environment = Environment("drop-ins", (_PACKAGES,), pins, inherits=True)
        python = sys.executable if options.here else str(Environments(work).prepare(environment))
        wrong = [loop for loop in options.only or LOOPS if not _is_same(loop, python, work, options)]
    return int(bool(wrong))


def _is_same(loop: str, python: str, work: Path, options: argparse.Namespace) -> bool:
    found: dict[str, list[float]] = {_THEIRS: [], _OURS: []}
    for seed in range(options.seeds):
        for data, accuracies in found.items():
            words = ["--loop", loop, "--data", data, "--photos", work / "photos", "--seed", seed]
            command = [python, "-m", "scripts.checks.drop_ins", *map(str, words), "--epochs", str(options.epochs)]
            own = {"TPUCACHE_DIR": str(work / "kept"), "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(f"{loop}, {data}: status {done.returncode}: {done.stderr[-2000:]}")
            accuracies.append(float(done.stdout.splitlines()[-1]))
            say(f"{loop}, {data}, seed {seed}: {accuracies[-1]:.3f}")
    means = {data: statistics.mean(accuracies) for data, accuracies in found.items()}
    difference: float = means[_OURS] - means[_THEIRS]
    print(f"| {loop} | {means[_THEIRS]:.3f} | {means[_OURS]:.3f} | {difference:+.3f}, allowed {options.within:g} |")
    return bool(abs(difference) <= options.within)


def train(loop: str, is_ours: bool, photos: Path, seed: int, epochs: int) -> float:
    """Train on three quarters of the digits by a library's loop, and return the accuracy of the last quarter."""
    if loop == "keras":
        return _train_keras(is_ours, photos, seed, epochs)
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(seed)
    sets = {"torchvision": _torchvision_sets, "timm": _timm_sets, "huggingface": _hugging_face_sets}
    train_set, valid_set = sets[loop](is_ours, photos)
    if loop == "timm":
        from timm.data import create_loader

        shape = (3, _SIDE, _SIDE)
        options: dict[str, Any] = {"use_prefetcher": False, "num_workers": 0, "hflip": 0.0, "scale": (0.7, 1.0)}
        batches = create_loader(train_set, shape, _BATCH, is_training=True, color_jitter=None, **options)
        tested = create_loader(valid_set, shape, _BATCH, use_prefetcher=False, num_workers=0)
    else:
        batches, tested = DataLoader(train_set, _BATCH, shuffle=True), DataLoader(valid_set, _BATCH)
    layers = torch.nn
    model = layers.Sequential(
        *(layers.Conv2d(3, 16, 5, 2), layers.BatchNorm2d(16), layers.ReLU()),
        *(layers.Conv2d(16, 32, 5, 2), layers.BatchNorm2d(32), layers.ReLU(), layers.Flatten(), layers.LazyLinear(10)),
    )
    model(torch.zeros(2, 3, _SIDE, _SIDE))  # which says how large the last layer is
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(epochs):
        for images, labels in batches:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = torch.cat([model(images).argmax(1) == labels for images, labels in tested])
    return right.float().mean().item()


def _transforms() -> tuple[Any, Any]:
    from torchvision import transforms

    crop = [transforms.RandomResizedCrop(_SIDE, scale=(0.7, 1.0)), transforms.ToTensor()]
    whole = [transforms.Resize(_STORED), transforms.CenterCrop(_SIDE), transforms.ToTensor()]
    return transforms.Compose(crop), transforms.Compose(whole)


def _torchvision_sets(is_ours: bool, photos: Path) -> list[Any]:
    import torchvision

    import tpucache

    parts = [(photos / part, transform) for part, transform in zip(("train", "valid"), _transforms(), strict=True)]
    if is_ours:
        return [tpucache.ImageFolder(folder, transform, size=_STORED) for folder, transform in parts]
    return [torchvision.datasets.ImageFolder(folder, transform) for folder, transform in parts]


def _timm_sets(is_ours: bool, photos: Path) -> list[Any]:
    import functools

    import timm.data
    import timm.data.dataset_factory as factory

    import tpucache

    if is_ours:
        factory.ImageFolder = functools.partial(tpucache.ImageFolder, size=_STORED)
    return [timm.data.create_dataset("torch/image_folder", str(photos), split) for split in ("train", "valid")]


def _hugging_face_sets(is_ours: bool, photos: Path) -> list[Any]:
    import datasets

    import tpucache

    found: list[Any] = []
    for part, transform in zip(("train", "valid"), _transforms(), strict=True):
        files = sorted((photos / part).rglob("*.jpg"))
        rows = {"image": [*map(str, files)], "label": [int(file.parent.name) for file in files]}
        dataset = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
        if is_ours:
            found.append(tpucache.from_hf(dataset, size=_STORED, transform=transform))
        else:

            class Pairs:
                def __init__(self, whole: Any, change: Any) -> None:
                    self._whole, self._change = whole, change

                def __len__(self) -> int:
                    return len(self._whole)

                def __getitem__(self, number: int) -> Any:
                    row = self._whole[number]
                    return self._change(row["image"].convert("RGB")), row["label"]

            found.append(Pairs(dataset, transform))
    return found


def _train_keras(is_ours: bool, photos: Path, seed: int, epochs: int) -> float:
    import keras
    import numpy as np
    from PIL import Image

    import tpucache

    class Files(keras.utils.PyDataset):  # type: ignore[misc]  # no types
        """Batches of files, as the manual of PyDataset shows them."""

        def __init__(self, files: Any) -> None:
            super().__init__()
            self.files = files

        def __len__(self) -> int:
            return len(self.files) // _BATCH

        def __getitem__(self, number: int) -> Any:
            part = self.files[number * _BATCH : (number + 1) * _BATCH]
            images = [np.asarray(Image.open(file).convert("RGB").resize((_STORED, _STORED))) for file in part]
            return np.stack(images), np.array([int(file.parent.name) for file in part])

    class Batches(Files):
        """The same out of a cache."""

        def __getitem__(self, number: int) -> Any:
            rows = range(number * _BATCH, (number + 1) * _BATCH)
            images, labels = zip(*self.files.__getitems__(rows), strict=True)
            return np.stack(images).transpose(0, 2, 3, 1), np.stack(labels)

    def batches(part: str) -> Any:
        if not is_ours:
            return Files(shuffled(sorted((photos / part).rglob("*.jpg"))))
        folder = tpucache.ImageFolder(photos / part, size=_STORED).to_cached()
        return Batches(folder.select(shuffled([*range(len(folder))])))

    def shuffled(items: list[Any]) -> list[Any]:
        return [items[at] for at in np.random.default_rng(seed).permutation(len(items))]

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((_STORED, _STORED, 3), dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 5, 2, activation="relu"),
            layers.Conv2D(32, 5, 2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.AdamW(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(batches("train"), epochs=epochs, verbose=0)
    return float(model.evaluate(batches("valid"), verbose=0)[1])


def _write_photos(folder: Path) -> None:
    """Write the digits as JPEG of 48 pixels, three quarters of them to learn from."""
    from PIL import Image

    from scripts.digits import write_digits

    if folder.exists():
        return
    with tempfile.TemporaryDirectory() as small:
        write_digits(Path(small))
        for number, path in enumerate(sorted(Path(small).rglob("*.png"), key=lambda path: path.name)):
            target = folder / ("valid" if number % 4 == 0 else "train") / path.parent.name / f"{path.stem}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.open(path).convert("RGB").resize((48, 48), Image.Resampling.BICUBIC).save(target, quality=90)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the environment there, for the next run")
    parser.add_argument("--only", nargs="+", choices=LOOPS, metavar="NAME", help=f"of {', '.join(LOOPS)}")
    parser.add_argument("--here", action="store_true", help="use this environment, which has all packages")
    parser.add_argument("--epochs", type=int, default=4, help="of a training (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings with each data set (%(default)s)")
    parser.add_argument("--within", type=float, default=0.02, help="allowed difference of the means (%(default)s)")
    for name, kind in (("--loop", str), ("--data", str), ("--photos", Path), ("--seed", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
