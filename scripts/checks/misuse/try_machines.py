"""Odd but honest machines and files."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpucache
from scripts.checks.misuse.lab import Lab
from scripts.checks.misuse.outcome import Done, Outcome, Wrong, correct, equal, refused, refuses, succeeded, true
from scripts.checks.misuse.rows import row
from tpucache import CachedDataset, CachedLoader, UsageError, verify_cache

SECONDS = 60.0


def shell(lab: Lab, command: str, *words: object) -> Done:
    """Run a command in a process and a shell of its own; `{}` in `command` is where it stands. Wrong if it hangs."""
    line = command.format(shlex.join([sys.executable, "-m", "tpucache", *map(str, words)]))
    environment = {**os.environ, "PYTHONPATH": str(Path(tpucache.__file__).parents[1])}
    try:
        done = subprocess.run(
            ["bash", "-c", line], cwd=lab.folder, env=environment, capture_output=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise Wrong(f"hangs: {line}") from error
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


@row
def standard_files_that_are_closed(lab: Lab) -> Outcome:
    for number, closed in enumerate(("2>&-", ">&-", "<&-", "<&- >&- 2>&-", "2>/dev/full")):
        cache = lab.folder / f"cache{number}"
        succeeded(shell(lab, f"{{}} {closed}", "warmup", lab.shared.photos(), cache, "--size", "16", "--jobs", "2"))
        equal(f"damages after {closed}", verify_cache(cache), [])
    return correct("each cache is whole")


@row
def a_report_on_a_full_disk(lab: Lab) -> Outcome:
    for words in (["inspect", lab.shared.cache()], ["inspect", lab.shared.cache(), "--json"], ["train", "--help"]):
        outcome = refused(shell(lab, "{} > /dev/full", *words), "no space left")
    warmup = shell(lab, "{} > /dev/full", "warmup", lab.shared.photos(), "cache", "--size", "16", "--jobs", "1")
    refused(warmup, "no space left", "is kept")
    equal("damages", verify_cache(lab.folder / "cache"), [])
    return outcome


@row
def a_pipe_where_a_file_belongs(lab: Lab) -> Outcome:
    os.mkfifo(lab.folder / "pipe")
    os.mkfifo(lab.copy(lab.shared.cache(), "broken") / "gone")
    (lab.folder / "broken" / "samples.npz").unlink()
    (lab.folder / "broken" / "gone").rename(lab.folder / "broken" / "samples.npz")
    for option, status in (("--classes", 2), ("--boxes", 1), ("--mask-colours", 2)):
        done = shell(lab, "{}", "warmup", lab.shared.photos(), "cache", option, "pipe")
        outcome = refused(done, "pipe", status=status)
    refused(shell(lab, "{}", "preview", "broken", "-o", "sheet.png"), "pipe")
    return outcome


@row
def too_little_memory(lab: Lab) -> Outcome:
    for kilobytes in (30_000, 60_000, 100_000):
        done = shell(lab, f"ulimit -v {kilobytes}; {{}}", "inspect", lab.shared.cache())
        outcome = refused(done, "memory is short", "ulimit")
        equal("lines", len(done.err.splitlines()), 1)
    return outcome


def handles_signals(process: int) -> bool:
    """Return whether a process has come so far that it handles SIGTERM: Python itself has started."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


@row
def a_signal_at_any_moment(lab: Lab) -> Outcome:
    run = [sys.executable, "-m", "tpucache", "bench", str(lab.shared.cache()), "--batch-size", "4"]
    environment = {**os.environ, "PYTHONPATH": str(Path(tpucache.__file__).parents[1])}
    stopped = 0
    for number in range(12):
        began = subprocess.Popen(run, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while not handles_signals(began.pid) and began.poll() is None:
            time.sleep(0.001)
        time.sleep(number * 0.25)
        began.send_signal(signal.SIGTERM if number % 2 else signal.SIGINT)
        said = began.communicate(timeout=SECONDS)[1].decode().splitlines()
        if began.returncode == 0:
            continue
        equal(f"status after {number * 0.25:.2f} s ({said[-1:]})", began.returncode, 3)
        equal("lines", len(said), 1)
        stopped += 1
    return correct(f"one line and status 3, {stopped} times")


@row
def an_epoch_continued_in_a_forked_process(lab: Lab) -> Outcome:
    loader = CachedLoader(CachedDataset(lab.shared.cache()), 4)
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.2)  # the threads have read ahead, and wait
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            outcome = refuses(lambda: next(iterator), UsageError, "new iteration")
            text = outcome.text if len(list(loader)) == len(loader) else "another number of batches"
        except Wrong as wrong:
            text = f"wrong: {wrong}"
        os.write(writer, text.encode())
        os._exit(0)
    end = threading.Timer(20, os.kill, (child, signal.SIGKILL))
    end.start()
    os.waitpid(child, 0)
    end.cancel()
    os.close(writer)
    said = os.read(reader, 10_000).decode()
    if "begin a new iteration" not in said:
        raise Wrong(said or "the forked process hangs")
    return Outcome("refused", said)


@row
def weights_that_require_a_gradient(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    plain = torch.arange(1.0, len(dataset) + 1)
    loaders = [CachedLoader(dataset, 4, weights=each) for each in (plain, plain.clone().requires_grad_())]
    for one, other in zip(*loaders, strict=True):
        equal("images", one[0].numpy(), other[0].numpy())
    for wrong in (plain.to_sparse(), plain.to("meta"), plain.to(torch.complex64)):
        refuses(lambda weights=wrong: CachedLoader(dataset, 4, weights=weights), UsageError, "weights")
    return correct("they are their values")


def coco(path: Path, **changes: Any) -> Path:
    images = [{"id": 1, "file_name": "ant/0000.png"}]
    annotations = [{"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 2]}]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "a"}], **changes}
    path.write_text(json.dumps(content))
    return path


@row
def a_coco_file_that_is_odd(lab: Lab) -> Outcome:
    box = [{"image_id": 1, "category_id": 1, "bbox": [1e300, 1, 2, 2]}]
    odd = [coco(lab.folder / "far.json", annotations=box)]
    odd.append(coco(lab.folder / "names.json", images=[{"id": 1, "file_name": "x" * 100_000}]))
    twice = coco(lab.folder / "twice.json")
    twice.write_text(twice.read_text().replace('"id": 1', '"id": 2, "id": 1', 1))
    for path in (*odd, twice):
        done = lab.warmup(lab.shared.photos(), "cache", "--boxes", path, "--max-boxes", "2")
        outcome = refused(done)
        true("a short line without an address", len(outcome.text) < 1000 and " at 0x" not in outcome.text)
        true("no warning", "Warning" not in done.err)
    return outcome


@row
def a_json_key_that_is_there_twice(lab: Lab) -> Outcome:
    manifest = lab.copy(lab.shared.cache()) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("{", '{"samples": 1, ', 1))
    refused(lab.command("inspect", manifest.parent), "'samples' is there twice")
    augment = lab.folder / "augment.json"
    augment.write_text('{"transform": {}, "transform": {}}')
    done = lab.warmup(lab.shared.photos(), "cache", "--variants", "1", "--augment", augment)
    return refused(done, "'transform' is there twice")


@row
def numbers_in_parquet_that_are_no_classes(lab: Lab) -> Outcome:
    import pyarrow
    import pyarrow.parquet

    photo = next(lab.shared.photos().rglob("*.png")).read_bytes()
    for number in (-7, 2**62):
        table = pyarrow.table({"image": [{"bytes": photo, "path": "a.png"}] * 3, "label": [0, number, 1]})
        pyarrow.parquet.write_table(table, lab.folder / "a.parquet")
        outcome = refused(lab.warmup(lab.folder / "a.parquet", "cache"), f"the label {number}", "parquet#1")
        true("nothing was built", not (lab.folder / "cache").exists())
    return outcome


@row
def a_class_01_in_WebDataset(lab: Lab) -> Outcome:
    photo = next(lab.shared.photos().rglob("*.png"))
    names = ["01", "1", "02", "1"]
    with tarfile.open(lab.folder / "a.tar", "w") as archive:
        for number, name in enumerate(names):
            (lab.folder / "name").write_text(name)
            archive.add(photo, f"{number}.png")
            archive.add(lab.folder / "name", f"{number}.cls")
    succeeded(lab.warmup(lab.folder / "a.tar", "cache"))
    dataset = CachedDataset(lab.folder / "cache")
    equal("classes", dataset.classes, ("01", "02", "1"))
    equal("labels", dataset.labels.numpy(), np.array([0, 2, 1, 2]))
    return correct("01 and 1 are two classes, as in a table")
