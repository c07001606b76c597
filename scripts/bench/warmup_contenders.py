"""Whom the warmup benchmark compares, and what the comparisons should come to."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from scripts.bench.read_contenders import FFCV
from scripts.bench.rounds import Contender, spread
from scripts.environments import Environment

_PYVIPS: Final = Environment("pyvips", (("pyvips==3.2.0", "pyvips-binary==8.18.7"),))
_CAMERA_PIXELS: Final = 1e6  # an image of more is one as cameras make them


@dataclass(frozen=True)
class Builder(Contender):
    """One way of doing it. `fresh` is a new process each turn, which does its work twice; `strict` may refuse files."""

    fresh: bool = False
    strict: bool = False

    @property
    def variants(self) -> int:
        """How many records it writes in addition to each clean one."""
        return int(self.settings[0]["variants"])


@dataclass(frozen=True)
class Turn:
    """Images a second: of all that a turn takes, and of its work once the processes are alive."""

    whole: float
    steady: float


Turns = Mapping[str, Sequence[Turn]]  # by contender, a turn each round


@dataclass(frozen=True)
class Ratio:
    """A comparison, and what it should come to; `camera`: with photographs as cameras make them."""

    name: str
    above: Builder
    below: Builder
    goal: float | None = None
    camera: bool = False
    by_records: bool = False

    def of(self, turns: Turns, figure: str) -> float | None:
        """Return the median over the rounds, or None where one of the two is left out."""
        above, below = turns.get(self.above.name), turns.get(self.below.name)
        if not above or not below:
            return None
        records = (1 + self.above.variants) / (1 + self.below.variants) if self.by_records else 1.0
        pairs = zip(above, below, strict=True)
        return records * float(statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in pairs))


def contest(jobs: int) -> tuple[list[Builder], list[Ratio]]:
    """Return who takes part, and what is compared."""

    def way(
        name: str,
        module: str,
        jobs: int = jobs,
        variants: int = 0,
        environment: Environment | None = None,
        fresh: bool = False,
        strict: bool = False,
    ) -> Builder:
        settings = ({"jobs": jobs, "variants": variants},)
        return Builder(name, f"warmup.{module}", settings, environment, fresh, strict)

    def ours(name: str, jobs: int, variants: int = 0) -> Builder:
        return way(f"tpucache, {name}", "tpucache", jobs, variants, fresh=True)

    seed = way("seed", "seed", 1)
    ffcv = way("FFCV's writer", "ffcv", environment=FFCV)
    pyvips = way("pyvips alone", "pyvips", environment=_PYVIPS, strict=True)
    pillow = way("Pillow alone", "pillow")
    alone = way("presize alone", "presize")
    single, full = ours("1 job", 1), ours(f"{jobs} jobs", jobs)
    one, eight = ours(f"{jobs} jobs, 1 variant", jobs, 1), ours(f"{jobs} jobs, 8 variants", jobs, 8)
    return [seed, ffcv, pyvips, pillow, alone, single, full, one, eight], [
        Ratio(f"{jobs} jobs / seed", full, seed, 8.0, camera=True),
        Ratio(f"{jobs} jobs / FFCV's writer", full, ffcv, 3.0, camera=True),
        Ratio(f"{jobs} jobs / pyvips alone", full, pyvips, 1.0),
        Ratio(f"{jobs} jobs / Pillow alone", full, pillow, 0.85),
        Ratio(f"{jobs} jobs / presize alone", full, alone, 0.85),
        Ratio(f"{jobs} jobs / 1 job", full, single, 1.85 if jobs == 2 else None),
        Ratio("8 variants / 1, images", eight, one),
        Ratio("8 variants / 1, records", eight, one, by_records=True),
    ]


def summarise(contender: Builder, count: int, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return a contender's figures; `count` is how many photographs a turn took."""
    whole = spread([turn.whole for turn in turns])
    return {
        "name": contender.name,
        "images_per_turn": count,
        "images_per_second": whole["median"],
        "min": whole["min"],
        "max": whole["max"],
        "steady": statistics.median(turn.steady for turn in turns),
        "records_per_second": whole["median"] * (1 + contender.variants),
        "turns": [dataclasses.asdict(turn) for turn in turns],
    }


def compare(ratio: Ratio, turns: Turns, pixels: float) -> dict[str, Any]:
    """Return a comparison's figures, with its goal where photographs of so many pixels have one."""
    goal = ratio.goal if pixels >= _CAMERA_PIXELS or not ratio.camera else None
    return {"name": ratio.name, "whole": ratio.of(turns, "whole"), "steady": ratio.of(turns, "steady"), "goal": goal}
