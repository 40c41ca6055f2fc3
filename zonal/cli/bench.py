"""``zonal bench``: run a benchmark of the source tree's ``benchmarks/`` folder."""

import ast
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import tyro

import zonal
from zonal.errors import FileFormatError, unknown_name

DESCRIPTION = """\
Run a benchmark. It first checks correctness, then prints ratios to a named peer and writes JSON. Arguments after the
name are passed to the benchmark. Without a name, the command lists the benchmarks. They are part of the source tree,
not of an installed package.

Examples:
  zonal bench
  zonal bench tiled
  zonal bench planner --help"""


@dataclass(frozen=True)
class Bench:
    """Run a benchmark."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """Name of the benchmark. Without it, the command lists all."""


def folder() -> Path:
    """The benchmarks beside the package. Raises: FileFormatError when the package was installed without them."""
    found = Path(zonal.__file__).resolve().parent.parent / "benchmarks"
    if not found.is_dir():
        raise FileFormatError(
            f"bench: no benchmarks at {found}. They come with the source tree: "
            "clone it and install with `pip install -e .`."
        )
    return found


def available(where: Path) -> dict[str, str]:
    """Benchmarks by name, each with the first line of its docstring. Files without a ``main`` are helpers, left out."""
    found: dict[str, str] = {}
    for path in sorted(where.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def load(where: Path, name: str) -> ModuleType:
    """The module of a benchmark, imported as a member of its folder's package, since benchmarks share helpers."""
    root = str(where.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module(f"{where.name}.{name}")


def run(options: Bench, passed: list[str]) -> int:
    """Run the command; ``passed`` are the words for the benchmark. Returns the exit code."""
    where = folder()
    found = available(where)
    if not options.name:
        width = max((len(name) for name in found), default=0) + 2
        print("Benchmarks:" if found else f"No benchmarks in {where}.")
        for name, about in found.items():
            print(f"  {name:<{width}}{about}")
        return 0
    if options.name not in found:
        raise unknown_name("bench", "benchmark", options.name, found)
    result = load(where, options.name).main(passed)
    return result if isinstance(result, int) else 0
