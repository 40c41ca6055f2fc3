"""Files of models: weights and config in one safetensors file."""

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from zonal import store

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
    with store.understood(f"load {kind}", path):
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            # whatever sizes the config states, nothing of them is made before they are those of the weights
            if wrong := store.unlike(tensors, make(header["config"]).state_dict()):
                raise ValueError(wrong)
        model = make(header["config"])
        # assign keeps the dtype of the file
        model.load_state_dict(tensors, assign=True)
    return model


__all__ = ["load", "save"]
