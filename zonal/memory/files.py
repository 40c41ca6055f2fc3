"""Memory files: a checked header, the tensors a memory holds, and what its operator has learned."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from zonal.errors import ArgumentError, FileFormatError
from zonal.store import load_tensors, save_tensors

KIND = "memory"


def save(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor], learned: Mapping[str, Tensor]) -> None:
    """Write a memory."""
    named = {f"memory.{name}": x for name, x in tensors.items()} | {f"operator.{name}": x for name, x in learned.items()}
    save_tensors(path, named, {"kind": KIND, "about": header})


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """(header, tensors, learned values) of a memory file.

    Raises: FileFormatError when the file is missing, truncated, damaged, foreign, or holds something else.
    """
    tensors, header = load_tensors(path, KIND)
    about = header.get("about")
    if not isinstance(about, dict):
        raise FileFormatError(f"load {KIND}: the header of {path} says nothing about the memory. It was not written by this library.")
    groups: dict[str, dict[str, Tensor]] = {"memory": {}, "operator": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        if group not in groups:
            raise FileFormatError(f"load {KIND}: {path} holds an unknown entry {name!r}. It was not written by this library.")
        groups[group][rest] = tensor
    return about, groups["memory"], groups["operator"]


@contextlib.contextmanager
def blamed(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever does not fit inside is the file's fault, said in one line."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, ArgumentError) as error:
        detail = f"lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise FileFormatError(f"load {KIND}: {path} does not fit: {detail}. Pass the operator it was made with, or make the memory anew.") from error


__all__ = ["KIND", "blamed", "load", "save"]
