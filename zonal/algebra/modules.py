"""The modules of a package, found by looking: a new file needs no entry in a list."""

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType


def modules_of(package: str, folders: Iterable[str]) -> list[ModuleType]:
    """Every module of a package, imported, in the order of their names. folders: the package's ``__path__``."""
    return [importlib.import_module(f"{package}.{found.name}") for found in pkgutil.iter_modules(folders)]


__all__ = ["modules_of"]
