"""Flax NNX with optax: a network with BatchNorm on all devices, fed by `tpucache.jax.feed`."""

import sys

import jax
import optax
from flax import nnx

from tpucache import CachedDataset, CachedLoader
from tpucache.jax import feed


class Network(nnx.Module):
    def __init__(self, classes: int, rngs: nnx.Rngs) -> None:
        self.convolution = nnx.Conv(3, 32, (3, 3), strides=2, rngs=rngs)
        self.normalise = nnx.BatchNorm(32, rngs=rngs)
        self.head = nnx.Linear(32, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.normalise(self.convolution(images))).mean((1, 2)))


@nnx.jit
def step(model: Network, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
    def loss_of(model: Network) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def predict(model: Network, images: jax.Array) -> jax.Array:
    return model(images).argmax(1)


def main(cache: str) -> None:
    train, valid = CachedDataset(cache, variant="epoch"), CachedDataset(cache)
    batch = 32 * jax.device_count()
    batches = feed(CachedLoader(train, batch, shuffle=True, drop_last=True), normalise=True)
    model = Network(len(train.classes), nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    seen = 0
    model.train()
    for _ in range(2):
        for images, labels in batches:
            step(model, optimizer, images, labels)
            seen += len(labels)

    right = total = 0
    model.eval()
    for images, labels, is_sample in feed(CachedLoader(valid, batch), normalise=True, pad_last=True):
        right += int(((predict(model, images) == labels) & is_sample).sum())
        total += int(is_sample.sum())
    print(f"{seen} images seen, accuracy {right / total:.3f}, waited for data {batches.waited:.1%} of the time")


if __name__ == "__main__":
    main(*sys.argv[1:])
