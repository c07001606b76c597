"""How a run went, when it is over."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tpucache.training.history import Row
from tpucache.training.idle import Pace

REPORT_NAME: Final = "report.json"


@dataclass(frozen=True)
class TrainReport:
    """Losses step by step, a row of metrics an epoch, the pace after the warm-up, and the most memory in use."""

    backend: str
    cores: int
    losses: Sequence[float]
    epochs: Sequence[Row]
    pace: Pace
    host_peak_bytes: int
    device_peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "advice": self.pace.advice()}

    def lines(self) -> list[str]:
        """Return the report as lines for people."""
        pace = self.pace
        ceiling = "not measured"
        if pace.ceiling_images_per_second is not None and pace.ceiling_idle is not None:
            ceiling = (
                f"{pace.ceiling_idle:.1%} against {pace.ceiling_images_per_second:,.0f} images/s on data already there"
            )
        memory = f"{self.host_peak_bytes / 1e6:,.0f} MB of the host's"
        if self.device_peak_bytes is not None:
            memory += f", {self.device_peak_bytes / 1e6:,.0f} MB of the fullest core's"
        return [
            *(_epoch_line(row) for row in self.epochs),
            f"backend    {self.backend}, {self.cores} core{'s' * (self.cores > 1)}",
            f"rate       {pace.images_per_second:,.0f} images/s",
            f"step       {pace.step_seconds * 1e3:.1f} ms, mean of {pace.steps}",
            f"waited     {pace.waited:.1%} of that time for data",
            f"idle       {pace.device_idle:.1%} by the device's own account; {ceiling}",
            f"compiles   {pace.compiles} after the warm-up",
            f"received   {pace.received_bytes / 1e6:,.0f} MB",
            f"memory     {memory}, at most",
            pace.advice(),
        ]


def host_peak_bytes() -> int:
    """Return the most memory this process had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _epoch_line(row: Row) -> str:
    shown = [
        f"{name.removeprefix('valid_')} {value:.4f}"
        for name, value in row.items()
        if name == "train_loss" or (name.startswith("valid_") and name != "valid_samples")
    ]
    return f"epoch {row['epoch']:>3}  {'  '.join(shown)}"
