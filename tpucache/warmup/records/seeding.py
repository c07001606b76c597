"""The generators that a process shares, which custom augmentations may draw from: seeded for a call, then put back."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np

#: Libraries with a generator of their own; none is imported here.
_LIBRARIES: Final = ("cv2", "torch")
_lock: Final = threading.RLock()  # a Dask worker has several threads, and they share these generators


def loaded_generators() -> tuple[str, ...]:
    """Name the libraries with a generator of their own that are imported by now."""
    return tuple(name for name in _LIBRARIES if name in sys.modules)


@contextlib.contextmanager
def seeded_generators(entropy: np.random.SeedSequence) -> Iterator[None]:
    """Seed the shared generators of `random` and NumPy, and of OpenCV and torch where they are imported.

    One thread at a time runs inside. All but OpenCV's, whose state cannot be read, are put back as they were.
    """
    words = entropy.generate_state(8)
    seed = int.from_bytes(words.tobytes(), "little")
    with _lock, contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state(legacy=False))
        random.seed(seed)
        np.random.seed(words)
        if "cv2" in sys.modules:
            sys.modules["cv2"].setRNGSeed(int(words[0] >> 1))
        if "torch" in sys.modules:
            generator = sys.modules["torch"].default_generator
            stack.callback(generator.set_state, generator.get_state())
            generator.manual_seed(seed % 2**63)
        yield
