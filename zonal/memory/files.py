"""Memory files: a checked header, the tensors a memory holds, and what its operator has learned."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zonal.errors import FileFormatError
from zonal.store import load_tensors, save_tensors

KIND = "memory"


def save(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    learned: Mapping[str, Tensor],
) -> None:
    """Write a memory."""
    named = {f"memory.{name}": x for name, x in tensors.items()} | {
        f"operator.{name}": x for name, x in learned.items()
    }
    save_tensors(path, named, {"kind": KIND, "about": header})


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """(header, tensors, learned values) of a memory file.

    Raises: FileFormatError when the file is missing, truncated, damaged, foreign, or holds something else.
    """
    tensors, header = load_tensors(path, KIND)
    about = header.get("about")
    if not isinstance(about, dict):
        raise FileFormatError(
            f"load {KIND}: the header of {path} says nothing about the memory. It was not written by this library."
        )
    groups: dict[str, dict[str, Tensor]] = {"memory": {}, "operator": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        if group not in groups:
            raise FileFormatError(
                f"load {KIND}: {path} holds an unknown entry {name!r}. It was not written by this library."
            )
        groups[group][rest] = tensor
    # with a mask there are padded tokens, which may hold anything
    if not any(tensor.dtype == torch.bool for tensor in groups["memory"].values()):
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise FileFormatError(
                    f"load {KIND}: {name!r} in {path} holds NaN, which no memory takes in. It was not written by "
                    "this library."
                )
    return about, groups["memory"], groups["operator"]


__all__ = ["KIND", "load", "save"]
