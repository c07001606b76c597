"""A contender's end of a benchmark: answers commands on stdin by JSON on stdout. Needs the standard library alone.

Run as `python -m scripts.bench.peers.MODULE ROLE SETTING`, with the setting as JSON. Each line of stdin is a command
and its argument, each line of stdout the answer to one. What a library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Setting = dict[str, Any]
Commands = Mapping[str, Callable[[str], dict[str, Any]]]
#: Prepares what users pay for once, and returns the commands by name.
Role = Callable[[Setting], Commands]


def serve(**roles: Role) -> None:
    """Be a contender in the role that the command line names."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    commands = roles[sys.argv[1]](json.loads(sys.argv[2]))
    for line in sys.stdin:
        name, _, argument = line.rstrip("\n").partition(" ")
        print(json.dumps(commands[name](argument)), file=answers)
