"""Engine: who runs the tasks. joblib's own workers here, or through joblib a cluster of Dask, Ray or Spark."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import joblib
from joblib.externals.loky.process_executor import BrokenProcessPool

from tpucache.errors import BuildError, DependencyError, UsageError

Backend = Literal["loky", "dask", "ray", "spark"]
Task = tuple[Callable[..., Any], tuple[Any, ...]]

#: Tasks a worker of a cluster is given at once: their results come back together.
_ROUND: Final = 4


@dataclass(frozen=True)
class Engine:
    """A backend of joblib's: "loky" (`jobs` processes here; None: all cores), "dask", "ray" or "spark".

    `scheduler` is the address of a Dask scheduler or a Ray cluster; every worker must see source and cache under the
    same paths. `jobs` is then how many tasks run at once; None: as many as there are workers. Raises UsageError.
    """

    backend: Backend = "loky"
    jobs: int | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise UsageError(f"backend is one of {', '.join(get_args(Backend))}, not {self.backend!r}")
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"jobs is at least 1, not {self.jobs}")
        if self.scheduler and self.backend not in ("dask", "ray"):
            raise UsageError(f"a scheduler's address is for dask and ray, not for {self.backend}")

    def run(self, tasks: Iterator[Task]) -> Iterator[Any]:
        """Yield each task's result as it comes, taking tasks as workers become free.

        Raises what a task raises, BuildError when workers die or the cluster fails, DependencyError without it.
        """
        try:
            with self._connected():
                yield from self._run(tasks)
        except BrokenProcessPool as error:
            raise BuildError(
                "A worker process died, most likely for want of memory. What it had finished stands: "
                "run the same warmup again, with fewer --jobs."
            ) from error

    def _run(self, tasks: Iterator[Task]) -> Iterator[Any]:
        jobs = self.jobs or -1
        if self.backend == "loky":
            workers = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")
            yield from workers(joblib.delayed(function)(*arguments) for function, arguments in tasks)
            return
        # The other backends return nothing before everything is done: so they are given a round at a time.
        size = _ROUND * joblib.effective_n_jobs(jobs)
        while part := list(itertools.islice(tasks, size)):
            workers = joblib.Parallel(n_jobs=jobs, batch_size=1)
            yield from workers(joblib.delayed(function)(*arguments) for function, arguments in part)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Make joblib use the backend."""
        if self.backend == "loky":
            yield
            return
        with contextlib.ExitStack() as stack:
            try:
                if self.backend == "dask":
                    from distributed import Client

                    stack.enter_context(Client(self.scheduler))
                elif self.backend == "ray":
                    import ray
                    from ray.util.joblib import register_ray

                    ray.init(address=self.scheduler)
                    stack.callback(ray.shutdown)
                    register_ray()
                else:
                    from joblibspark import register_spark

                    register_spark()
            except ImportError as error:
                package = {"dask": "distributed", "ray": "ray", "spark": "joblibspark"}[self.backend]
                raise DependencyError(f"--backend {self.backend} needs `pip install {package}`: {error}") from error
            except (OSError, ConnectionError, ValueError) as error:
                raise BuildError(f"no {self.backend} scheduler at {self.scheduler}: {error}") from error
            with joblib.parallel_config(self.backend):
                yield
