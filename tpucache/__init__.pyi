"""The public names of the package; its `__init__.py` reads them here, and imports each when it is first used."""

from tpucache.adopt.growing import open_or_build as open_or_build
from tpucache.adopt.pictures import (
    ImageFolder as ImageFolder,
    PictureDataset as PictureDataset,
    cached as cached,
    from_hf as from_hf,
)
from tpucache.errors import (
    BuildError as BuildError,
    DamageError as DamageError,
    DependencyError as DependencyError,
    FormatError as FormatError,
    NoRoomError as NoRoomError,
    NotACacheError as NotACacheError,
    OutOfRangeError as OutOfRangeError,
    PublishError as PublishError,
    RecipeError as RecipeError,
    SampleError as SampleError,
    SourceError as SourceError,
    StoreError as StoreError,
    TpucacheError as TpucacheError,
    TrainingError as TrainingError,
    UnknownCodecError as UnknownCodecError,
    UnfinishedError as UnfinishedError,
    UsageError as UsageError,
)
from tpucache.loading.dataset import CachedDataset as CachedDataset
from tpucache.loading.find import find_cache as find_cache
from tpucache.loading.loader import CachedLoader as CachedLoader
from tpucache.loading.mixed import MixedLoader as MixedLoader
from tpucache.recipe import Recipe as Recipe
from tpucache.report.inspect import report_cache as report_cache
from tpucache.insight.page import report_findings as report_findings
from tpucache.training.page import report_run as report_run
from tpucache.report.preview import preview_cache as preview_cache
from tpucache.store.copying import stage_cache as stage_cache
from tpucache.store.manifest import Manifest as Manifest
from tpucache.store.verify import Damage as Damage, verify_cache as verify_cache
from tpucache.version import __version__ as __version__
from tpucache.warmup.build import build_cache as build_cache
from tpucache.warmup.repair import repair_cache as repair_cache
