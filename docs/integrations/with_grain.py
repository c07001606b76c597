"""Grain: a CachedDataset is a source as it is, and Grain's threads read it."""

import sys

import grain

from tpucache import CachedDataset


def main(cache: str) -> None:
    train = CachedDataset(cache, variant=1)
    batches = (
        grain.MapDataset.source(train)
        .seed(0)
        .shuffle()
        .repeat(2)  # epochs, each in another order
        .map(lambda item: {"image": item[0].permute(1, 2, 0).numpy(), "label": item[1].numpy()})
        .batch(32)
        .to_iter_dataset(grain.ReadOptions(num_threads=2))
    )
    seen = 0
    for batch in batches:  # uint8 (batch, height, width, 3); int64 (batch,)
        seen += len(batch["image"])
    print(f"{seen} images seen")


if __name__ == "__main__":
    main(*sys.argv[1:])
