"""Files of models: weights and config in one safetensors file."""

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from zonal import store
from zonal.errors import ArgumentError, FileFormatError

Model = TypeVar("Model", bound=nn.Module)


def save(path: str | os.PathLike[str], kind: str, model: nn.Module, config: Mapping[str, Any]) -> None:
    """Write weights and config, completely or not at all."""
    store.save_tensors(path, model.state_dict(), {"kind": kind, "config": dict(config)})


def load(path: str | os.PathLike[str], kind: str, make: Callable[[Mapping[str, Any]], Model]) -> Model:
    """The model that ``save`` wrote, on the CPU, in its saved dtype. make: builds a model from the config.

    Raises:
        FileFormatError: the file is missing, damaged, or holds something else.
    """
    tensors, header = store.load_tensors(path, kind)
    try:
        model = make(header["config"])
    except (KeyError, TypeError, ArgumentError) as error:
        raise FileFormatError(f"load {kind}: the config in {path} is not one of this version ({error}).") from error
    expected = model.state_dict()
    wrong = [f"{name} is missing" for name in expected if name not in tensors]
    wrong += [f"{name} is unknown" for name in tensors if name not in expected]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)} and should be {tuple(value.shape)}"
        for name, value in expected.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    if wrong:
        raise FileFormatError(f"load {kind}: the weights in {path} do not fit its config: {'; '.join(wrong[:3])}.")
    # assign keeps the dtype of the file
    model.load_state_dict(tensors, assign=True)
    return model


__all__ = ["load", "save"]
