"""CachedLoader: threads read records straight into the rows of pooled batch buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import Subset

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.pool import BufferPool
from tpucache.loading.sampler import Positions, block_order, full_order, rank_slice

Batch = Any  # (images, labels), or a dict of tensors where a record has more fields than an image

Self = TypeVar("Self", bound="CachedLoader")

Shuffle = bool | Literal["full", "block"]

_CHUNK_BYTES: Final = 8 << 20
_SPAN: Final = 1024
_STATE: Final = ("seed", "epoch", "position", "samples")


class CachedLoader:
    """Batches of a CachedDataset: `for images, labels in CachedLoader(dataset, 256, shuffle=True)`.

    Images are uint8 (batch, channels, height, width), channels last in memory, over a pooled buffer that nothing
    copied; it is used again once nothing refers to the batch any more, so a batch may be kept as long as wished.

    Each finished iteration is an epoch: the next one has another order, a function of (seed, epoch) alone. It is
    finished with its last batch, whether or not the caller asks for one more. One that is abandoned is begun again, or
    continued in the middle through `state_dict` and `load_state_dict`.

    `close`, or leaving a `with` block, frees the buffers that no batch uses.
    """

    def __init__(
        self,
        dataset: CachedDataset | Subset[Any],
        batch_size: int,
        *,
        shuffle: Shuffle = False,
        seed: int = 0,
        drop_last: bool = False,
        threads: int = 2,
        prefetch: int = 2,
        window: int = 4096,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Plan to read; nothing is read before the first iteration.

        `batch_size` is one rank's; rank r of `world_size` gets its slice of every global batch. The last batch is
        short unless `drop_last`. `threads` read at once, `prefetch` batches ahead.

        `shuffle` "full" (or True) mixes all samples: for caches that fit into memory. "block" mixes within a window of
        `window` samples, made of chunks of about 8 MiB in random order, and has the kernel read the next window ahead:
        for caches that do not. Raises UsageError.
        """
        if isinstance(dataset, Subset) and isinstance(dataset.dataset, CachedDataset):
            dataset = dataset.dataset.select(list(dataset.indices))
        if not isinstance(dataset, CachedDataset):
            raise UsageError(f"CachedLoader reads a CachedDataset, not {type(dataset).__name__}: use DataLoader")
        for name, value, low in (
            ("batch_size", batch_size, 1),
            ("threads", threads, 1),
            ("prefetch", prefetch, 0),
            ("window", window, 1),
            ("seed", seed, 0),
            ("world_size", world_size, 1),
        ):
            if value < low:
                raise UsageError(f"{name} is at least {low}, not {value}")
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is 0 to {world_size - 1} in a world of {world_size}, not {rank}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.epoch = 0
        self._order = _order_name(shuffle)
        self._seed, self._window = seed, window
        self._threads, self._prefetch = threads, prefetch
        self._rank, self._world_size = rank, world_size
        self._position = self._resume = 0
        self._pool: BufferPool | None = BufferPool(dataset.manifest.fields, batch_size)

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        whole, rest = divmod(len(self.dataset), self._global_batch)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        self._buffers  # a closed loader is refused  # noqa: B018
        start, self._resume = self._resume, 0
        return self._run(self.epoch, start)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the buffers; asking for a batch raises UsageError from then on. Batches and the dataset stay usable.

        Closing again does nothing.
        """
        self._pool = None

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        if epoch < 0:
            raise UsageError(f"epoch is at least 0, not {epoch}")
        self.epoch, self._position, self._resume = epoch, 0, 0

    def state_dict(self) -> dict[str, int | str]:
        """Return where the loader stands, the batches handed out so far counted as seen."""
        return {
            "seed": self._seed,
            "epoch": self.epoch,
            "position": self._position,
            "samples": len(self.dataset),
            "order": f"block {self._window}" if self._order == "block" else self._order,
            "fingerprint": self.dataset.manifest.fingerprint,
        }

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue where another loader stood, whatever its ranks and batch size. Raises UsageError."""
        own = self.state_dict()
        for name in ("fingerprint", "samples", "order"):
            if state.get(name) != own[name]:
                raise UsageError(
                    f"the state is of another cache, another part of it or another order: {name} {state.get(name)!r}, "
                    f"here {own[name]!r}"
                )
        seed, epoch, position = (state.get(name) for name in _STATE[:3])
        if not (isinstance(seed, int) and isinstance(epoch, int) and isinstance(position, int)):
            raise UsageError(f"a loader's state holds {', '.join(_STATE)} as whole numbers, not {state}")
        if min(seed, epoch) < 0 or not 0 <= position <= len(self.dataset):
            raise UsageError(f"no loader of {len(self.dataset)} samples stands at {state}")
        self._seed, self.epoch = seed, epoch
        self._position = self._resume = position

    @property
    def _buffers(self) -> BufferPool:
        if self._pool is None:
            raise UsageError("this loader is closed: make another CachedLoader")
        return self._pool

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self._world_size

    def _run(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        order = self._epoch_order(epoch)
        pending: deque[tuple[int, Future[Batch]]] = deque()
        hinted = start
        self._stand(epoch, start)
        with (
            ThreadPoolExecutor(self._threads, "tpucache-read") as threads,
            ThreadPoolExecutor(1, "tpucache-hint") as hints,
        ):
            try:
                for first, stop in self._bounds(start):
                    # A hint may block while the disk is busy, so it has a thread of its own.
                    while hinted < min(stop + self._hint_span, len(order)):
                        ahead = order[hinted : hinted + self._hint_span]
                        hints.submit(self.dataset.hint, ahead, epoch)
                        hinted += len(ahead)
                    own = order[rank_slice(first, stop, self._rank, self._world_size)]
                    pending.append((stop, threads.submit(self._read, own, epoch)))
                    if len(pending) > self._prefetch:
                        yield self._next(pending, epoch)
                while pending:
                    yield self._next(pending, epoch)
            finally:
                for _, future in pending:
                    future.cancel()
                hints.shutdown(cancel_futures=True)

    def _stand(self, epoch: int, position: int) -> None:
        """Note how far the samples have been handed out; where no batch is left, that is the start of the next epoch.

        Trainers that know the length never ask for the batch after the last: they must not see the epoch again.
        """
        over = next(self._bounds(position), None) is None
        self.epoch, self._position = (epoch + 1, 0) if over else (epoch, position)

    @property
    def _hint_span(self) -> int:
        """How many samples are hinted at once, at least as many ahead of the reading."""
        return self._window if self._order == "block" else _SPAN

    def _epoch_order(self, epoch: int) -> Positions:
        samples = len(self.dataset)
        if self._order == "full":
            return full_order(samples, self._seed, epoch)
        if self._order == "block":
            chunk = max(1, _CHUNK_BYTES // self.dataset.mean_record_bytes)
            return block_order(samples, self._seed, epoch, chunk=chunk, window=self._window)
        return np.arange(samples)

    def _bounds(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield where each global batch begins and ends in the epoch's order."""
        samples = len(self.dataset)
        for first in range(start, samples, self._global_batch):
            stop = min(first + self._global_batch, samples)
            if stop - first < self._global_batch and self.drop_last:
                return
            yield first, stop

    def _next(self, pending: deque[tuple[int, Future[Batch]]], epoch: int) -> Batch:
        self._buffers  # a loader closed meanwhile is refused  # noqa: B018
        stop, future = pending.popleft()
        batch = future.result()
        self._stand(epoch, stop)
        return batch

    def _read(self, indices: Positions, epoch: int) -> Batch:
        pool = self._buffers
        buffer = pool.take()
        try:
            self.dataset.read_into(buffer, indices, epoch)
        except BaseException:
            pool.give_back(buffer)
            raise
        arrays = pool.lend(buffer, len(indices))
        tensors: list[torch.Tensor] = [
            self.dataset.as_tensor(name, array) for name, array in zip(self.dataset.names, arrays, strict=True)
        ]
        return self.dataset.pack([*tensors, self.dataset.labels_of(indices)])


def _order_name(shuffle: Shuffle) -> str:
    """Return "full", "block" or "file". Raises UsageError for any other value of `shuffle`."""
    if isinstance(shuffle, bool):
        return "full" if shuffle else "file"
    if shuffle not in ("full", "block"):
        raise UsageError(f'shuffle is True, False, "full" or "block", not {shuffle!r}')
    return shuffle
