"""The size of the project by folder, beside the ceilings of tests/budget.toml.

    python -m scripts.checks budget            # print the table; exit with 1 if something is above its ceiling
    python -m scripts.checks budget --lower    # bring the ceilings down to what is there now

Tokens are Python's, without comments, docstrings and layout. A ceiling is raised only by hand, with a page in
docs/decisions that names what left for it.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from scripts.commands import make_parser

ROOT: Final = Path(__file__).parents[2]
FILE: Final = ROOT / "tests" / "budget.toml"

_LAYOUT: Final = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
_KEYWORDS: Final = 12  # what a public constructor may take without a line in the budget

#: What each mechanism is called in code, as "module" (imported anywhere in a file) or "module.name" (used in it).
_MECHANISMS: Final[Mapping[str, tuple[str, ...]]] = {
    "locks of files": ("fcntl",),
    "threads": ("threading.Thread", "concurrent.futures"),
    "pauses": ("time.sleep",),
    "ctypes": ("ctypes",),
    "fork hooks": ("os.register_at_fork",),
}

_NAMED_TUPLE: Final = ("_replace", "_asdict", "_fields", "_make")


class Source:
    """A file of Python, parsed once. `name` is its path below the project's folder."""

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self.name = path.relative_to(root).as_posix()
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.nodes = [*ast.walk(self.tree)]
        self.docstrings = [*_docstrings(self.nodes)]

    @property
    def folder(self) -> str:
        """The folder of the budget that this file counts for."""
        parts = self.name.split("/")
        return parts[0] if parts[0] != "tpucache" or len(parts) == 2 else "/".join(parts[:2])

    def tokens(self) -> int:
        """Return the number of tokens."""
        starts = {(each.lineno, each.col_offset) for each in self.docstrings}
        found = _whole_strings(tokenize.generate_tokens(io.StringIO(self.text).readline))
        return sum(each.type not in _LAYOUT and each.start not in starts for each in found)

    def words(self) -> int:
        """Return the number of words in docstrings."""
        return sum(len(str(each.value).split()) for each in self.docstrings)

    @cached_property
    def imported(self) -> dict[str, str]:
        """Return what each imported name stands for, dotted."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names |= {each.asname or each.name.partition(".")[0]: each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        return names

    def uses(self, what: str) -> bool:
        """Return whether the file imports a module, or uses a name of a module."""
        imported = self.imported
        if any(f".{what}." in f".{each}." for each in imported.values()):
            return True
        module, _, name = what.rpartition(".")
        return any(
            isinstance(node, ast.Attribute)
            and node.attr == name
            and isinstance(node.value, ast.Name)
            and imported.get(node.value.id) == module
            for node in self.nodes
        )


def _whole_strings(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """Yield an f-string as one token on every Python; since 3.12 it is many."""
    depth = 0
    for each in tokens:
        name = tokenize.tok_name[each.type]
        if not depth:
            yield each
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            match node.body:
                case [ast.Expr(ast.Constant(str()) as found), *_]:
                    yield found


def sources(root: Path = ROOT) -> list[Source]:
    """Return the project's files of Python."""
    folders = ("tpucache", "tests", "scripts")
    return [Source(path, root) for folder in folders for path in sorted((root / folder).rglob("*.py"))]


def count_sizes(files: list[Source]) -> dict[str, dict[str, int]]:
    """Return the tokens, words of docstrings and files of each folder."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"tokens": 0, "words": 0, "files": 0})
    for each in files:
        sizes = found[each.folder]
        sizes["tokens"] += each.tokens()
        sizes["words"] += each.words()
        sizes["files"] += 1
    return dict(sorted(found.items()))


def count_flags() -> int:
    """Return the number of options over all commands."""
    from tpucache.cli import make_parser

    return sum(bool(action.option_strings) for each in make_parser().commands.values() for action in each.actions)


def public_names() -> dict[str, Any]:
    """Return what the `__init__.pyi` files name, each by its dotted name."""
    import importlib

    found = {}
    for path in sorted((ROOT / "tpucache").rglob("__init__.pyi")):
        module = importlib.import_module(path.parent.relative_to(ROOT).as_posix().replace("/", "."))
        for name in re.findall(r" as (\w+)", path.read_text()):
            found[f"{module.__name__}.{name}"] = getattr(module, name)
    return found


def count_keywords() -> dict[str, int]:
    """Return the number of arguments of each public class and function that takes more than twelve."""
    once = {id(each): (name, each) for name, each in reversed(public_names().items())}  # the shortest name of each
    counts = {
        name: len(inspect.signature(each).parameters)
        for name, each in reversed(once.values())
        if callable(each) and not (isinstance(each, type) and issubclass(each, Exception))
    }
    return {name: count for name, count in counts.items() if count > _KEYWORDS}


def find_places(files: list[Source]) -> dict[str, list[str]]:
    """Return the files of the package that use each mechanism which belongs into few."""
    package = [each for each in files if each.name.startswith("tpucache/")]
    return {
        mechanism: [each.name for each in package if any(map(each.uses, uses))]
        for mechanism, uses in _MECHANISMS.items()
    }


def count_inside(files: list[Source]) -> dict[str, int]:
    """Return how often tests use private names of the package, and replace names in its modules."""
    tests = [each for each in files if each.name.startswith("tests/")]
    return {"private": sum(map(_private_names, tests)), "replaced": sum(map(_replaced_names, tests))}


def _private_names(source: Source) -> int:
    imported = source.imported

    def is_private(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").startswith("tpucache") and any(each.name[0] == "_" for each in node.names)
        if not isinstance(node, ast.Attribute) or not re.match("_[a-z]", node.attr) or node.attr in _NAMED_TUPLE:
            return False
        return _root(node.value, imported).startswith(("tpucache", "?"))

    return sum(map(is_private, source.nodes))


def _replaced_names(source: Source) -> int:
    imported = source.imported

    def is_replaced(node: ast.AST) -> bool:
        match node:
            case ast.Call(ast.Attribute(_, "setattr" | "setitem" | "object" | "delattr"), [first, *_]):
                is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
                target = str(first.value) if is_text else _root(first, imported)  # type: ignore[attr-defined]
                return target.startswith("tpucache")
        return False

    return sum(map(is_replaced, source.nodes))


def _root(node: ast.AST, imported: Mapping[str, str]) -> str:
    """Return what the first name of `a.b.c` stands for, or "?" for what no import names."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    if not isinstance(node, ast.Name):
        return "?"
    return node.id if node.id in ("self", "cls") else imported.get(node.id, "?")


def count_overriding(files: list[Source]) -> int:
    """Return how many methods of the package have a docstring of their own beside that of the method they override."""
    classes = {
        node.name: node
        for each in files
        if each.name.startswith("tpucache/")
        for node in each.nodes
        if isinstance(node, ast.ClassDef)
    }

    def documented(found: ast.ClassDef, seen: tuple[str, ...] = ()) -> set[str]:
        bases = {base.id if isinstance(base, ast.Name) else "" for base in map(_unsubscripted, found.bases)}
        above = [documented(classes[each], (*seen, each)) for each in bases & classes.keys() - {*seen}]
        return _documented_methods(found).union(*above)

    total = 0
    for each in classes.values():
        bases = {base.id for base in map(_unsubscripted, each.bases) if isinstance(base, ast.Name)}
        above = [documented(classes[base], (base,)) for base in bases & classes.keys() - {each.name}]
        total += len(_documented_methods(each) & set().union(*above))
    return total


def _unsubscripted(base: ast.expr) -> ast.expr:
    return base.value if isinstance(base, ast.Subscript) else base


def _documented_methods(found: ast.ClassDef) -> set[str]:
    return {each.name for each in found.body if isinstance(each, ast.FunctionDef) and ast.get_docstring(each)}


def measure() -> dict[str, Any]:
    """Return what the budget counts, in the form of its file."""
    files = sources()
    return {
        "folders": count_sizes(files),
        "interface": {"flags": count_flags(), "keywords": count_keywords()},
        "docstrings": {"overriding": count_overriding(files)},
        "places": find_places(files),
        "tests": count_inside(files),
    }


def read_ceilings() -> dict[str, Any]:
    """Return the ceilings."""
    return tomllib.loads(FILE.read_text())


def compare(found: Any, ceiling: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each count above its ceiling, and for each place where a mechanism is new."""
    if isinstance(found, dict):
        for name, value in found.items():
            yield from compare(value, ceiling.get(name, type(value)()), f"{path} {name}".strip())
    elif isinstance(found, list):
        yield from (f"{path}: {each} is a new place" for each in found if each not in ceiling)
    elif found > ceiling:
        yield f"{path}: {found:,}, at most {ceiling:,}"


def lowered(found: Any, ceiling: Any) -> Any:
    """Return ceilings that are no higher than what was found and than they were."""
    if isinstance(found, dict):
        return {name: lowered(value, ceiling[name]) for name, value in found.items() if name in ceiling}
    if isinstance(found, list):
        return [each for each in found if each in ceiling]
    return min(found, ceiling)


def write_ceilings(ceilings: Mapping[str, Any]) -> None:
    """Write the file of the ceilings."""
    FILE.write_text("".join(_to_toml(ceilings)))


def _to_toml(ceilings: Mapping[str, Any]) -> Iterator[str]:
    yield "# Ceilings of size: `python -m scripts.checks budget` counts, and says how they change.\n"
    yield "\n# Tokens, words of docstrings, and files.\n[folders]\n"
    for name, sizes in ceilings["folders"].items():
        yield f'"{name}" = {{ {", ".join(f"{each} = {count}" for each, count in sizes.items())} }}\n'
    interface = ceilings["interface"]
    yield f"\n# All options of all commands.\n[interface]\nflags = {interface['flags']}\n"
    yield f"\n# Arguments of public names that take more than {_KEYWORDS}.\n[interface.keywords]\n"
    yield from (f'"{name}" = {count}\n' for name, count in interface["keywords"].items())
    yield "\n# Methods with a docstring of their own beside that of the method they override.\n[docstrings]\n"
    yield f"overriding = {ceilings['docstrings']['overriding']}\n"
    yield "\n# The only files that may use a mechanism.\n[places]\n"
    for name, files in ceilings["places"].items():
        lines = "".join(f'  "{each}",\n' for each in files)
        yield f'"{name}" = [\n{lines}]\n'
    yield "\n# Uses of private names of the package, and replaced names of its modules.\n[tests]\n"
    yield from (f"{name} = {count}\n" for name, count in ceilings["tests"].items())


def print_table(found: Mapping[str, Any], ceilings: Mapping[str, Any]) -> None:
    """Print sizes by folder, the package's sums, and the other counts."""
    print(f"{'':22}{'tokens':>9}{'ceiling':>9}{'words':>9}{'files':>7}")
    folders = dict(found["folders"])
    inside = [sizes for name, sizes in folders.items() if name.startswith("tpucache")]
    folders["package"] = {key: sum(each[key] for each in inside) for key in ("tokens", "words", "files")}
    for name, sizes in folders.items():
        ceiling = ceilings["folders"].get(name, {}).get("tokens", 0)
        print(f"{name:22}{sizes['tokens']:9,}{ceiling or '':>9}{sizes['words']:9,}{sizes['files']:7}")
    print(f"flags {found['interface']['flags']}; keywords {found['interface']['keywords'] or 'none above 12'}")
    print("; ".join(f"{name}: {len(files)} files" for name, files in found["places"].items()))
    print(f"docstrings of overriding methods: {found['docstrings']['overriding']}")
    print("tests: " + ", ".join(f"{name} names {count}" for name, count in found["tests"].items()))


def main() -> int:
    """Print the table, and lower the ceilings if asked to."""
    parser = make_parser(__doc__)
    parser.add_argument("--lower", action="store_true", help="bring the ceilings down to what is there now")
    options = parser.parse_args()
    found, ceilings = measure(), read_ceilings()
    if options.lower:
        write_ceilings(lowered(found, ceilings))
    print_table(found, ceilings)
    above = [*compare(found, ceilings)]
    print(*(f"ABOVE: {line}" for line in above), sep="\n", file=sys.stderr, end="\n" if above else "")
    return 1 if above else 0
