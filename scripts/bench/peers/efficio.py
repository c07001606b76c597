"""efficio: its ImageCache under a DataLoader, and its own augmentation of whole batches, as its README shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from efficio import CachedImageDataset, ImageCache
from efficio import gpu_augment as augment
from torch.utils.data import DataLoader

from scripts.bench.peers.epochs import Task, taker
from scripts.bench.peers.protocol import serve


class _Augmented:
    """The batches of a loader, each of them augmented, as `Run.loop` does with `gpu_transform`."""

    def __init__(self, loader: Any, change: Any) -> None:
        self._loader, self._change = loader, change

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for images, labels in self._loader:
            yield self._change(images), labels


def make(task: Task) -> Any:
    paths, labels = task.files()
    ImageCache.build(paths, labels, task.folder, size=(task.side, task.side), workers=task.workers, verbose=False)
    options: dict[str, Any] = {"num_workers": task.workers, "persistent_workers": True, "prefetch_factor": 4}
    loader = DataLoader(CachedImageDataset(task.folder), task.batch, shuffle=True, **options)
    changes = [
        augment.ToFloat(),
        augment.RandomResizedCrop(task.size),
        augment.RandomHorizontalFlip(),
        augment.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    return _Augmented(loader, augment.Compose(changes))


if __name__ == "__main__":
    serve(epochs=taker(make))
