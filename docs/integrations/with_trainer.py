"""Hugging Face's Trainer: CachedLoader trains; the plain dataset, with a collator, validates."""

import sys
import tempfile
from collections.abc import Iterator

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from tpucache import CachedDataset, CachedLoader


class Batches:
    """A CachedLoader whose batches are dictionaries, as the Trainer wants them."""

    def __init__(self, loader: CachedLoader) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.set_epoch = loader.set_epoch  # the Trainer calls it before each epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"images": images, "labels": labels} for images, labels in self.loader)


class CacheTrainer(Trainer):
    def get_train_dataloader(self) -> Batches:
        arguments = self.args
        ranks = {"rank": arguments.process_index, "world_size": arguments.world_size}
        loader = CachedLoader(
            self.train_dataset, arguments.train_batch_size, shuffle=True, seed=arguments.seed, drop_last=True, **ranks
        )
        return Batches(loader)


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, classes))
        self.seen = 0

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += len(images) * self.training
        logits = self.model(images.float() / 255)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(items: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    images, labels = zip(*items, strict=True)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


def main(cache: str) -> None:
    train, valid = CachedDataset(cache, variant="epoch"), CachedDataset(cache)
    model = Classifier(len(train.classes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=2,
            per_device_train_batch_size=32,
            optim="adamw_torch",  # the default, fused, is not for TPUs
            remove_unused_columns=False,  # there are no columns
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = CacheTrainer(model, arguments, collate, train, valid)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    print(f"{model.seen} images seen, loss {loss:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
