"""fastai: DataLoaders made of two datasets; a callback turns the variant each epoch."""

import sys

from fastai.callback.all import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from fasttransform import ItemTransform
from torch import nn

from tpucache import CachedDataset


class TurnVariants(Callback):
    """Show another augmented variant every epoch."""

    def before_epoch(self) -> None:
        self.dls.train.dataset.set_epoch(self.epoch)


class CountImages(Callback):
    seen = 0

    def after_batch(self) -> None:
        self.seen += len(self.x) * self.training


class ToFloats(ItemTransform):
    def encodes(self, batch):  # fastai goes by annotations: without one it is called with the whole batch
        images, labels = batch
        return images.float() / 255, labels


def main(cache: str) -> None:
    train, valid = CachedDataset(cache, variant="epoch"), CachedDataset(cache)
    dls = DataLoaders.from_dsets(train, valid, bs=32, num_workers=0, after_batch=ToFloats)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, len(train.classes)))
    count = CountImages()
    learner = Learner(dls, model, nn.CrossEntropyLoss(), metrics=accuracy, cbs=[TurnVariants(), count])
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(2, 0.1)
    print(f"{count.seen} images seen, accuracy {learner.recorder.values[-1][-1]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
