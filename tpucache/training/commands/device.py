"""Options of commands that compute on a device: which device, and how many processes."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from tpucache import process, progress
from tpucache.cli.arguments import listed, positive
from tpucache.errors import UsageError

if TYPE_CHECKING:
    from tpucache.report.bench import BatchUpload
    from tpucache.training.device.choice import Choice


def add_device(command: argparse.ArgumentParser) -> None:
    """Add --backend, --device, --compile, --cores and --processes."""
    from tpucache.training.device import BACKENDS, BACKENDS_HELP, DEVICES
    from tpucache.training.device.choice import backend_of

    command.add_argument(
        "--backend",
        type=backend_of,
        choices=BACKENDS.names("auto"),
        metavar=listed(BACKENDS.names("auto")),
        default="auto",
        help=BACKENDS_HELP,
    )
    command.add_argument("--device", choices=DEVICES, default="auto", help="device of the backend torch")
    command.add_argument(
        "--compile", action="store_true", help="compile the model by torch.compile; for the backend torch"
    )
    command.add_argument("--cores", type=positive, metavar="N", help="number of cores: 1, or all, which is the default")
    command.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="use N processes of this host: one for each GPU, or several on a CPU; for the backend torch",
    )


def choose_backend(label: str, options: argparse.Namespace) -> str:
    """Replace the backend "auto" in the options by the best backend, print the choice, and return the reason for it."""
    from tpucache.training.device.choice import choose_backend as choose

    choice = choose(options.backend, options.device, compile=options.compile, processes=options.processes)
    options.backend = choice.backend
    _announce(label, choice)
    return choice.why


def _announce(label: str, choice: Choice) -> None:
    """Print a line on standard error that names the chosen backend, and says that torch is being imported.

    Importing torch takes seconds. Print nothing if the user named the backend and torch is imported already.
    """
    loading = f"loading torch{' and torch_xla' * (choice.backend == 'xla')}" if "torch" not in sys.modules else ""
    if (choice.why or loading) and os.environ.get("RANK", "0") == "0":  # torchrun sets RANK
        progress.note(f"{label}: {'; '.join(filter(None, (choice.line(), loading)))}")


def launched(options: argparse.Namespace) -> bool:
    """Run the whole command in several processes if --processes asks for that; return whether it has been run.

    Each of these processes calls this function, too, and gets False. Raises UsageError if --processes does not fit the
    other options, and the error of the first process that failed.
    """
    from tpucache.training.device.processes import is_launched

    if options.processes is None or process.launched() is not None:
        return False
    if is_launched():
        raise UsageError("torchrun has started several processes already: leave --processes out")
    if options.backend != "torch":
        raise UsageError(
            f"--processes is for the backend torch, and {options.backend} uses all cores of a host in one process: "
            "leave --processes out"
        )
    if options.processes == 1:
        return False
    from tpucache.training.device.launch import launch

    launch(options.arguments, options.processes, options.began)
    return True


def open_upload() -> tuple[BatchUpload, str]:
    """Return the way to send batches to this machine's accelerator, or else to XLA's CPU client, and its name.

    Raises UsageError if there is neither an accelerator nor torch_xla.
    """
    from tpucache.errors import DependencyError
    from tpucache.report.bench import BatchUpload
    from tpucache.training.device import open_device
    from tpucache.training.feed.upload import send

    device = open_device()
    place = device.name if device.name == "xla" else device.torch_device.type
    if place == "cpu":  # batches for torch on a CPU stay where they are
        try:
            device, place = open_device("xla"), "XLA's CPU client"
        except DependencyError as error:
            raise UsageError(
                "--upload needs an accelerator, or torch_xla, whose CPU client can stand in for one; this machine has "
                "neither: leave --upload out"
            ) from error

    def sent(batch: Any) -> object:
        found = send(batch, device)
        device.wait()
        return found

    where = f"{place}, {device.cores} cores" if device.cores > 1 else place
    return BatchUpload(sent, device.cores, device.pin_memory), where
