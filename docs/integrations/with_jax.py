"""Plain JAX on all devices: a small network trained with momentum, fed by `tpucache.jax.feed`."""

import sys
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpucache import CachedDataset, CachedLoader
from tpucache.jax import AugmentSettings, feed

Weights = dict[str, Any]


def outputs_of(weights: Weights, images: jax.Array) -> jax.Array:
    hidden = images
    for kernel, stride in ((weights["patches"], 4), (weights["kernel"], 1)):
        hidden = jax.nn.relu(
            jax.lax.conv_general_dilated(
                hidden, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
    return hidden.max((1, 2)) @ weights["head"]


def loss_of(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(outputs_of(weights, images))
    return -jnp.take_along_axis(logs, labels[:, None], 1).mean()


@jax.jit
def step(weights: Weights, momentum: Weights, images: jax.Array, labels: jax.Array) -> tuple[Weights, Weights]:
    gradients = jax.grad(loss_of)(weights, images, labels)
    momentum = jax.tree.map(lambda speed, slope: 0.9 * speed + slope, momentum, gradients)
    return jax.tree.map(lambda weight, speed: weight - 0.02 * speed, weights, momentum), momentum


def main(cache: str) -> None:
    train, valid = CachedDataset(cache, variant="epoch"), CachedDataset(cache)
    batch = 32 * jax.device_count()
    batches = feed(CachedLoader(train, batch, shuffle=True, drop_last=True), augment=AugmentSettings(shift=2))

    rng = np.random.default_rng(0)
    weights = {
        "patches": rng.normal(0, 0.2, (4, 4, 3, 32)).astype(np.float32),
        "kernel": rng.normal(0, 0.08, (3, 3, 32, 64)).astype(np.float32),
        "head": rng.normal(0, 0.1, (64, len(train.classes))).astype(np.float32),
    }
    momentum = jax.tree.map(np.zeros_like, weights)
    seen = 0
    sent: deque[jax.Array] = deque()
    for _ in range(2):
        for images, labels in batches:
            weights, momentum = step(weights, momentum, images, labels)
            seen += len(labels)
            sent.append(weights["head"])
            if len(sent) > 2:  # otherwise the loop would run ahead of the device, and batches pile up in its memory
                sent.popleft().block_until_ready()

    right = total = 0
    predict = jax.jit(lambda weights, images: outputs_of(weights, images).argmax(1))
    for images, labels, is_sample in feed(CachedLoader(valid, batch), normalise=True, pad_last=True):
        right += int(((predict(weights, images) == labels) & is_sample).sum())
        total += int(is_sample.sum())
    print(f"{seen} images seen, accuracy {right / total:.3f}, waited for data {batches.waited:.1%} of the time")


if __name__ == "__main__":
    main(*sys.argv[1:])
