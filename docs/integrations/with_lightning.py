"""Lightning: a data module over CachedLoader, resumed in the middle of an epoch by Lightning's own checkpoint."""

import sys

import lightning as L
import torch
from torch import nn

from tpucache import CachedDataset, CachedLoader


class CacheModule(L.LightningDataModule):
    """Trains on the augmented variants and validates on the clean images, each rank on its slice."""

    def __init__(self, cache: str, batch_size: int) -> None:
        super().__init__()
        self.train = CachedDataset(cache, variant="epoch")
        self.valid = CachedDataset(cache)
        self.batch_size = batch_size

    def loader(self, dataset: CachedDataset, *, shuffle: bool) -> CachedLoader:
        ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        return CachedLoader(dataset, self.batch_size, shuffle=shuffle, drop_last=shuffle, **ranks)

    def train_dataloader(self) -> CachedLoader:
        return self.loader(self.train, shuffle=True)

    def val_dataloader(self) -> CachedLoader:
        return self.loader(self.valid, shuffle=False)

    def on_after_batch_transfer(self, batch: list, dataloader_idx: int) -> tuple:
        images, labels = batch  # bytes until here: a quarter of the floats to upload
        return images.float() / 255, labels


class Classifier(L.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, classes))
        self.seen = 0

    def training_step(self, batch: tuple, step: int) -> torch.Tensor:
        images, labels = batch
        self.seen += len(images)
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: tuple, step: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean(), batch_size=len(images))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(cache: str) -> None:
    data = CacheModule(cache, batch_size=32)
    model = Classifier(len(data.train.classes))
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="auto",
        use_distributed_sampler=False,  # the loader gives each rank its slice already
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    print(f"{model.seen} images seen, accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
