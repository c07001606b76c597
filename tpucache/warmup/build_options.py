"""Options of the commands warmup and relabel that are not part of a recipe, and the time at which a run must stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

from tpucache.errors import UsageError
from tpucache.options import by_name, check_options, option

if TYPE_CHECKING:
    from tpucache.recipe import Recipe
    from tpucache.warmup.sources.source import Items, Source

    Origin: TypeAlias = str | Path | Source | Items
import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from tpucache.errors import UnfinishedError

Names = ParamSpec("Names")
Result_co = TypeVar("Result_co", covariant=True)

#: How labels are read. With "auto", whole numbers and text are classes, and other numbers are values to regress.
LabelKind = Literal["auto", "classes", "numbers", "multilabel"]
Backend = Literal["loky", "dask", "ray"]
OnError = Literal["fail", "skip"]
Target = Literal["kaggle"] | None


def ignore(_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class SoftOptions:
    """Whether a table has soft labels (class probabilities), and how much they count. Raises UsageError."""

    soft_labels: bool = option(
        False,
        "the table has class probabilities, as predict writes them: for samples that have a row, train uses them as "
        "targets instead of the labels; validation still uses the labels",
    )
    weight_col: str | None = option(
        None, "with --soft-labels: the column with the weights of samples, from 0; default: all 1", metavar="NAME"
    )
    soft_share: float = option(
        1.0, "with --soft-labels: the share of the probabilities in a target; the rest is the label", metavar="X"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 < self.soft_share <= 1:
            raise UsageError(f"soft_share must be above 0 and at most 1, not {self.soft_share}")
        if not self.soft_labels and (self.weight_col is not None or self.soft_share != 1):
            raise UsageError("--weight-col and --soft-share are for a table of predictions: give --soft-labels, too")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How to read the labels of a source, and which length its sequences get. Raises UsageError."""

    labels: LabelKind = option(
        "auto", "what the labels are; auto: whole numbers and text are classes, other numbers are values to predict"
    )
    classes: str | Path | Sequence[str] | None = option(
        None,
        "the classes in their order: a text file with one name on each line, or a cache that has them",
        metavar="FILE|CACHE",
    )
    missing_label: Sequence[str] = option(
        (),
        "a value that means that a sample has no label, such as -1 or NA; can be repeated. If not given: -1 where "
        "labels are class numbers. Empty cells, None and NaN always mean this",
        metavar="VALUE",
    )
    pad: int | None = option(
        None,
        "length of every sequence: zeros are added at the end of shorter ones; default: that of the longest sequence",
        metavar="N",
        minimum=1,
    )
    truncate: bool = option(False, "cut longer sequences to the length of --pad")

    def __post_init__(self) -> None:
        if not isinstance(self.missing_label, str):  # `label_source` refuses a single text
            object.__setattr__(self, "missing_label", tuple(self.missing_label))
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class BuildOptions(SourceOptions):
    """How to build a cache: the options of its source, and what to do about bad samples and limits. Raises UsageError.

    `jobs` is the number of worker processes on this machine; None: one for each core. On the command line, --jobs is an
    option of WorkerOptions.
    """

    time_limit: float | None = option(
        None, "stop before this much time has passed; run the same command again to continue", metavar="8h"
    )
    target: Target = option(None, "kaggle: keep the cache within Kaggle's limits of 20 GB and 44 shards")
    on_error: OnError = option(
        "fail", "fail: stop at a sample that cannot be used; skip: leave the sample out and list it"
    )
    retry: bool = option(
        False,
        "try the skipped samples of a finished cache again; those that fail again stay skipped",
    )
    jobs: int | None = None


class TakesOptions(Protocol[Names, Result_co]):
    """A function of a source, a cache's folder and a recipe. Its options are keyword arguments."""

    def __call__(
        self,
        source: Origin,
        cache: str | Path,
        recipe: Recipe | None = None,
        *args: Names.args,
        **options: Names.kwargs,
    ) -> Result_co:
        """Call the function."""


def options_by_name(
    kind: Callable[Names, SourceOptions],
) -> Callable[[Callable[..., Result_co]], TakesOptions[Names, Result_co]]:
    """Return a decorator for functions with a parameter `options` of type `kind`: callers pass its fields by name."""
    return lambda function: by_name(function, kind)


@dataclass(frozen=True)
class SelectionOptions:
    """Which samples of a source are used: the arguments of `select_source`. Raises UsageError."""

    limit: int | None = option(
        None,
        "the most samples to use, spread over the source; a larger limit in a later run adds samples",
        metavar="N",
        minimum=1,
    )
    include: tuple[str, ...] = option(
        (),
        "use only samples whose paths match, such as 'cats/*'; `*` is any text, also with /; can be repeated",
        metavar="PATTERN",
    )
    exclude: tuple[str, ...] = option((), "leave out samples whose paths match; can be repeated", metavar="PATTERN")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class BoxOptions:
    """The file with the boxes of a source's images, for `box_source`."""

    boxes: str | Path | None = option(
        None, "a COCO JSON file with boxes; images that it does not list are left out", metavar="FILE"
    )


@dataclass(frozen=True)
class WorkerOptions:
    """Which workers build a cache. Raises UsageError.

    With `backend` "loky", the workers are `jobs` processes on this machine (None: one for each core). With "dask"
    and "ray", the workers of a cluster run up to `jobs` tasks at once (None: one for each core of the cluster).
    `scheduler` is the address of a Dask scheduler or a Ray cluster. Every worker must see source and cache under the
    same paths.
    """

    backend: Backend = option("loky", "the library that runs the workers: loky on this machine, others on a cluster")
    jobs: int | None = option(None, "number of worker processes; default: one for each core", metavar="N", minimum=1)
    scheduler: str | None = option(None, "address of a Dask scheduler or a Ray cluster", metavar="ADDRESS", code="")

    def __post_init__(self) -> None:
        check_options(self)
        if self.scheduler and self.backend == "loky":
            raise UsageError("--scheduler is for --backend dask and ray: leave it out")


# The deadline is this much before the time limit, so that running tasks can finish and files can be cleaned up.
_MARGIN_SHARE: Final = 0.1
_MARGIN_SECONDS: Final = 60.0
_LEAST_SECONDS: Final = 2.0


class _Late(BaseException):
    """Raised at the deadline. Not an Exception, so that code that catches a user's errors does not catch it."""


@dataclass(frozen=True)
class Deadline:
    """The time when a run must stop: `at`, in seconds of Unix time, so that workers on other machines can use it.

    If `at` is None, the run never has to stop.
    """

    at: float | None = None

    @classmethod
    def of(cls, time_limit: float | None) -> Deadline:
        """Return the deadline for a time limit in seconds from now; None: no deadline."""
        if time_limit is None:
            return cls()
        if not isinstance(time_limit, (int, float)) or not 0 <= time_limit < math.inf:
            raise UsageError(f"time_limit must be a number of seconds from 0, not {time_limit!r}")
        return cls(time.time() + time_limit - min(_MARGIN_SECONDS, _MARGIN_SHARE * time_limit))

    @property
    def is_past(self) -> bool:
        return self.at is not None and time.time() >= self.at

    @contextlib.contextmanager
    def interrupting(self, activity: str) -> Iterator[None]:
        """Interrupt the body of the `with` statement at the deadline, but not in its first two seconds.

        The body must not write files.
        """
        if self.at is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: Any) -> None:
            raise _Late

        handler = signal.signal(signal.SIGALRM, stop)
        timer = signal.setitimer(signal.ITIMER_REAL, max(_LEAST_SECONDS, self.at - time.time()))
        try:
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, *timer)
                signal.signal(signal.SIGALRM, handler)
        except _Late:
            raise UnfinishedError(
                f"the time limit came while {activity}, and nothing was built: run the same command again with a "
                "longer time limit"
            ) from None


NEVER: Final = Deadline()
