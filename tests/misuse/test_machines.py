"""Odd but honest machines and files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lab import SECONDS
from refusals import assert_refused

import tpucache


def test_a_pipe_where_a_file_belongs(lab):
    os.mkfifo(lab.folder / "pipe")
    os.mkfifo(lab.copy(lab.shared.cache, "broken") / "gone")
    (lab.folder / "broken" / "samples.npz").unlink()
    (lab.folder / "broken" / "gone").rename(lab.folder / "broken" / "samples.npz")
    for option, status in (("--classes", 2), ("--boxes", 1), ("--mask-colours", 2)):
        done = lab.warmup(lab.shared.photos, "cache", option, "pipe")
        assert_refused(done, "pipe", status=status)
    assert_refused(lab.command("preview", "broken", "-o", "sheet.png"), "pipe")


def handles_signals(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.thorough
def test_a_signal_at_any_moment_is_one_line_and_status_three(lab):
    words = [sys.executable, "-m", "tpucache", "bench", str(lab.shared.cache), "--batch-size", "4"]
    environment = {**os.environ, "PYTHONPATH": str(Path(tpucache.__file__).parents[1])}

    def stop(number: int) -> tuple[int, int]:
        with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                while not handles_signals(process.pid) and process.poll() is None:
                    time.sleep(0.001)
                time.sleep(number * 0.5)
                process.send_signal(signal.SIGTERM if number % 2 else signal.SIGINT)
                said = process.communicate(timeout=SECONDS)[1]
            finally:
                process.kill()
        lines = [line for line in said.splitlines() if not line.startswith(b"bench: measuring")]
        return process.returncode, len(lines)

    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(stop, range(6)))
    assert {*ends} == {(3, 1)}


def coco(path: Path, **changes: Any) -> Path:
    images = [{"id": 1, "file_name": "ant/0000.png"}]
    annotations = [{"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 2]}]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "a"}], **changes}
    path.write_text(json.dumps(content))
    return path


def test_a_coco_file_that_is_odd(lab):
    box = [{"image_id": 1, "category_id": 1, "bbox": [1e300, 1, 2, 2]}]
    odd = [coco(lab.folder / "far.json", annotations=box)]
    odd.append(coco(lab.folder / "names.json", images=[{"id": 1, "file_name": "x" * 100_000}]))
    twice = coco(lab.folder / "twice.json")
    twice.write_text(twice.read_text().replace('"id": 1', '"id": 2, "id": 1', 1))
    for path in (*odd, twice):
        done = lab.warmup(lab.shared.photos, "cache", "--boxes", path, "--max-boxes", "2")
        message = assert_refused(done)
        assert len(message) < 1000
        assert " at 0x" not in message
        assert "Warning" not in done.err
