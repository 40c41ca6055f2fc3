"""Files of models: weights and config in one safetensors file."""

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

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
            _check(tensors, make(header["config"]).state_dict())
        model = make(header["config"])
        # assign keeps the dtype of the file
        model.load_state_dict(tensors, assign=True)
    return model


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError, naming up to three tensors, unless all that is expected is there and nothing else."""
    wrong = [f"{name} is missing" for name in expected if name not in tensors]
    wrong += [f"{name} is unknown" for name in tensors if name not in expected]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)} and should be {tuple(value.shape)}"
        for name, value in expected.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    wrong += [
        f"{name} is {tensors[name].dtype} and should be {value.dtype}"
        for name, value in expected.items()
        if name in tensors and tensors[name].is_floating_point() != value.is_floating_point()
    ]
    if wrong:
        raise ValueError("; ".join(wrong[:3]))


__all__ = ["load", "save"]
