"""Training on the hosts of a pod, one process each, is training on the cores of one host."""

from __future__ import annotations

import csv
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hosts
import numpy as np
import pytest
import torch
from once import once
from running import last_of
from thorough import thorough
from torch.distributed import TCPStore

pytestmark = [pytest.mark.slow, pytest.mark.xla]

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def start(cache, python, tmp_path_factory):
    """The function `start(what)`: what one host with two cores wrote, if asked, and two hosts with a core each did."""

    def make(what, folder):
        for name in ("alone", "pod"):
            (folder / name).mkdir()
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = str(store.port)
        del store  # free for the hosts: the first one listens there

        def start(name, host):
            meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            words = [HERE / "hosts.py", what[name], cache, folder / name]
            done = python(*words, devices=2, HOST=host, **meeting)
            assert done.returncode == 0, done.stderr
            (folder / name / f"host-{host}.err").write_text(done.stderr)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(start, ["pod", "pod", "alone"] if "alone" in what else ["pod", "pod"], "010"))

    def started(what):
        folder = once(tmp_path_factory, f"hosts-{what['pod']}", lambda folder: make(what, folder))
        return folder / "alone", folder / "pod"

    return started


@pytest.fixture(scope="module")
def short(start, cache, tmp_path_factory):
    """What two hosts did in one run, and this process on plain torch, which takes less time than another two cores."""
    alone, pod = start({"pod": "short"})
    run = tmp_path_factory.mktemp("plain") / "run"
    (alone / "host-0.json").write_text(json.dumps({"mixed": hosts.learn(cache, run, hosts.MIXED, 1, "torch")}))
    return alone, pod


@pytest.fixture(scope="module")
def folders(start):
    """What they did in several runs, where one is stopped and continued, and in predictions."""
    return start({"alone": "alone", "pod": "host"})


def results(folder, host=0):
    """Return what a host has found."""
    return json.loads((folder / f"host-{host}.json").read_text())


def rows(path):
    """Return the rows of a table as dicts of text."""
    with path.open() as file:
        return [*csv.DictReader(file)]


@pytest.mark.parametrize("name", ["mixed", *thorough("plain", "dropping")])
def test_losses_and_metrics_of_two_hosts_are_those_of_one(request, name):
    alone, pod = request.getfixturevalue("short" if name == "mixed" else "folders")
    expected = results(alone)[name]
    for host in (0, 1):
        found = results(pod, host)[name]
        np.testing.assert_allclose(found["losses"], expected["losses"], atol=1e-5)
        for row, known in zip(found["epochs"], expected["epochs"], strict=True):
            assert row == pytest.approx(known, abs=1e-5)
        assert found["processes"] == 2
        assert found["cores"] == 1
        assert found["pace"]["compiles"] == 0


@pytest.mark.parametrize(("runs", "counts"), [("short", {1, 4}), *thorough(("folders", {1, 4, 8}))])
def test_each_host_sends_its_rows_alone(request, runs, counts):
    _, pod = request.getfixturevalue(runs)
    for host in (0, 1):  # one row finds out which cores are whose, and half of a part or of a batch are the others
        assert {len(np.load(path)) for path in (pod / "sent").glob(f"*-{host}.npy")} == counts


@pytest.mark.thorough
def test_all_hosts_run_the_same_programs(folders):
    first, second = (results(folders[1], host)["programs"] for host in (0, 1))
    assert first == second
    assert min(first) > 10


@pytest.mark.thorough
def test_a_signal_to_one_host_stops_all_and_the_run_continues_to_the_same_weights(folders):
    for host in (0, 1):
        found = results(folders[1], host)
        assert (found["stopped"], found["resumed"]) == (3, 0)
    one, two = (last_of(folder / "stopped")["learner"]["model"] for folder in folders)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=1e-5, rtol=0)


@pytest.mark.thorough
def test_predictions_of_all_hosts_are_written_by_the_first(folders):
    assert [results(folders[1], host)["predicted"] for host in (0, 1)] == [0, 0]
    one, two = (rows(folder / "predictions.csv") for folder in folders)
    assert len(one) == len(two) == 150
    for known, found in zip(one, two, strict=True):
        assert found["path"] == known["path"]
        for name in ("ant", "bee", "cat", "dog"):
            assert float(found[name]) == pytest.approx(float(known[name]), abs=1e-5)


@pytest.mark.parametrize("host", [0, 1])
def test_what_several_hosts_cannot_do_is_refused_on_each(short, host):
    found = results(short[1], host)
    assert found["two_cores"].startswith("cores is all: this machine has 1 (CPU), not 2")
    assert "each host of a pod evaluates only its own rows of a batch" in found["own_loss"]
