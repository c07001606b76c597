"""Flax NNX with optax, fed by `tpucache.jax.feed`: from weights, and continued in the middle of an epoch."""

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from tpucache import CachedDataset, CachedLoader
from tpucache.jax import AugmentSettings, Feed, feed


class Network(nnx.Module):
    def __init__(self, classes: int, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, 32, (4, 4), strides=4, rngs=rngs)
        self.normalise = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)  # of a short run: 0.99 would average over 100 steps
        self.convolution = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.head = nnx.Linear(64, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        hidden = nnx.relu(self.normalise(self.patches(images)))
        return self.head(nnx.relu(self.convolution(hidden)).max((1, 2)))


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


class Run:
    """A model with its optimizer and its place in the data: all that a checkpoint holds."""

    def __init__(self, cache: str, seed: int) -> None:
        train = CachedDataset(cache, variant="epoch")
        loader = CachedLoader(train, 32 * jax.device_count(), shuffle=True, drop_last=True)
        self.batches: Feed = feed(loader, augment=AugmentSettings(shift=2))
        self.model = Network(len(train.classes), nnx.Rngs(seed))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(3e-3), wrt=nnx.Param)
        self.losses: list[float] = []
        self.seen = 0

    def train_epoch(self, checkpoint: Path | None = None, at: int = 2) -> None:
        """Train to the end of the epoch, and save a checkpoint after step `at`."""
        self.model.train()
        for images, labels in self.batches:
            self.losses.append(float(step(self.model, self.optimizer, images, labels)))
            self.seen += len(labels)
            if checkpoint is not None and len(self.losses) == at:
                self.save(checkpoint)

    def save(self, path: Path) -> None:
        arrays = {str(n): np.asarray(leaf) for n, leaf in enumerate(jax.tree.leaves(self._state()))}
        place = {f"place {name}": np.array(value) for name, value in self.batches.state_dict().items()}
        np.savez(path, **arrays, **place)

    def load(self, path: Path) -> None:
        with np.load(path) as saved:
            leaves, tree = jax.tree.flatten(self._state())
            state = jax.tree.unflatten(tree, [saved[str(n)] for n in range(len(leaves))])
            nnx.update((self.model, self.optimizer), state)
            names = [name for name in saved.files if name.startswith("place ")]
            self.batches.load_state_dict({name.removeprefix("place "): saved[name].item() for name in names})

    def load_weights(self, path: Path) -> None:
        """Take over a network's weights, all but those of its head."""
        with np.load(path) as saved:
            for layer, name in (key.split("/") for key in saved.files if not key.startswith("head/")):
                getattr(getattr(self.model, layer), name).set_value(saved[f"{layer}/{name}"])

    def save_weights(self, path: Path) -> None:
        layers = {layer: getattr(self.model, layer) for layer in ("patches", "normalise", "convolution", "head")}
        names = {"normalise": ("scale", "bias", "mean", "var")}
        parts = [(layer, name) for layer in layers for name in names.get(layer, ("kernel", "bias"))]
        np.savez(path, **{f"{layer}/{name}": np.asarray(getattr(layers[layer], name)[...]) for layer, name in parts})

    def _state(self) -> nnx.State:
        return nnx.state((self.model, self.optimizer))


def main(cache: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights, checkpoint = Path(folder, "weights.npz"), Path(folder, "checkpoint.npz")
        first = Run(cache, seed=0)
        first.train_epoch()
        first.save_weights(weights)

        tuned = Run(cache, seed=1)
        tuned.load_weights(weights)
        tuned.train_epoch(checkpoint)

        # Another process would begin like this: it sees the samples that are left, changed alike.
        resumed = Run(cache, seed=2)
        resumed.load(checkpoint)
        resumed.train_epoch()
        if resumed.losses != tuned.losses[2:]:
            sys.exit(f"the losses are not those of the run that was not stopped: {resumed.losses}, {tuned.losses[2:]}")

    right = total = 0
    valid = CachedDataset(cache)
    tuned.model.eval()
    batches = feed(CachedLoader(valid, 32 * jax.device_count()), normalise=True, pad_last=True)
    for images, labels, is_sample in batches:
        right += int(((predict(tuned.model, images) == labels) & is_sample).sum())
        total += int(is_sample.sum())
    seen, waited = first.seen + tuned.seen, tuned.batches.waited
    print(f"{seen} images seen, accuracy {right / total:.3f}, waited for data {waited:.1%} of the time")


if __name__ == "__main__":
    main(*sys.argv[1:])
