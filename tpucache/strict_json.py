"""JSON that somebody else may have written: text that Python's own reader takes in more than one sense is refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

#: The largest number in a file that tpucache writes: they are of 32-bit floats, or means of some, which may be rounded
#: up. Larger ones could not be drawn or added up.
LARGEST: Final = 3.5e38


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says. Raises ValueError for text that is no JSON, nests too deeply, or repeats a key.

    RFC 8259 leaves open which value of a repeated key counts, so no reader can know what was meant.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these keys and values. Raises ValueError for a key that is there twice."""
    content = dict(pairs)
    if len(content) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice!r:.60} is there twice in one object: leave one of the two")
    return content
