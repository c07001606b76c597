"""Changes to bytes, text and JSON values, as random numbers say."""

from __future__ import annotations

import copy
import random
from typing import Any, Final

#: Limits of the types that numbers are read into.
_INTEGERS: Final = (0, 7, *(1 << bits for bits in (7, 8, 16, 31, 32, 53, 63, 64)))
_WORDS: Final = (
    "True", "None", "-1", "0", "1e999", "nan", "99999999999999999999", "\x1b[2J", "\u202e", "\0", "/etc/passwd",
    "../..", "'", "(", ")", "{", "}", "[", "]", ",", "O", "|O", ">f8", "<U9", "V8", "é", " ", "\n", "\udcff",
    "a" * 300, "",
)  # fmt: skip
_VALUES: Final[list[Any]] = [None, True, 0, -1, 0.5, 1e308, float("nan"), "", "x", "\x1b]0;x\x07", [], {}, [[]], [None]]


def odd_integer(draws: random.Random) -> int:
    """Return a whole number that is likely to be at some limit."""
    value = draws.choice(_INTEGERS) + draws.choice((0, -1, 1))
    return value if draws.random() < 0.8 else draws.getrandbits(draws.choice((8, 16, 32, 64)))


def mutate_bytes(data: bytes, draws: random.Random) -> bytes:
    """Return bytes of which some are flipped, replaced, cut out, repeated or moved."""
    changed = bytearray(data)
    for _ in range(draws.choice((1, 1, 1, 2, 4, 16))):
        at = draws.randrange(len(changed) + 1)
        length = draws.choice((1, 1, 2, 4, 8, 64))
        way = draws.randrange(6)
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << draws.randrange(8)
        elif way == 1:
            changed[at : at + length] = draws.randbytes(length)
        elif way == 2:
            del changed[at : at + length]
        elif way == 3:
            changed[at:at] = changed[at : at + length] * draws.choice((1, 2, 100))
        elif way == 4:
            size = draws.choice((2, 4, 8))
            order: Any = draws.choice(("little", "big"))
            changed[at : at + size] = (odd_integer(draws) % 2 ** (8 * size)).to_bytes(size, order)
        else:
            del changed[at:]
        if not changed:
            break
    return bytes(changed)


def mutate_text(text: str, draws: random.Random) -> str:
    """Return text with a number, a letter or a word of it replaced."""
    for _ in range(draws.choice((1, 1, 2))):
        at = draws.randrange(len(text) + 1)
        numbers = [place for place, letter in enumerate(text) if letter.isdigit()]
        if numbers and draws.random() < 0.4:
            at = draws.choice(numbers)
            word = draws.choice((str(odd_integer(draws)), "True", "1.0", "1_0", "0x1", "-1", "1, 1"))
        else:
            word = draws.choice(_WORDS)
        text = text[:at] + word + text[at + draws.choice((0, 1, 1, 5)) :]
    return text


def mutate_json(value: Any, draws: random.Random) -> Any:
    """Return a JSON value of which one part is another one, missing, there twice, or nested deeply."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return draws.choice(_VALUES)
    holder, key = draws.choice(places)
    way = draws.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(draws.choice(holder)))
    elif way == 2:
        other, name = draws.choice(places)
        holder[key] = copy.deepcopy(other[name])
    elif way == 3 and isinstance(holder[key], str):
        holder[key] = mutate_text(holder[key], draws)
    elif way == 4 and isinstance(holder[key], (int, float)):
        holder[key] = draws.choice((odd_integer(draws), float(odd_integer(draws)), str(holder[key])))
    else:
        holder[key] = copy.deepcopy(draws.choice(_VALUES))
        for _ in range(draws.choice((0, 0, 40))):
            holder[key] = [holder[key]]
    return value


def _places(value: Any) -> Any:
    """Yield each list or object inside of a value, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)
