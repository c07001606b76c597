"""Batches -> steps: train a model on a cache, predict with it, or take the parts for a loop of your own.

Importing this loads nothing: each public name is imported when it is first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpucache.imports import lazy_names

if TYPE_CHECKING:
    from tpucache.ondevice.draws import draw
    from tpucache.ondevice.modules import Augment, Normalise
    from tpucache.ondevice.settings import AugmentSettings
    from tpucache.training.device import BACKENDS, Device, open_device
    from tpucache.training.device.tensors import DeviceBatch
    from tpucache.training.evaluation import compute_rows, evaluate
    from tpucache.training.feed.feeder import Feeder
    from tpucache.training.fitting import TrainResult, train
    from tpucache.training.folds import open_all_folds, train_folds
    from tpucache.training.learn.ema import Ema
    from tpucache.training.learn.learner import Learner
    from tpucache.training.learn.models import build_model
    from tpucache.training.learn.optimizers import clip_gradients, make_optimizer, set_rates
    from tpucache.training.learn.schedule import make_schedule
    from tpucache.training.learn.tasks.base import Task
    from tpucache.training.learn.tasks.find import find_task, make_task
    from tpucache.training.lr_finder import find_lr
    from tpucache.training.options import RunOptions
    from tpucache.training.predictions import PredictReport, predict
    from tpucache.training.predictor import Predictor
    from tpucache.training.run.checkpoint import load_checkpoint, save_checkpoint
    from tpucache.training.run.folds import FoldsReport
    from tpucache.training.run.history import Watcher
    from tpucache.training.run.report import TrainReport
    from tpucache.training.settings import TrainSettings
    from tpucache.training.watch.tensorboard import TensorBoard

_HOMES: Final = {
    "Augment": "tpucache.ondevice.modules",
    "AugmentSettings": "tpucache.ondevice.settings",
    "BACKENDS": "tpucache.training.device",
    "Device": "tpucache.training.device",
    "DeviceBatch": "tpucache.training.device.tensors",
    "Ema": "tpucache.training.learn.ema",
    "Feeder": "tpucache.training.feed.feeder",
    "FoldsReport": "tpucache.training.run.folds",
    "Learner": "tpucache.training.learn.learner",
    "Normalise": "tpucache.ondevice.modules",
    "PredictReport": "tpucache.training.predictions",
    "Predictor": "tpucache.training.predictor",
    "RunOptions": "tpucache.training.options",
    "Task": "tpucache.training.learn.tasks.base",
    "TensorBoard": "tpucache.training.watch.tensorboard",
    "TrainReport": "tpucache.training.run.report",
    "TrainResult": "tpucache.training.fitting",
    "TrainSettings": "tpucache.training.settings",
    "Watcher": "tpucache.training.run.history",
    "build_model": "tpucache.training.learn.models",
    "clip_gradients": "tpucache.training.learn.optimizers",
    "compute_rows": "tpucache.training.evaluation",
    "draw": "tpucache.ondevice.draws",
    "evaluate": "tpucache.training.evaluation",
    "find_lr": "tpucache.training.lr_finder",
    "find_task": "tpucache.training.learn.tasks.find",
    "load_checkpoint": "tpucache.training.run.checkpoint",
    "make_optimizer": "tpucache.training.learn.optimizers",
    "make_schedule": "tpucache.training.learn.schedule",
    "make_task": "tpucache.training.learn.tasks.find",
    "open_all_folds": "tpucache.training.folds",
    "open_device": "tpucache.training.device",
    "predict": "tpucache.training.predictions",
    "save_checkpoint": "tpucache.training.run.checkpoint",
    "set_rates": "tpucache.training.learn.optimizers",
    "train": "tpucache.training.fitting",
    "train_folds": "tpucache.training.folds",
}

__all__ = [
    "BACKENDS",
    "Augment",
    "AugmentSettings",
    "Device",
    "DeviceBatch",
    "Ema",
    "Feeder",
    "FoldsReport",
    "Learner",
    "Normalise",
    "PredictReport",
    "Predictor",
    "RunOptions",
    "Task",
    "TensorBoard",
    "TrainReport",
    "TrainResult",
    "TrainSettings",
    "Watcher",
    "build_model",
    "clip_gradients",
    "compute_rows",
    "draw",
    "evaluate",
    "find_lr",
    "find_task",
    "load_checkpoint",
    "make_optimizer",
    "make_schedule",
    "make_task",
    "open_all_folds",
    "open_device",
    "predict",
    "save_checkpoint",
    "set_rates",
    "train",
    "train_folds",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
