"""Kills a training run by SIGKILL at random steps, resumes it each time, and compares it with one that ran through.

    python -m scripts.checks resume CACHE --backend xla --cores 8 --kills 5

Every weight, averaged weight and loss has to be the same to the bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

OPTIONS = (
    "--batch-size 16 --epochs 2 --checkpoint-every 3 --valid 0.2 --optimizer adamw --lr 0.01 --ema 0.99 "
    "--flip --mixup 0.3 --resume"
)


def train(words: list[str], kill_at: int, log: Path) -> None:
    """Run the command in this process, a fork, which is killed before a step; -1: it runs through."""
    from tpucache.cli import main as run_command
    from tpucache.training.learn.learner import Learner

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    step = Learner.step

    def killed(self: Learner, batches: Any, rates: Any, number: int) -> Any:
        if number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batches, rates, number)

    Learner.step = killed  # type: ignore[method-assign]  # in this process, which ends with the run
    sys.exit(run_command(words))


def leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, f"{path}/{key}")]
    return [(path, tree)]


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--backend", choices=["eager", "xla"], default="xla")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(options.cores)}
    processes = multiprocessing.get_context("fork")  # so that torch is imported once

    def run(folder: Path, kill_at: int) -> None:
        words = ["train", options.cache, "--run", folder, "--backend", options.backend, "--cores", options.cores]
        words += ["--model", options.model, *OPTIONS.split()]
        log = folder.with_suffix(".log")
        process = processes.Process(target=train, args=(list(map(str, words)), kill_at, log))
        process.start()
        process.join()
        if process.exitcode != (0 if kill_at < 0 else -signal.SIGKILL):
            sys.exit(f"status {process.exitcode}: {log.read_text()[-2000:]}")

    with tempfile.TemporaryDirectory() as work:
        whole, killed = Path(work, "whole"), Path(work, "killed")
        run(whole, -1)
        before = torch.load(whole / "last.pt", weights_only=True)
        moments = sorted(random.Random(options.seed).sample(range(before["stand"]["steps"]), options.kills))
        for moment in moments:
            run(killed, moment)
        run(killed, -1)
        after = dict(leaves(torch.load(killed / "last.pt", weights_only=True)))
    differing = [
        name
        for name, value in leaves(before)
        if not (torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name])
    ]
    print(f"killed before steps {moments} of {before['stand']['steps']}, {options.backend}, {options.cores} cores")
    print(f"{len(after)} values, {len(differing)} differ{': ' if differing else ''}{', '.join(differing[:5])}")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
