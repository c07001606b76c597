"""BuildContext: what all tasks of a run share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tpucache.warmup.deadline import NEVER, Deadline
from tpucache.warmup.records.encode import SampleEncoder


@dataclass(frozen=True)
class BuildContext:
    """What all tasks of a run share. It is pickled to every worker.

    `work` is the work folder, `shards` the folder of finished shards, and `run` the name of the run that holds the work
    folder's lock. No task starts after `deadline`. `other_versions` names the versions that differ from the cache's.
    Of the samples with the numbers `compared`, a hash is kept, by which another source is noticed.
    """

    encoder: SampleEncoder
    work: Path
    shards: Path
    skip_errors: bool
    run: str
    deadline: Deadline = NEVER
    other_versions: tuple[str, ...] = ()
    compared: frozenset[int] = frozenset()
