"""The public names of the package; its `__init__.py` reads them here, and imports each when it is first used."""

from tpucache.recipe import Recipe as Recipe
from tpucache.warmup.build import build_cache as build_cache
from tpucache.warmup.build_options import LabelKind as LabelKind, SoftOptions as SoftOptions
from tpucache.warmup.versions import compact_cache as compact_cache
from tpucache.warmup.versions import delete_samples as delete_samples, undo_delete as undo_delete
from tpucache.warmup.estimate import Estimate as Estimate
from tpucache.warmup.relabel import relabel_cache as relabel_cache, set_columns as set_columns
from tpucache.warmup.repair import repair_cache as repair_cache
from tpucache.warmup.run.executors import Executor as Executor
from tpucache.progress import BuildProgress as BuildProgress
from tpucache.warmup.sources import (
    ArchiveSource as ArchiveSource,
    DatasetSource as DatasetSource,
    FolderSource as FolderSource,
    ParquetSource as ParquetSource,
    Sample as Sample,
    Source as Source,
    TableOptions as TableOptions,
    TableSource as TableSource,
    TFRecordSource as TFRecordSource,
    box_source as box_source,
    label_source as label_source,
    open_source as open_source,
    pad_source as pad_source,
    select_source as select_source,
)
from tpucache.warmup.sources.source import Item as Item, Listing as Listing
from tpucache.warmup.trial import DryRun as DryRun, dry_run as dry_run
