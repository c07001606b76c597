"""build_block: one task, one block of samples, one sealed shard a variant. Each sample is decoded once."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import BuildError, SampleError
from tpucache.recipe import Recipe
from tpucache.store.codec import Field, RecordLayout, encode
from tpucache.store.format import shard_name
from tpucache.store.manifest import ShardEntry, Skipped
from tpucache.store.writer import SealedShard, ShardWriter
from tpucache.warmup.augment import augment
from tpucache.warmup.lock import is_held
from tpucache.warmup.plan import Block
from tpucache.warmup.presize import presize
from tpucache.warmup.receipt import BuiltBlock, save_receipt
from tpucache.warmup.sources.base import Source

#: The folder inside an unfinished cache that holds what only warmup needs; a finished cache has none.
WORK_NAME: Final = ".warmup"

Image = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class BlockTask:
    """Everything one worker needs to build one block."""

    block: Block
    source: Source
    recipe: Recipe
    augmentation: Mapping[str, Any]
    cache: Path
    skip_errors: bool
    run: str


def image_field(recipe: Recipe) -> Field:
    """Return the field that a recipe's images are stored in."""
    return Field("image", recipe.codec, "|u1", (recipe.height, recipe.width, 3))


def build_block(task: BlockTask) -> BuiltBlock:
    """Build, seal and receipt one block.

    Raises SampleError when a sample cannot be used and errors are not skipped, BuildError when the disk fails.
    """
    work = task.cache / WORK_NAME
    names = [shard_name(variant, task.block.number) for variant in range(task.recipe.variants + 1)]
    field = image_field(task.recipe)
    layout = RecordLayout((field,))
    numbers: list[int] = []
    skipped: list[Skipped] = []
    totals = np.zeros((2, 3), np.uint64)
    attempt = uuid.uuid4().hex  # a worker orphaned by a kill may still hold files of its own attempt
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(ShardWriter(work / f"{name}.{attempt}")) for name in names]
        for number, clean in _clean_images(task, skipped):
            for variant, writer in enumerate(writers):
                image = clean
                if variant:
                    image = augment(clean, task.augmentation, task.recipe.seed, number, variant)
                writer.append(number, layout.join([encode(field, image, task.recipe.quality)]))
            totals += _moments(clean)
            numbers.append(number)
        _check_run(task)
        sealed = [writer.seal(task.cache / name) for writer, name in zip(writers, names, strict=True)]
    sums, squares = totals.tolist()
    built = BuiltBlock(
        number=task.block.number,
        shards=tuple(_entry(task.block, variant, shard) for variant, shard in enumerate(sealed)),
        rows=tuple(shard.rows for shard in sealed),
        sample_numbers=np.array(numbers, np.uint64),
        skipped=tuple(skipped),
        sums=tuple(sums),
        squares=tuple(squares),
    )
    save_receipt(work, built)
    return built


def _clean_images(task: BlockTask, skipped: list[Skipped]) -> Iterator[tuple[int, Image]]:
    """Yield each usable sample's number and presized image, and note the others."""
    for sample in task.block.samples:
        _check_run(task)
        try:
            yield sample.number, presize(task.source.load(sample), task.recipe, sample.path)
        except SampleError as error:
            if not task.skip_errors:
                raise
            skipped.append(Skipped(sample.number, sample.path, error.reason))


def _check_run(task: BlockTask) -> None:
    """Stop a worker whose run was killed: another one may be going on in the same place by now."""
    if not is_held(task.cache / WORK_NAME, task.run):
        raise BuildError(f"the run that this worker builds {task.cache} for is gone")


def _moments(image: Image) -> npt.NDArray[np.uint64]:
    """Return each channel's sum and sum of squares, exactly: uint64 (2, channels)."""
    counts = [np.bincount(image[..., channel].ravel(), minlength=256) for channel in range(image.shape[2])]
    values = np.arange(256, dtype=np.uint64)
    levels = np.stack([values, values * values])
    return levels @ np.stack(counts, axis=1).astype(np.uint64)


def _entry(block: Block, variant: int, shard: SealedShard) -> ShardEntry:
    return ShardEntry(
        name=shard_name(variant, block.number),
        bytes=shard.bytes,
        sha256=shard.sha256,
        variant=variant,
        block=block.number,
        first=0,  # run.py sets it, once all blocks before this one are known
        records=len(shard.rows),
        records_sha256=shard.records_sha256,
    )
