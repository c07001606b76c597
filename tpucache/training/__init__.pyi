"""The public names of the package; its `__init__.py` reads them here, and imports each when it is first used."""

from tpucache.ondevice.draws import draw as draw
from tpucache.ondevice.modules import Augment as Augment, Normalise as Normalise
from tpucache.ondevice.settings import AugmentSettings as AugmentSettings
from tpucache.training.device import BACKENDS as BACKENDS, Device as Device, open_device as open_device
from tpucache.training.device.base import DeviceBatch as DeviceBatch
from tpucache.training.evaluation import compute_rows as compute_rows, evaluate as evaluate
from tpucache.training.feed import Feeder as Feeder
from tpucache.training.fitting import TrainResult as TrainResult, train as train
from tpucache.training.folds import open_all_folds as open_all_folds, train_folds as train_folds
from tpucache.training.optimizers import Ema as Ema
from tpucache.training.learner import Learner as Learner
from tpucache.training.model import build_model as build_model
from tpucache.training.optimizers import (
    clip_gradients as clip_gradients,
    make_optimizer as make_optimizer,
    set_rates as set_rates,
)
from tpucache.training.schedule import make_schedule as make_schedule
from tpucache.training.tasks.find import find_task as find_task, make_task as make_task
from tpucache.training.tasks.task import Task as Task
from tpucache.training.lr_finder import find_lr as find_lr
from tpucache.training.options import PredictOptions as PredictOptions
from tpucache.training.prediction import PredictReport as PredictReport, predict as predict
from tpucache.training.prediction import Predictor as Predictor
from tpucache.training.weights import load_checkpoint as load_checkpoint, save_checkpoint as save_checkpoint
from tpucache.training.run.report import FoldsReport as FoldsReport
from tpucache.training.run.state import Watcher as Watcher
from tpucache.training.run.report import TrainReport as TrainReport
from tpucache.training.options import RunOptions as RunOptions
from tpucache.training.settings import TrainSettings as TrainSettings
from tpucache.training.watch import TensorBoard as TensorBoard
