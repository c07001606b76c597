"""The checkpoints of a run, best.pt and last.pt."""

from __future__ import annotations

import copy
import io
import random
import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from scripts.bench.photos import write_pictures
from scripts.checks.fuzz.mutate import mutate_bytes, mutate_json, odd_integer
from scripts.checks.fuzz.target import Target, refusals
from tpucache import CachedDataset, Recipe, build_cache
from tpucache.training import RunOptions, TrainSettings
from tpucache.training.device import CpuDevice
from tpucache.training.loop import train
from tpucache.training.prediction import Predictor, predict
from tpucache.training.run.saved import load_last
from tpucache.training.weights import read_weights


class _Shared(NamedTuple):
    dataset: CachedDataset
    run: Path


def prepare(folder: Path) -> _Shared:
    """Train a tiny model for an epoch."""
    build_cache(write_pictures(folder / "source", 12, 8), folder / "cache", Recipe(size=8), jobs=1)
    dataset = CachedDataset(folder / "cache")
    settings = TrainSettings(model="cnn", epochs=1, batch_size=4, lr=0.01)
    train(folder / "run", settings, dataset, dataset, CpuDevice(), RunOptions(replay=False, curves=False))
    return _Shared(dataset, folder / "run")


def attempt_checkpoint(shared: _Shared, draws: random.Random, place: Path) -> None:
    """Predict with, continue from and take over weights of checkpoints that are changed."""
    run = place / "run"
    shutil.copytree(shared.run, run)
    name = draws.choice(("best.pt", "best.pt", "last.pt"))
    data = (run / name).read_bytes()
    if draws.random() < 0.3:
        (run / name).write_bytes(mutate_bytes(data, draws))
    else:
        content = torch.load(io.BytesIO(data), weights_only=True)
        for _ in range(draws.choice((1, 1, 2))):
            content = _changed(content, draws)
        torch.save(content, run / name)
    refusals(
        lambda: predict(Predictor([run], CpuDevice()), [shared.dataset], place / "out.csv", 4),
        lambda: load_last(run),
        lambda: read_weights(run),
    )


def _changed(content: Any, draws: random.Random) -> Any:
    """Return a checkpoint of which a tensor, a value or a whole part is another one."""
    content = copy.deepcopy(content)
    holder = content.get("learner", content)
    weights = holder.get("model") if isinstance(holder, dict) else None
    if not isinstance(weights, dict) or not weights or draws.random() < 0.6:
        return mutate_json(content, draws) if isinstance(content, dict) else content
    name = draws.choice(list(weights))
    tensor = weights[name]
    if not isinstance(tensor, torch.Tensor):
        return content
    weights[name] = draws.choice(
        (
            lambda: tensor.to(draws.choice((torch.int8, torch.float16, torch.complex64, torch.float64, torch.bool))),
            tensor.tolist,
            lambda: tensor.reshape(-1)[:1].expand(1 << draws.choice((4, 30, 40))),
            lambda: tensor.to_sparse() if tensor.ndim else tensor,
            lambda: tensor.reshape(-1),
            lambda: torch.full_like(tensor.float(), float(draws.choice(("nan", "inf", "1e38")))),
            lambda: odd_integer(draws),
        )
    )()
    return content


TARGETS: Final = (Target("checkpoint", prepare, attempt_checkpoint),)
