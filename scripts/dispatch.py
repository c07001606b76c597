"""`python -m PACKAGE NAME …`: lists the commands of a package, its modules with a `main`, and runs one."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path


def dispatch(package: str, folder: Path) -> None:
    """Run the command that the command line names, and exit with its status."""
    commands = find_commands(folder)
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in commands.items())
    program = f"python -m {package}"
    parser = argparse.ArgumentParser(
        prog=program,
        description=f"Run one of these; `{program} NAME --help` lists its options.",
        epilog=f"commands:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=commands, metavar="NAME", help=", ".join(commands))
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="…", help="options of that command")
    arguments = parser.parse_args()
    sys.argv = [f"{program} {arguments.name}", *arguments.options]
    sys.exit(importlib.import_module(f"{package}.{arguments.name}").main())


def find_commands(folder: Path) -> dict[str, str]:
    """Return the modules of a folder that have a `main`, each with its docstring's first line."""
    found = {}
    for path in sorted(folder.glob("[!_]*.py")):
        tree = ast.parse(path.read_bytes())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found
