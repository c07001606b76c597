"""Trains each kind of task with each kind of model by the defaults, and compares with a grid of batches and rates.

    python -m scripts.checks defaults FOLDER
    python -m scripts.checks defaults FOLDER --device cuda --jobs 14

All images are drawn here, 32 pixels wide. Every run that has ended is a line of FOLDER/runs.jsonl, so that the command
continues where it was stopped; runs with the defaults come first. It fails where a run with the defaults diverged, or
where their mean over the seeds is worse than the best mean of the grid by more than 0.03, of a regression by more than
a tenth of its rmse. The models `timm:…` need timm. A run takes up to a minute of one core.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from scripts.bench.table import as_markdown
from scripts.commands import make_parser, say
from tpucache import CachedDataset, Recipe, TrainingError, build_cache
from tpucache.runs import INFO_NAME
from tpucache.training import RunOptions, TrainSettings, train
from tpucache.training.device import DEVICES
from tpucache.training.settings import settings_from

_SIDE: Final = 32
_SEEDS: Final = (0, 1)
_WITHIN: Final = 0.03
_SHARE: Final = 0.1  # of the best rmse
#: The grid, the default first: what the batch and the rate of the default are multiplied by.
_GRID: Final = ((1.0, 1.0), (1.0, 3.0), (1.0, 0.3), (2.0, 1.0), (0.5, 1.0))

_Item = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Generated data: how an item is drawn, how many train and validate, by what runs are compared, and the models."""

    draw: Callable[[np.random.Generator, int], _Item]
    train: int
    valid: int
    metric: str
    models: tuple[str, ...]
    classes: tuple[str, ...] = ()
    mask_classes: int | None = None

    @property
    def is_error(self) -> bool:
        """Whether less of the metric is better."""
        return self.metric == "rmse"


@dataclass(frozen=True)
class Items:
    """A data set of drawn items, as warmup reads it."""

    draw: Callable[[np.random.Generator, int], _Item]
    count: int
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> _Item:
        return self.draw(np.random.default_rng(number), number)


def _blob(rng: np.random.Generator, kind: int, radius: float) -> npt.NDArray[np.bool_]:
    """Draw one of four shapes of a radius somewhere: a disc, a square, a cross, a ring."""
    row, column = np.mgrid[:_SIDE, :_SIDE] - rng.uniform(radius, _SIDE - radius, (2, 1, 1))
    far, wide = np.hypot(row, column), np.maximum(abs(row), abs(column))
    near = np.minimum(abs(row), abs(column))
    shapes = (far < radius, wide < 0.85 * radius, (wide < radius) & (near < 0.3 * radius), abs(far - radius + 2) < 1.5)
    found: npt.NDArray[np.bool_] = shapes[kind]
    return found


def _paint(rng: np.random.Generator, *shapes: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Paint shapes in colours of their own on noise."""
    image = rng.normal(rng.uniform(60, 120, 3), 25, (_SIDE, _SIDE, 3))
    for shape in shapes:
        image[shape] += rng.uniform(30, 110, 3)
    return image.clip(0, 255).astype(np.uint8)


def _one_shape(rng: np.random.Generator, number: int) -> _Item:
    return {"image": _paint(rng, _blob(rng, number % 4, rng.uniform(6, 11))), "label": number % 4}


def _one_of_three(rng: np.random.Generator, number: int) -> _Item:
    return {"image": _paint(rng, _blob(rng, number % 3, rng.uniform(6, 11))), "label": number % 3}


def _several_shapes(rng: np.random.Generator, _number: int) -> _Item:
    labels = rng.random(4) < 0.5
    shapes = [_blob(rng, int(kind), rng.uniform(5, 9)) for kind in np.flatnonzero(labels)]
    return {"image": _paint(rng, *shapes), "label": labels.astype(np.float32)}


def _measured_disc(rng: np.random.Generator, _number: int) -> _Item:
    radius = rng.uniform(3, 12)
    return {"image": _paint(rng, _blob(rng, 0, radius)), "label": np.float32(100 + 20 * radius)}


def _masked(rng: np.random.Generator, _number: int) -> _Item:
    disc, square = _blob(rng, 0, rng.uniform(5, 9)), _blob(rng, 1, rng.uniform(5, 9))
    mask = disc.astype(np.uint8)
    mask[square] = 2
    return {"image": _paint(rng, disc & ~square, square), "mask": mask}


_VIT: Final = "timm:test_vit?img_size=32&patch_size=4"
_MODELS: Final = ("cnn", "resnet18", "resnet9", "timm:test_convnext", _VIT)
_KINDS: Final = ("disc", "square", "cross", "ring")
TASKS: Final = {
    "classes": Task(_one_shape, 256, 300, "accuracy", _MODELS, _KINDS),
    "few samples": Task(_one_of_three, 42, 300, "accuracy", _MODELS, _KINDS[:3]),
    "multi-label": Task(_several_shapes, 256, 300, "accuracy", _MODELS, _KINDS),
    "regression": Task(_measured_disc, 256, 300, "rmse", _MODELS),
    "masks": Task(_masked, 128, 60, "iou", ("unet",), mask_classes=3),
}


class Trial(NamedTuple):
    """One run: the task, the model, the seed, and what the default batch and rate are multiplied by."""

    task: str
    model: str
    seed: int
    batch: float = 1.0
    rate: float = 1.0


def open_task(folder: Path, name: str) -> tuple[CachedDataset, CachedDataset]:
    """Return what trains and what validates of a task, in a cache that is built once."""
    about, cache = TASKS[name], folder / name.replace(" ", "-")
    if not (cache / "manifest.json").exists():
        items = Items(about.draw, about.train + about.valid, about.classes)
        build_cache(items, cache, Recipe(size=_SIDE), jobs=1)
    data = CachedDataset(cache)
    return data.select(np.arange(about.train)), data.select(np.arange(about.train, len(data)))


def run(caches: Path, device: str, trial: Trial, defaults: dict[str, Any] | None) -> dict[str, Any]:
    """Train, and return what the run has decided and the metric of its last epoch, NaN where it diverged.

    `defaults` has what a run with the defaults decided, whose batch and rate are multiplied; None: by the defaults.
    """
    base = settings_from(defaults) if defaults else None
    plain = TrainSettings(model=trial.model, mask_classes=TASKS[trial.task].mask_classes)
    settings = replace(base or plain, seed=trial.seed)
    if base is not None:
        batch = max(2, int(base.batch * trial.batch))
        # A rate belongs to a batch: another batch has the rate that the defaults' rule scales it to.
        settings = replace(settings, batch_size=batch, lr=(base.lr or 0.0) * trial.rate)
    with tempfile.TemporaryDirectory() as work:
        folder, data = Path(work, "run"), open_task(caches, trial.task)
        options = RunOptions(replay=False, on_epoch=lambda _line: None)
        value = math.nan
        try:
            result = train(trial.model, *data, settings, run=folder, device=device, options=options)
            value = float(result.history[-1][f"valid_{TASKS[trial.task].metric}"])
        except TrainingError as error:
            say(f"{trial.task}, {trial.model}: {error}")
        decided = json.loads((folder / INFO_NAME).read_text())["settings"]  # written before the first step
    return {"trial": trial, "value": value, "settings": decided}


def table(runs: dict[Trial, dict[str, Any]]) -> tuple[list[list[str]], bool]:
    """Return the rows of the table, and whether all defaults whose grid is finished are as good as they have to be."""
    rows, all_good = [["task", "model", "batch", "rate", "default", "best of the grid", "where", "good"]], True
    for task, about in TASKS.items():
        for model in about.models:
            of_model = {trial: values for trial, values in runs.items() if (trial.task, trial.model) == (task, model)}
            points: dict[tuple[float, float], list[float]] = {}
            for trial, values in of_model.items():
                points.setdefault((trial.batch, trial.rate), []).append(values["value"])
            means = {point: statistics.fmean(each) for point, each in points.items() if len(each) == len(_SEEDS)}
            if _GRID[0] not in means:
                continue
            sign = -1 if about.is_error else 1
            default = means[_GRID[0]]
            where = max(means, key=lambda point: -math.inf if math.isnan(means[point]) else sign * means[point])
            allowed = _SHARE * means[where] if about.is_error else _WITHIN
            good = math.isfinite(default) and abs(means[where] - default) <= allowed
            is_whole = len(means) == len(_GRID)
            all_good &= good or not is_whole
            verdict = ("yes" if good else "NO") if is_whole else "grid unfinished"
            made = settings_from(of_model[Trial(task, model, _SEEDS[0])]["settings"])
            place = "default" if where == _GRID[0] else f"{where[0]:g} x batch, {where[1]:g} x rate"
            optimizer = f"{made.optimizer} {made.peak_lr:.2g}"
            figures = [f"{default:.3f}", f"{means[where]:.3f} of {len(means)}", place, verdict]
            rows.append([task, f"`{model}`", str(made.batch), optimizer, *figures])
    return rows, all_good


def run_all(folder: Path, tasks: list[str], device: str, jobs: int) -> dict[Trial, dict[str, Any]]:
    """Run what is missing in processes of one thread each, add its lines, and return all runs.

    The grid comes after the runs with the defaults, which it multiplies.
    """
    path = folder / "runs.jsonl"
    lines = path.read_text().splitlines() if path.exists() else ()
    done = {Trial(*values["trial"]): values for values in map(json.loads, lines)}
    defaults = [Trial(task, model, seed) for task in tasks for model in TASKS[task].models for seed in _SEEDS]
    grid = [trial._replace(batch=batch, rate=rate) for batch, rate in _GRID[1:] for trial in defaults]
    for task in tasks:
        open_task(folder, task)  # builds its cache before processes read it
    start = functools.partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(jobs, get_context("spawn"), start) as pool, path.open("a", buffering=1) as file:
        for trials in (defaults, grid):
            missing = [trial for trial in trials if trial not in done]
            bases = [done.get(trial._replace(batch=1.0, rate=1.0), {}).get("settings") for trial in missing]
            for trial, values in zip(
                missing, pool.map(functools.partial(run, folder, device), missing, bases), strict=True
            ):
                done[trial] = values
                file.write(json.dumps(values) + "\n")
                say(f"{', '.join(map(str, trial))}: {values['value']:.3f}")
    return done


def main() -> int:
    """Run what is missing, print the table; 1 where a default is not good."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="for the caches and the results")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=[*TASKS], help="these tasks (all)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="(%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time (%(default)s)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows, all_good = table(run_all(options.folder, options.only, options.device, options.jobs))
    print(as_markdown(rows), end="")
    return int(not all_good)
