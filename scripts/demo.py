"""The whole way on real data: digits -> warmup -> verify -> read rate -> train -> who waited for whom."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.digits import write_digits

ROOT = Path("demo")


def tpucache(*arguments: str | Path) -> Any:
    """Run one command as a user would, and return its JSON report where it was asked for one."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ tpucache {' '.join(words)}", flush=True)
    as_json = "--json" in words
    command = [sys.executable, "-m", "tpucache", *words]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE if as_json else None, text=True)
    if done.returncode:
        sys.exit(f"demo: the command above failed with status {done.returncode}")
    return json.loads(done.stdout) if as_json else None


def main() -> None:
    started = time.perf_counter()
    shutil.rmtree(ROOT, ignore_errors=True)
    photos, cache, run, page = ROOT / "digits", ROOT / "cache", ROOT / "run", ROOT / "report.html"
    print(f"{write_digits(photos):,} scanned digits written to {photos}, a folder a class")
    backend = "xla" if importlib.util.find_spec("torch_xla") else "torch"
    if backend == "torch":
        print("torch_xla has no release for this machine: training on plain torch instead")
    os.environ.setdefault("PJRT_DEVICE", "CPU")

    tpucache("warmup", photos, cache, "--size", "32", "--variants", "4", "--augment", "affine")
    tpucache("verify", cache)
    held = tpucache("inspect", cache, "--json")
    read = tpucache("bench", cache, "--json")
    options = ["--model", "cnn", "--epochs=24", "--valid=0.2", "--augment", "shift=2"]
    trained = tpucache("train", cache, "--run", run, "--backend", backend, *options, "--json")
    tpucache("report", run, "-o", page)

    pace = trained["pace"]
    rows = [
        ("samples, augmented", f"{held['samples']:,}, each in {held['variants']} variants"),
        ("cache", f"{held['bytes'] / 1e6:,.1f} MB in {held['shards']} shards, verified"),
        ("read rate", f"{read['images_per_second']:,.0f} images/s"),
        (f"trained on {trained['backend']}", f"{pace['images_per_second']:,.0f} images/s"),
        ("compiles after warm-up", f"{pace['compiles']}"),
        ("validation accuracy", f"{trained['epochs'][-1]['valid_accuracy']:.3f}"),
        ("all of it took", f"{time.perf_counter() - started:.0f} s"),
        ("the device was idle", f"{pace['device_idle']:.1%} of the time while it trained"),
        ("look at it", f"{page}, in any browser"),
        ("next, your own images", f"{Path(sys.executable).parent / 'tpucache'} warmup YOUR_FOLDER cache --size 224"),
    ]
    print()
    for name, value in rows:
        print(f"  {name:<24}{value}")


if __name__ == "__main__":
    main()
