"""What earlier commits wrote becomes what this version writes, and what this version wrote stays as it is."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from tpucache.store import earlier
from tpucache.version import __version__

OWN = {"digest": "d", "fingerprint": "f", "chunk": 5, "drawn": ""}
STATE = {"seed": 1, "epoch": 2, "position": 3, "samples": 4, "order": "block 9", "fingerprint": "f"}
CHECKPOINT = {"settings": {"lr": 0.1, "bf16": False}, "stand": {"steps": 3, "best": 0.5}, "learner": {}}
NEWEST: dict[str, Any] = {
    "settings": {"precision": "fp16", "bf16": False},
    "digests": {"training": "d", "validation": None},
    "stand": {"steps": 3, "best": None},
}


def test_the_release_that_ends_it_has_not_come() -> None:
    """Once it has, the file, its calls and its tests go."""
    ours, last = ([int(part) for part in version.split(".")[:2]] for version in (__version__, earlier.END))
    assert ours < last


def test_a_plan_gets_the_options_that_it_lacks() -> None:
    newest = {"labels": {"asked": "numbers"}, "asked": {"limit": 3}, "retry": True, "before": ""}
    assert earlier.plan(newest) == newest
    assert earlier.plan({"before": "x"}) == {"labels": {"asked": "auto"}, "asked": {}, "retry": False, "before": "x"}


def test_a_definition_of_code_gets_the_helpers_that_it_lacks() -> None:
    now = {"callable": "a:b", "source_sha256": "1", "helpers": {"c": "2"}}
    assert earlier.code_definition({"callable": "a:b", "source_sha256": "0"}, now) == {**now, "source_sha256": "0"}
    own = {"callable": "a:b", "source_sha256": "0", "helpers": {"c": "3"}}
    assert earlier.code_definition(own, now) == own
    alone = {"callable": "a:b", "source_sha256": "1"}
    assert earlier.code_definition(alone, alone) == alone


def test_a_loader_state_gets_the_digest_and_the_chunk_that_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    assert earlier.loader_state({**STATE, **OWN}, {}, 0) == {**STATE, **OWN}
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "tpucache"):
        assert earlier.loader_state(STATE, OWN, 1 << 20) == {**STATE, "digest": "d", "chunk": 8, "drawn": ""}
    assert "could not be compared" in caplog.text
    assert earlier.loader_state(STATE, OWN, 9 << 20)["chunk"] == earlier.loader_state(STATE, OWN, 0)["chunk"] >> 23 == 1
    assert earlier.loader_state(STATE, {**OWN, "chunk": 0}, 1 << 20)["chunk"] == 0


def test_a_loader_state_of_another_cache_has_another_digest() -> None:
    assert "fingerprint g" in earlier.loader_state({**STATE, "fingerprint": "g"}, OWN, 1)["digest"]
    assert "fingerprint None" in earlier.loader_state({}, OWN, 1)["digest"]


def test_a_checkpoint_gets_what_it_lacks() -> None:
    assert earlier.checkpoint(NEWEST) == NEWEST
    found = earlier.checkpoint(CHECKPOINT)
    assert found == {
        **CHECKPOINT,
        "digests": {},
        "settings": {"lr": 0.1, "bf16": False, "precision": "float32"},
    }
    half = earlier.checkpoint({"settings": {"bf16": True}, "model": {}})
    assert half == {"settings": {"bf16": True, "precision": "bf16"}, "model": {}, "digests": {}}
    best = earlier.checkpoint({**CHECKPOINT, "stand": {"steps": 3, "best": math.nan}})
    assert best["stand"] == {"steps": 3, "best": None}
    assert earlier.checkpoint({**NEWEST, "stand": "nothing that a run writes"})["stand"] == "nothing that a run writes"


@pytest.mark.parametrize(("sizes", "is_other"), [([2, 1], False), ([1, 2], True), ([3], True)])
def test_groups_of_other_sizes_are_those_in_which_all_weights_decay(sizes: list[int], is_other: bool) -> None:
    assert earlier.decays_all({"param_groups": [{"params": [0, 1]}, {"params": [2]}]}, sizes) is is_other


def test_the_backend_is_called_torch() -> None:
    assert [earlier.backend(name) for name in ("eager", "torch", "xla", "other")] == ["torch", "torch", "xla", "other"]
    assert earlier.report({"backend": "eager", "cores": 1}) == {"backend": "torch", "cores": 1}
