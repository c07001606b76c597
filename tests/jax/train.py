"""Fifty steps of a small network with momentum, fed by JAX: `train.py CACHE OUT PROCESSES PROCESS PORT MODEL`.

MODEL is the length of the mesh's axis over which the network is divided; where it is that of the processes, each needs
all samples. OUT gets the losses, and a checksum of each sample that this process saw in an epoch, and in an evaluation.
"""

from __future__ import annotations

import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpucache import CachedDataset, CachedLoader
from tpucache.jax import AugmentSettings, feed, process_slice

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


def main(cache: str, out: str, processes: int, process: int, port: int, model: int) -> None:
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    rng = np.random.default_rng(0)
    weights = {"kernel": rng.normal(0, 0.2, (3, 3, 3, 8)), "head": rng.normal(0, 0.2, (8, 4))}
    weights = jax.tree.map(lambda array: array.astype(np.float32), weights)
    # The devices of a process follow one another: with two processes and a model axis of two, that lies across both.
    mesh = Mesh(np.array(jax.devices()).reshape(model, -1).T, ("data", "model"))
    divided = {"kernel": PartitionSpec(None, None, None, "model"), "head": PartitionSpec("model")}
    placed = {
        name: jax.make_array_from_callback(array.shape, NamedSharding(mesh, divided[name]), array.__getitem__)
        for name, array in weights.items()
    }
    weights, momentum = placed, jax.tree.map(jnp.zeros_like, placed)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    own = process_slice(sharding)
    batch = BATCH // own["world_size"]
    dataset = CachedDataset(cache, variant="epoch").select(np.arange(144))
    loader = CachedLoader(dataset, batch, shuffle=True, **own)
    batches = feed(loader, sharding, augment=AUGMENT)
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
    for images, labels in feed(CachedLoader(dataset, batch, shuffle=True, **own), sharding):
        assert images.dtype == jnp.uint8
        assert labels.dtype == jnp.int32
        for shard in images.addressable_shards:
            if shard.replica_id == 0:
                seen += [zlib.crc32(image.tobytes()) for image in np.asarray(shard.data)]
    place = batches.state_dict()
    steps = len(losses)
    assert (place["epoch"], place["position"]) == divmod(steps * BATCH, 144), place
    evaluated = []
    whole = CachedDataset(cache)
    for images, labels, is_sample in feed(CachedLoader(whole, batch, **own), sharding, pad_last=True):
        assert images.shape == (BATCH, 16, 16, 3), images.shape
        assert labels.shape == is_sample.shape == (BATCH,), is_sample.shape
        assert len(images.sharding.device_set) == jax.device_count()
        for pixels, flags in zip(images.addressable_shards, is_sample.addressable_shards, strict=True):
            if pixels.replica_id == 0:
                rows = np.asarray(pixels.data)[np.asarray(flags.data)]
                evaluated += [zlib.crc32(image.tobytes()) for image in rows]
    np.savez(out, losses=np.array(losses[:STEPS]), seen=np.array(seen), evaluated=np.array(evaluated))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7]))
