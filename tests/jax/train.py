"""Fifty steps of a small network with momentum, fed by JAX: `train.py CACHE OUT PROCESSES PROCESS PORT`.

OUT gets the losses, and a checksum of each sample that this process saw in an epoch, and in an evaluation.
"""

from __future__ import annotations

import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from tpucache import CachedDataset, CachedLoader
from tpucache.jax import AugmentSettings, feed

BATCH, STEPS, RATE, MOMENTUM = 16, 50, 0.02, 0.9
AUGMENT = AugmentSettings(flip=True, shift=2, brightness=0.2, erase=0.3, mixup=0.4)


def loss_of(weights, images, targets):
    hidden = jax.lax.conv_general_dilated(
        images, weights["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    logits = jax.nn.relu(hidden).mean((1, 2)) @ weights["head"]
    return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean()


@jax.jit
def step(weights, momentum, images, targets):
    loss, gradients = jax.value_and_grad(loss_of)(weights, images, targets)
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradients)
    return jax.tree.map(lambda w, m: w - RATE * m, weights, momentum), momentum, loss


def main(cache: str, out: str, processes: int, process: int, port: int) -> None:
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    rng = np.random.default_rng(0)
    weights = {"kernel": rng.normal(0, 0.2, (3, 3, 3, 8)), "head": rng.normal(0, 0.2, (8, 4))}
    weights = jax.tree.map(lambda array: array.astype(np.float32), weights)
    momentum = jax.tree.map(np.zeros_like, weights)
    dataset = CachedDataset(cache, variant="epoch").select(np.arange(144))
    options = {"shuffle": True, "rank": process, "world_size": processes}
    loader = CachedLoader(dataset, BATCH // processes, **options)
    batches = feed(loader, augment=AUGMENT)
    losses: list[float] = []
    while len(losses) < STEPS:
        for images, targets in batches:
            if not losses:
                assert images.shape == (BATCH, 16, 16, 3), images.shape
                assert targets.shape == (BATCH, 4), targets.shape
                assert len(images.sharding.device_set) == jax.device_count()
            weights, momentum, loss = step(weights, momentum, images, targets)
            losses.append(float(loss))
    seen = []
    for images, labels in feed(CachedLoader(dataset, BATCH // processes, **options)):
        assert images.dtype == jnp.uint8
        assert labels.dtype == jnp.int32
        for shard in images.addressable_shards:
            seen += [zlib.crc32(image.tobytes()) for image in np.asarray(shard.data)]
    place = batches.state_dict()
    steps = len(losses)
    assert (place["epoch"], place["position"]) == divmod(steps * BATCH, 144), place
    evaluated = []
    whole = CachedDataset(cache)
    options = {"rank": process, "world_size": processes}
    for images, labels, is_sample in feed(CachedLoader(whole, BATCH // processes, **options), pad_last=True):
        assert images.shape == (BATCH, 16, 16, 3), images.shape
        assert labels.shape == is_sample.shape == (BATCH,), is_sample.shape
        assert len(images.sharding.device_set) == jax.device_count()
        for pixels, flags in zip(images.addressable_shards, is_sample.addressable_shards, strict=True):
            rows = np.asarray(pixels.data)[np.asarray(flags.data)]
            evaluated += [zlib.crc32(image.tobytes()) for image in rows]
    np.savez(out, losses=np.array(losses[:STEPS]), seen=np.array(seen), evaluated=np.array(evaluated))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
