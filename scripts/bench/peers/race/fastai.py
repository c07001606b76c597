"""fastai: its loaders, `aug_transforms`, and `fit_one_cycle` at the default rate."""

from __future__ import annotations

from typing import Any

from fastai.vision.all import ImageDataLoaders, Learner, Resize, accuracy, aug_transforms

from scripts.bench.peers.race.running import Task, network, run


def learn(task: Task, epochs: int) -> dict[str, Any]:
    loaders = ImageDataLoaders.from_folder(
        task.train.parent,
        train=task.train.name,
        valid=task.valid.name,
        item_tfms=Resize(task.size),
        batch_tfms=aug_transforms(),
        num_workers=2,
        seed=task.seed,
    )
    learner = Learner(loaders, network(task), metrics=accuracy)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(epochs)
        _, found = learner.validate()
    return {"accuracy": float(found), "images": epochs * len(loaders.train_ds)}


if __name__ == "__main__":
    run(learn)
