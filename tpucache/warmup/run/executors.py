"""Executor: runs tasks in this process, in worker processes on this machine, or on a cluster of Dask or Ray.

Clusters are not used through joblib: with joblib 1.6, a run waits for ever if a worker dies.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing.resource_tracker
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tpucache import process
from tpucache.errors import BuildError, DependencyError, TpucacheError, calling
from tpucache.warmup.build_options import WorkerOptions

Task = tuple[Callable[..., Any], tuple[Any, ...]]

#: Tasks that are submitted for each worker of Dask or Ray, and each forked one. So none waits for its next task.
_AHEAD: Final = 2
_PATIENCE_SECONDS: Final = 60
_WATCH_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 5.0
#: If there are few tasks, this process runs them itself for this time before it starts workers, which takes as long.
ALONE_SECONDS: Final = 0.5


@dataclass(frozen=True)
class _Place:
    """The process that started a run, its working directory, and its `sys.path`."""

    process: int
    folder: Path | None
    modules: tuple[str, ...]

    @classmethod
    def here(cls) -> _Place:
        try:
            folder: Path | None = Path.cwd()
        except FileNotFoundError:  # it was removed
            folder = None
        return cls(os.getpid(), folder, tuple(sys.path))

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if os.getpid() != self.process:
            _end_with(self.process)
            if self.folder is not None:
                os.chdir(self.folder)
            sys.path[:] = self.modules
        return function(*arguments)


class _Pickled:
    """A function that counts how many times it was pickled: once for each task that is sent to a worker."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.times = function, 0

    def __reduce__(self) -> tuple[Any, ...]:
        self.times += 1  # only one thread pickles: the one that sends tasks
        return functools.partial, (self.function,)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def wait_for(self, tasks: Callable[[], int]) -> None:
        """If the run ended earlier, a thread of joblib would print a KeyError."""
        until = time.monotonic() + _SETTLE_SECONDS
        while self.times < tasks() and time.monotonic() < until:
            time.sleep(0.001)


class Executor(WorkerOptions):
    """Runs tasks with the workers that its options describe."""

    @property
    def is_cluster(self) -> bool:
        """Whether tasks run on other machines, and so must sync the files that they write."""
        return self.backend != "loky"

    @property
    def workers(self) -> int:
        """The number of worker processes on this machine: `jobs`, or the number of cores that this process may use."""
        if self.jobs is not None:
            return self.jobs
        import joblib

        with calling("joblib"):
            return int(joblib.cpu_count())

    def run(self, tasks: Iterator[Task], few: bool = False) -> Iterator[Any]:
        """Yield the results of tasks, in the order in which they finish.

        A task is taken from the iterator when a worker is free. `few` says that there may be only a few tasks: this
        process then runs tasks itself for half a second, and starts workers only if tasks are left. A cluster ignores
        `few`.

        Raises the error of a task, BuildError when workers die or the cluster fails, DependencyError if the library of
        the cluster is missing.
        """
        if self.backend == "loky":
            if few or self.jobs == 1:
                yield from _run_here(tasks, None if self.jobs == 1 else ALONE_SECONDS)
            for task in tasks:  # start workers only if a task is left
                yield from self._run_local(itertools.chain([task], tasks))
            return
        try:
            yield from self._run_dask(tasks) if self.backend == "dask" else self._run_ray(tasks)
        except TpucacheError:
            raise
        except Exception as error:  # a cluster's library may raise any error
            raise BuildError(
                f"the {self.backend} cluster failed: {type(error).__name__}: {error}. Finished work is kept: "
                "repair the cluster and run the same command again."
            ) from error

    def _run_local(self, tasks: Iterator[Task]) -> Iterator[Any]:
        import joblib
        from joblib.externals.loky.backend import resource_tracker as loky_tracker

        with calling("joblib"):
            workers = joblib.Parallel(n_jobs=self.jobs or -1, batch_size=1, return_as="generator_unordered")
        run, is_over = _Pickled(_Place.here().run), threading.Event()
        given = itertools.takewhile(lambda _: not is_over.is_set(), tasks)
        for tracker in (multiprocessing.resource_tracker, loky_tracker):  # starting one later would unblock signals
            tracker.ensure_running()
        results = process.start_processes(
            lambda: workers(joblib.delayed(run)(function, arguments) for function, arguments in given)
        )
        try:
            for result in results:
                try:
                    yield result
                except GeneratorExit:
                    is_over.set()
                    run.wait_for(lambda: workers.n_dispatched_tasks)
                    raise
        except pickle.PicklingError as error:
            raise _unsendable(error) from error
        except BrokenProcessPool as error:
            raise _worker_died() from error
        finally:
            with warnings.catch_warnings():  # joblib warns of unfinished tasks; the next run will do them
                warnings.simplefilter("ignore", UserWarning)
                results.close()

    def _run_dask(self, tasks: Iterator[Task]) -> Iterator[Any]:
        with self._reaching_cluster():
            from distributed import Client, as_completed

            client = Client(self.scheduler)
        with client:
            client.wait_for_workers(1, timeout=_PATIENCE_SECONDS)
            submitted = (client.submit(function, *arguments, pure=False) for function, arguments in tasks)
            running = as_completed(itertools.islice(submitted, self._most_of(sum(client.ncores().values()))))
            for future in running:
                yield future.result()
                most = self._most_of(sum(client.ncores().values()))  # the number of workers may change
                running.update(itertools.islice(submitted, max(1, most - running.count())))

    def _most_of(self, cores: int) -> int:
        """Return how many tasks to submit to a cluster at once: at most `jobs`, as it may run all of them."""
        return self.jobs or _AHEAD * cores

    def _run_ray(self, tasks: Iterator[Task]) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            with self._reaching_cluster():
                import ray

                if not ray.is_initialized():
                    before = signal.getsignal(signal.SIGTERM)
                    ray.init(address=self.scheduler)
                    stack.callback(ray.shutdown)
                    if before is not None and threading.current_thread() is threading.main_thread():
                        signal.signal(signal.SIGTERM, before)  # Ray's handler would exit with another status
            most = self._most_of(int(ray.cluster_resources().get("CPU", 1)))
            submit = ray.remote(_outcome).remote
            submitted = (submit(function, arguments) for function, arguments in tasks)
            running = list(itertools.islice(submitted, most))
            while running:
                done, running = ray.wait(running)
                yield from map(_result, ray.get(done))
                running += itertools.islice(submitted, len(done))

    @contextlib.contextmanager
    def _reaching_cluster(self) -> Iterator[None]:
        try:
            yield
        except ImportError as error:
            package = {"dask": "distributed", "ray": "ray"}[self.backend]
            raise DependencyError(f"--backend {self.backend} needs `pip install {package}`: {error}") from error
        except (OSError, ConnectionError, ValueError) as error:
            place = f" at {self.scheduler}" if self.scheduler else ""
            raise BuildError(f"no {self.backend} scheduler answers{place}: {error}") from error


class ForkedWorkers(Executor):
    """Runs tasks in processes that are forked from this one. They have its modules already, so they start at once.

    This process must not have threads yet, nor have run code of the user. The workers end with it.
    """

    def __init__(self, jobs: int, begin: Callable[[], None]) -> None:
        """Each worker calls `begin` first, to close files that it must not hold."""
        super().__init__(jobs=jobs)
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _begin_worker, (os.getpid(), begin))
        object.__setattr__(self, "_pool", pool)
        process.start_processes(lambda: pool.submit(int))  # the first task starts all workers

    def run(self, tasks: Iterator[Task], few: bool = False) -> Iterator[Any]:
        pool: ProcessPoolExecutor = vars(self)["_pool"]
        running: set[Future[Any]] = set()

        def submit() -> None:
            for task in itertools.islice(tasks, _AHEAD * self.workers - len(running)):
                running.add(pool.submit(_run_pickled, _pickled_task(task)))

        try:
            submit()
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    running.remove(future)
                    submit()  # the caller may take long with a result
                    yield future.result()
        except pickle.PicklingError as error:
            raise _unsendable(error) from error
        except BrokenProcessPool as error:
            raise _worker_died() from error
        finally:
            for future in running:
                future.cancel()

    def wait_for_end(self) -> None:
        """Wait until the thread that talks to the killed workers has ended: it may close a pipe to which Python's exit
        writes.
        """
        pool: ProcessPoolExecutor = vars(self)["_pool"]
        pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int, begin: Callable[[], None]) -> None:
    begin()
    _end_with(parent)


def _run_pickled(task: bytes) -> Any:
    function, arguments = pickle.loads(task)  # noqa: S301  # from the process that this one was forked from
    return function(*arguments)


def _pickled_task(task: Task) -> bytes:
    """Pickle a task. cloudpickle is imported only for tasks that need it, such as those with a notebook's classes."""
    try:
        return pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001  # pickle raises many kinds of errors; cloudpickle decides
        try:
            return to_pickle(task)
        except Exception as error:
            raise pickle.PicklingError(str(error)) from error


def _unsendable(error: pickle.PicklingError) -> BuildError:
    reason = str(error.__cause__ or error).strip('"\n').splitlines()[-1]  # without the traceback before it
    return BuildError(
        f"the work cannot be sent to other processes: {reason}. Keep paths in a source, not "
        "open files or locks, or build with --jobs 1"
    )


def _worker_died() -> BuildError:
    return BuildError(
        "A worker process died, most likely because memory was full. Finished work is kept: "
        "run the same command again, with fewer --jobs."
    )


def to_pickle(value: object) -> bytes:
    """Pickle a value as joblib does, including classes and functions that are defined in a notebook."""
    from joblib.externals.loky.cloudpickle_wrapper import dumps

    data: bytes = dumps(value)
    return data


@functools.cache
def _end_with(parent: int) -> None:
    """End this worker soon after its parent was killed. Otherwise it would live for five more minutes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


@dataclass(frozen=True)
class _Failure:
    """The error of a task. It is returned, because a cluster's library would raise another error in its place."""

    error: Exception


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001  # it is raised again where the run was started
        return _Failure(error)


def _result(outcome: Any) -> Any:
    if isinstance(outcome, _Failure):
        raise outcome.error
    return outcome


def _run_here(tasks: Iterator[Task], seconds: float | None) -> Iterator[Any]:
    began = time.monotonic()
    for function, arguments in tasks:
        yield function(*arguments)
        if seconds is not None and time.monotonic() - began > seconds:
            return
