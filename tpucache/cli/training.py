"""train: what a cache is for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpucache.cli.options import add_cache, add_command, add_reading, in_memory, positive, staged
from tpucache.cli.terminal import show

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset, InMemory


def train(options: argparse.Namespace) -> int:
    """Train a model on a cache."""
    from tpucache.loading.dataset import CachedDataset
    from tpucache.training.device import open_device
    from tpucache.training.loop import TrainSettings
    from tpucache.training.loop import train as run_training

    settings = TrainSettings(
        model=options.model,
        epochs=options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        weight_decay=options.weight_decay,
        bf16=options.bf16,
        seed=options.seed,
        threads=options.threads,
    )
    held = in_memory(options)
    data = CachedDataset(staged(options), in_memory=held)
    train_set, valid_set = _split(data, options.valid, options.seed, held)
    device = open_device(options.backend, options.cores)
    report = run_training(options.run, settings, train_set, valid_set, device)
    show(options, report.to_dict(), report.lines())
    return 0


def _split(
    data: CachedDataset, valid: str | None, seed: int, held: InMemory
) -> tuple[CachedDataset, CachedDataset | None]:
    """Return what trains (every epoch another variant, where there are any) and what validates (the clean one)."""
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.split import fold_split, stratified_split

    augmented = CachedDataset(data.directory, "epoch", in_memory=held) if data.manifest.augmented else data
    if valid is None:
        return augmented, None
    if valid.startswith("fold="):
        fold = fold_split(data.table, valid.removeprefix("fold="))
        return augmented.select(fold.train), data.select(fold.valid)
    try:
        fraction = float(valid)
    except ValueError:
        return augmented, CachedDataset(valid, in_memory=held)
    split = stratified_split(data.labels.numpy(), fraction, seed)
    return augmented.select(split.train), data.select(split.valid)


def add(commands: Any) -> None:
    """Add train."""
    command = add_command(commands, train, "cache/train --run runs/first --valid 0.2 --backend xla --cores 8")
    add_cache(command)
    command.add_argument("--run", type=Path, required=True, metavar="RUN", help="the folder for what the run leaves")
    command.add_argument("--valid", metavar="CACHE|FRACTION|fold=N", help="what to validate on after each epoch")
    command.add_argument("--backend", choices=["eager", "xla"], default="xla", help="eager is torch on the CPU")
    command.add_argument("--cores", type=positive, default=1, metavar="N", help="1, or all")
    command.add_argument(
        "--model", default="resnet18", metavar="NAME", help="cnn, resnet18, or module:callable taking a class count"
    )
    command.add_argument("--epochs", type=positive, default=5, metavar="N", help="times through the data")
    command.add_argument("--batch-size", type=positive, default=128, metavar="B", help="images a step, all cores'")
    command.add_argument("--lr", type=float, default=0.1, metavar="X", help="the one-cycle's peak learning rate")
    command.add_argument("--weight-decay", type=float, default=5e-4, metavar="X", help="of SGD")
    command.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, order and split")
    add_reading(command)
