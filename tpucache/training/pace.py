"""Where the time of a run goes: its seconds by part, how long the device was idle and why, traces of a few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset
    from tpucache.training.feed import Feeder

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, get_args

from tpucache.training.device import Device
from tpucache.training.settings import TrainSettings

Part = Literal[
    "start_up", "staging", "range_test", "compiling", "steps", "waiting", "evaluation", "metrics", "checkpoints",
    "replay", "report",
]  # fmt: skip
PARTS: Final = get_args(Part)

_Clock = Callable[[], float]


class Account:
    """The seconds of each part of a run, added up over the processes that resumed it.

    Work that happens within other parts, such as compiling and waiting, has a counter of its own. Its seconds are
    subtracted from the part in which it was done.
    """

    def __init__(self, began: float | None = None, clock: _Clock = time.monotonic) -> None:
        """Begin with the part `start_up`, now or at the time `began` of the clock."""
        self._clock = clock
        self._began = self._since = clock() if began is None else began
        self._part: Part = "start_up"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._counters: dict[Part, tuple[_Clock, float]] = {}
        self._earlier: Mapping[str, float] | None = None
        self._earlier_wall = 0.0

    def take_out(self, part: Part, counter: _Clock) -> None:
        """Count the seconds of `counter` for `part` from now on, and not for the part in which the work is done."""
        self.begin(self._part)
        self._counters[part] = (counter, counter())

    def add_earlier(self, seconds: Mapping[str, float], wall: float) -> None:
        """Add the seconds of each part that earlier processes of the run spent, and their total `wall`."""
        if self._earlier is None:
            self._earlier, self._earlier_wall = dict(seconds), wall

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        before = self.begin(name)
        try:
            yield
        finally:
            self.begin(before)

    def begin(self, name: Part) -> Part:
        """Let the time from now on belong to the part `name`; return the part that was current before."""
        now = self._clock()
        spent = now - self._since
        for part, (counter, last) in self._counters.items():
            count = counter()
            self._seconds[part] += count - last
            spent -= count - last
            self._counters[part] = (counter, count)
        self._seconds[self._part] += spent
        self._since = now
        before, self._part = self._part, name
        return before

    def seconds(self) -> dict[str, float]:
        self.begin(self._part)
        earlier = self._earlier or {}
        return {name: earlier.get(name, 0.0) + spent for name, spent in self._seconds.items()}

    def wall_seconds(self) -> float:
        """Return the seconds of the run, earlier processes included, up to the last call of `begin` or `seconds`."""
        return self._earlier_wall + self._since - self._began


class Building:
    """Measures how long a run waits for a cache that is built while the run trains.

    For a finished cache it measures nothing. Only the time of steps counts, without evaluations and checkpoints.
    """

    def __init__(self, train_set: CachedDataset, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the training samples, before the first epoch; `clock` returns the time in seconds."""
        self._train_set, self._clock = train_set, clock
        self._is_needed = train_set.cache.is_growing
        self._is_over, self._is_new = False, True  # whether the cache is built; whether the epoch is new
        self._epochs = 0  # epochs during which the cache was built
        self._began: tuple[float, float] | None = None  # at `begin`: the clock, and the seconds waited before
        self._spent = [[0.0, 0.0], [0.0, 0.0]]  # [seconds, seconds waited], during the build and after it
        self._waited: Callable[[], float] = lambda: 0.0

    def begin(self, waited: Callable[[], float]) -> None:
        """Start the clock, as steps begin; `waited` returns the seconds that the loop has waited so far."""
        if not self._is_needed or self._began is not None:
            return
        self._waited, self._began = waited, (self._clock(), waited())
        if self._is_new and not self._is_over:
            self._is_over = self._train_set.is_finished and self._epochs > 0
            self._epochs += not self._is_over
        self._is_new = False

    def end(self) -> None:
        for at, spent in enumerate(self._so_far()):
            self._spent[self._is_over][at] += spent
        self._began = None

    def end_epoch(self) -> None:
        self._is_new = True

    @property
    def text(self) -> str:
        """The share of the cache that is built, and the share of the time spent waiting, for the progress bar."""
        if not self._is_needed or self._is_over:
            return ""
        seconds, waited = (sum(both) for both in zip(self._so_far(), self._spent[0], strict=True))
        return f"cache built {self._train_set.cache.built:.0%}, waited {waited / seconds if seconds > 0 else 0.0:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """Return the value of `Pace.built`; empty if the cache was finished before the run."""
        if not self._is_needed:
            return {}
        shares = [waited / seconds if seconds > 0 else None for seconds, waited in self._spent]
        is_finished = self._train_set.is_finished
        return {
            "cache": self._train_set.place,
            "bytes": self._train_set.manifest.total_bytes if is_finished else None,
            "epochs": self._epochs,
            "waited": shares[0] or 0.0,
            "later": shares[1],
        }

    def _so_far(self) -> tuple[float, float]:
        if self._began is None:
            return 0.0, 0.0
        return self._clock() - self._began[0], self._waited() - self._began[1]


#: Executions that may compile: the first, and also the second, if the first has changed shardings or optimizer state.
WARMUP_EXECUTIONS: Final = 2
#: Host batches that may still be queued when batches become row numbers on the device.
_MOST_QUEUED: Final = 4
#: A replay takes at most this many seconds, or as long as its fewest executions.
REPLAY_SECONDS: Final = 2.0
_REPLAYS: Final = 5
LEAST_REPLAYS: Final = 1 + _REPLAYS  # the first one is not measured
_MUCH: Final = 0.05  # a larger idle share leads to advice
_SHOWN_SECONDS: Final = 1.0  # the shown idle share is updated this often


@dataclass(frozen=True)
class Pace:
    """The speed of the steps after the warm-up.

    `device_idle` is the share of the steps' time in which the device ran nothing, by the backend's own times. `waited`
    and `ceiling_idle` hint at the reason. `waited` is the share in which the loop was blocked on data, even while the
    device still ran earlier steps. `ceiling_idle` is the share by which the rate is below that of the same steps
    repeated on batches that are on the device already (None if that was not measured).

    `compiles` counts the graphs that were compiled during these steps, `graphs` all graphs of the run, also those of
    the warm-up (None if the number is unknown). `sizes` has what was counted and measured for each image
    size, if there were several sizes.

    After the first epoch, the feeding thread sent `later_bytes_per_step` for each step's batch, and used the share
    `feeding_cpu` of a core's time (None if there was only one epoch). `resident` says whether records stay on the
    device, and why.

    `built` describes a cache that was built during the run, and is empty otherwise. It has the `cache`, its `bytes`
    (None until the cache is finished), the number of `epochs` during which it was built, the share of these epochs'
    time that the loop `waited` for data, and that share for all `later` epochs (None without later epochs).
    """

    steps: int
    images_per_second: float
    step_seconds: float
    waited: float
    device_idle: float
    compiles: int
    received_bytes: int
    ceiling_images_per_second: float | None = None
    ceiling_idle: float | None = None
    graphs: int | None = None
    sizes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    later_bytes_per_step: float | None = None
    feeding_cpu: float | None = None
    resident: str = ""
    built: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_ceiling(self, images_per_second: float) -> Pace:
        """Return the pace with the ceiling `images_per_second`: the rate of steps on batches that are on the device."""
        idle = max(0.0, 1 - self.images_per_second / images_per_second) if self.steps else None
        return replace(self, ceiling_images_per_second=images_per_second, ceiling_idle=idle)

    @staticmethod
    def slowest(paces: Sequence[Pace]) -> Pace:
        ceilings = [each.ceiling_images_per_second for each in paces if each.ceiling_images_per_second is not None]
        pace = replace(
            paces[0],
            images_per_second=min(each.images_per_second for each in paces),
            step_seconds=max(each.step_seconds for each in paces),
            waited=max(each.waited for each in paces),
            device_idle=max(each.device_idle for each in paces),
            compiles=max(each.compiles for each in paces),
            received_bytes=sum(each.received_bytes for each in paces),
        )
        return pace.with_ceiling(min(ceilings)) if ceilings else pace

    def advice(self, settings: TrainSettings | None = None, in_memory: bool = False) -> str:
        settings = settings or TrainSettings()
        if not self.steps:
            return "Too few steps to tell what limits the run: the first two, which may compile, do not count."
        if self.compiles:
            return (
                f"{self.compiles} graphs were compiled after the warm-up, so some shape or Python number changes from "
                "step to step: keep shapes static."
            )
        if self.device_idle > _MUCH and self.waited > self.device_idle / 2:
            remedies = "" if in_memory else "copy the cache to a faster disk (`tpucache fetch CACHE FOLDER`), "
            return (
                f"Data limits the run (the device has no data {self.device_idle:.0%} of the time): {remedies}give more "
                f"than {settings.threads} --threads."
            )
        if self.device_idle > _MUCH:
            more = 4 * settings.steps_per_execution
            return f"The host's work between steps limits the run: try --steps-per-execution {more}, or a larger batch."
        if (self.ceiling_idle or 0.0) > _MUCH:
            return (
                f"Steps take longer than on data that is already on the device ({self.ceiling_idle:.0%} of the time), "
                "though data is never late: reading, uploading or other programs share the CPU with the steps; try "
                "fewer --threads."
            )
        faster = "a smaller model" if settings.precision in ("bf16", "fp16") else "--precision bf16, a smaller model"
        return f"The device limits the run: data is never late, so only a faster step ({faster}) helps."


class PaceMeter:
    """Counts steps, and measures their time between `resume` and `pause`.

    The first two executions do not count, because graphs may compile in them. An execution is one call of the device,
    with one step or several.
    """

    def __init__(
        self,
        device: Device,
        feeder: Feeder,
        warmed: Callable[[], bool | None] = lambda: None,
        building: Building | None = None,
    ) -> None:
        """Measure a loop over the batches of `feeder`."""
        self._building = building
        self._device, self._feeder, self._warmed = device, feeder, warmed
        self._warm, self._is_warmed = WARMUP_EXECUTIONS, False
        self._from: Counter[str] | None = None  # the clock and the totals of device and feeder when it was started
        self._shown = -math.inf, 0.0  # the last value of `idle`: its time and the value
        self._compiles_before = device.counters().compiles
        self._compiles_at_warm: int | None = None
        self._compiles = 0  # after the warm-up, for the earlier image sizes
        self._at_epoch: tuple[int, float, int, float] | None = None  # at the end of the first epoch
        self._size: int | None = None
        self._awaited = 0  # executions, at most, before batches become row numbers on the device
        self._sizes: dict[int | None, Counter[str]] = {}  # what was counted, for each image size

    def step(self, steps: int, images: int) -> None:
        """Count an execution that was just sent, of `steps` steps with `images` images in all."""
        if self._awaited:
            self._awaited -= 1
            return
        if self._warm:
            self._warm -= 1
            if not self._warm:
                self._device.wait()
                if not self._is_warmed:
                    self._is_warmed = True
                    if self._warmed():
                        self._awaited, self._warm = _MOST_QUEUED, WARMUP_EXECUTIONS
                        return
                self._compiles_at_warm = self._device.counters().compiles
                self.resume(self._size)
            return
        self._count({"steps": steps, "images": images})

    def resume(self, size: int | None = None) -> None:
        """Wait for the device and start the clock, unless the next executions may compile graphs."""
        if self._building is not None:
            self._building.begin(lambda: self._feeder.waited_seconds)
        is_new, self._size = size != self._size, size
        if is_new and self._compiles_at_warm is not None:
            self._compiles += self._device.counters().compiles - self._compiles_at_warm
            self._compiles_at_warm, self._warm = None, WARMUP_EXECUTIONS
        if not self._warm:
            self._device.wait()  # otherwise an earlier execution would count as if it began now
            self._from = self._now()

    def expect_rows(self, has_rows: bool) -> None:
        if has_rows:
            self._awaited = 0

    def pause(self) -> None:
        self._device.wait()
        if self._building is not None:
            self._building.end()
        if self._from is not None:
            self._count(self._since(self._from))
            self._from = None

    def end_epoch(self) -> Pace:
        """Return the pace so far; call this after `pause`, when an epoch has ended."""
        if self._at_epoch is None:
            self._at_epoch = self._sent()
        if self._building is not None:
            self._building.end_epoch()
        return self.pace()

    def _sent(self) -> tuple[int, float, int, float]:
        total = self._total()
        return self._feeder.sent_bytes, self._feeder.cpu_seconds, total["steps"], total["seconds"]

    @property
    def idle(self) -> float:
        """Read this just after an execution was sent: the one that is running has then only begun."""
        now = time.perf_counter()
        if self._from is not None and now >= self._shown[0] + _SHOWN_SECONDS:
            total = self._total()
            total.update(self._since(self._from))
            self._shown = now, _idle(total)
        return self._shown[1]

    def pace(self) -> Pace:
        since, compiles, total = self._compiles_at_warm, self._device.counters().compiles, self._total()
        counted, seconds = total["steps"], total["seconds"]
        sent, cpu, steps, taken = (
            now - then for now, then in zip(self._sent(), self._at_epoch or self._sent(), strict=True)
        )
        return Pace(
            steps=counted,
            images_per_second=total["images"] / seconds if seconds else 0.0,
            step_seconds=seconds / counted if counted else 0.0,
            waited=total["waited"] / seconds if seconds else 0.0,
            device_idle=_idle(total),
            compiles=self._compiles + (0 if since is None else compiles - since),
            received_bytes=total["received_bytes"],
            graphs=compiles - self._compiles_before,
            built={} if self._building is None else self._building.to_dict(),
            sizes={str(size): dict(each) for size, each in self._sizes.items()} if len(self._sizes) > 1 else {},
            later_bytes_per_step=sent / steps if steps else None,
            feeding_cpu=cpu / taken if steps else None,
        )

    def _count(self, counts: Mapping[str, float]) -> None:
        self._sizes.setdefault(self._size, Counter()).update(counts)

    def _total(self) -> Counter[str]:
        return sum(self._sizes.values(), Counter())

    def _now(self) -> Counter[str]:
        counters, waited = self._device.counters(), self._feeder.waited_seconds
        found = (time.perf_counter(), waited, counters.execute_seconds, counters.received_bytes)
        return Counter(dict(zip(("seconds", "waited", "executing", "received_bytes"), found, strict=True)))

    def _since(self, start: Counter[str]) -> Counter[str]:
        now = self._now()
        now.subtract(start)
        return now


def _idle(total: Counter[str]) -> float:
    return max(0.0, 1 - total["executing"] / total["seconds"]) if total["seconds"] else 0.0


def ceiling(execute: Callable[[], None], device: Device, images: int, seconds: float = REPLAY_SECONDS) -> float:
    execute()
    device.wait()
    began, done = time.perf_counter(), 0
    limit = min(seconds, REPLAY_SECONDS)
    # All processes agree on the number of repetitions.
    while device.processes.largest(done < _REPLAYS or time.perf_counter() - began < limit):
        execute()
        done += 1
    device.wait()
    return done * images / (time.perf_counter() - began)


_log = logging.getLogger("tpucache")
