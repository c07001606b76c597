"""fastai: its loaders, `aug_transforms`, and `fit_one_cycle` at the default rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastai.vision.all import ImageDataLoaders, Learner, Resize, accuracy, aug_transforms

from scripts.bench.peers.protocol import serve
from scripts.bench.peers.training import Task, learner, network


def learn(task: Task, epochs: int) -> dict[str, Any]:
    train, valid = Path(task.train), Path(task.valid)
    transforms: dict[str, Any] = {"item_tfms": Resize(task.size), "batch_tfms": aug_transforms()}
    loaders = ImageDataLoaders.from_folder(
        train.parent, train=train.name, valid=valid.name, num_workers=2, seed=task.seed, **transforms
    )
    trained = Learner(loaders, network(task), metrics=accuracy)
    with trained.no_bar(), trained.no_logging():
        trained.fit_one_cycle(epochs)
        _, found = trained.validate()
    return {"accuracy": float(found), "images": epochs * len(loaders.train_ds)}


if __name__ == "__main__":
    serve(race=learner(learn))
