"""Keras 3 on JAX: `fit` over CachedLoader's batches, `evaluate` over torch's DataLoader."""

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from tpucache import CachedDataset, CachedLoader


def endless(loader: CachedLoader) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches as `fit` counts them: images (batch, height, width, channels), which they are in memory."""
    while True:
        for images, labels in loader:
            yield images.permute(0, 2, 3, 1).numpy(), labels.numpy()


def collate(items: list) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = default_collate(items)
    return images.permute(0, 2, 3, 1), labels


def main(cache: str) -> None:
    train, valid = CachedDataset(cache, variant="epoch"), CachedDataset(cache)
    loader = CachedLoader(train, 32, shuffle=True, drop_last=True)
    height, width, channels = train.manifest.fields[0].shape
    model = keras.Sequential(
        [
            keras.layers.Input((height, width, channels), dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.AveragePooling2D(4),
            keras.layers.Flatten(),
            keras.layers.Dense(len(train.classes), activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(endless(loader), steps_per_epoch=len(loader), epochs=2, shuffle=False, verbose=0)

    _, accuracy = model.evaluate(DataLoader(valid, 32, collate_fn=collate), verbose=0)
    seen = len(history.epoch) * len(loader) * loader.batch_size
    print(f"{seen} images seen, accuracy {accuracy:.3f}, on {keras.backend.backend()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
