"""scikit-learn's splitters: folds that keep the classes' shares, and the samples of one patient together."""

import sys

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from tpucache import CachedDataset, CachedLoader


def main(cache: str) -> None:
    augmented, clean = CachedDataset(cache, variant="epoch"), CachedDataset(cache)
    labels = clean.labels.numpy()
    splitter, groups = StratifiedKFold(5, shuffle=True, random_state=0), None
    if "patient" in clean.table:  # a column of the .csv that the cache was made of
        splitter, groups = StratifiedGroupKFold(5), np.array(list(clean.table["patient"]))
    seen = 0
    for fold, (train, valid) in enumerate(splitter.split(labels, labels, groups)):
        train_set, valid_set = augmented.select(train), clean.select(valid)  # no image is read for that
        for images, _ in CachedLoader(train_set, 32, shuffle=True):
            seen += len(images)  # train on the augmented variants of four folds …
        for images, _ in CachedLoader(valid_set, 32):
            seen += len(images)  # … and validate on the clean images of the fifth
        print(f"fold {fold}: {len(train_set)} train, {len(valid_set)} validate")
    print(f"{seen} images seen")


if __name__ == "__main__":
    main(*sys.argv[1:])
