"""Checkpoints: one safetensors file with the weights, the optimiser, the random numbers and where the run stood.

Names in the file: ``model/<name>``, ``optimiser/<parameter>/<state>``, ``random/cpu``, ``random/cuda``. The header has
the configuration of model, task and training with a fingerprint of them, and ``progress``. The position in the data is
the step, since a batch is a pure function of step and seed. The file is replaced atomically (``zonal.store``): the
previous checkpoint stands until the new one is whole and on the disk.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zonal.errors import FileFormatError
from zonal.models import LanguageModel, ModelConfig, language_model
from zonal.models.build import class_of
from zonal.store import load_tensors, save_tensors, under, understood, unlike
from zonal.training.config import first_difference
from zonal.typed import check_fields

FILE = "checkpoint.safetensors"
BEST = "best.safetensors"
KIND = "checkpoint"
# fields of ``Progress`` that came when runs had been saved without them
_LATER = frozenset({"metrics_sha256"})


@dataclass
class Progress:
    """Where a run stands: everything of its state that is not a tensor.

    ``evaluated`` is the last evaluated step; ``metrics_bytes`` the length of metrics.jsonl and ``metrics_sha256`` its
    digest ("" in files that have none); ``unlogged`` the losses since its last line; times in seconds; ``threads`` and
    ``environment`` tell what the bits depend on besides.
    """

    step: int = 0
    tokens: int = 0
    evaluated: int = 0
    metrics_bytes: int = 0
    metrics_sha256: str = ""
    unlogged: list[float] = field(default_factory=list)
    seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    peak_memory_bytes: int = 0
    stopped_early: bool = False
    final: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    steps_to: dict[str, int | None] = field(default_factory=dict)
    learned_before: list[Any] = field(default_factory=list)
    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)


def fingerprint(config: dict[str, Any]) -> str:
    """SHA-256 of a JSON configuration, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def save_checkpoint(
    path: Path, model: nn.Module, optimiser: Optimizer, progress: Progress, config: dict[str, Any]
) -> None:
    """Write a checkpoint. ``config`` is JSON: what must agree when it is loaded, under "identity", and what else should
    be known, beside it.

    Raises: InsufficientSpaceError when the disk is full; the previous checkpoint then still stands.
    """
    tensors = state_of(model, optimiser)
    tensors["random/cpu"] = torch.get_rng_state()
    device = next(model.parameters()).device
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    save_tensors(path, tensors, {**header_of(config), "progress": dataclasses.asdict(progress)})


def save_weights(path: Path, model: nn.Module, config: dict[str, Any], step: int) -> None:
    """Write the weights alone, as ``load_model`` reads them."""
    save_tensors(path, _weights(model), {**header_of(config), "weights_of_step": step})


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"model/{name}": value for name, value in model.state_dict().items()}


def state_of(model: nn.Module, optimiser: Optimizer) -> dict[str, Tensor]:
    """The tensors of model and optimiser by name, as this process holds them."""
    tensors = _weights(model)
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser/{name}/{key}"] = value
    return tensors


def header_of(config: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its run."""
    return {"kind": KIND, "config": config, "fingerprint": fingerprint(config["identity"])}


def load_checkpoint(
    path: Path, model: nn.Module, optimiser: Optimizer, config: dict[str, Any]
) -> tuple[Progress, dict[str, Tensor]]:
    """Restore model and optimiser; returns where the run stood, and the states of its random numbers by kind of device
    (``set_random_states``). Nothing is changed when it raises.

    Raises: FileFormatError when the file is truncated, foreign, damaged, or of another configuration: it then names the
    first field that differs.
    """
    tensors, header = load_tensors(path, KIND)
    if "progress" not in header:
        raise FileFormatError(
            f"train: {path} holds weights without the state of a run. A run can only go on from {FILE}."
        )
    progress = progress_in(path, header, config)
    with understood("train", path):
        weights = under(tensors, "model/")
        if wrong := unlike(weights, model.state_dict()):
            raise ValueError(wrong)
        _finite(tensors)
        states = _optimiser_states(path, tensors, model, optimiser)
        torch.Generator().set_state(tensors["random/cpu"])  # refuses what is no state, before anything is changed
        model.load_state_dict(weights)
        optimiser.load_state_dict({"state": states, "param_groups": optimiser.state_dict()["param_groups"]})
    return progress, under(tensors, "random/")


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Let random numbers go on from states that ``load_checkpoint`` found: those of the CPU, and those of a GPU where
    ``device`` is one. A run that goes on elsewhere keeps the states that it finds there.
    """
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def progress_in(path: Path, header: Mapping[str, Any], config: dict[str, Any]) -> Progress:
    """Where the run stood whose checkpoint has this header. Raises: FileFormatError as ``load_checkpoint``."""
    with understood("train", path):
        stored = header["config"]["identity"]
        if not header["fingerprint"] == fingerprint(stored) == fingerprint(config["identity"]):
            name, old, new = first_difference(stored, config["identity"]) or ("configuration", "another", "this one")
            raise FileFormatError(
                f"train: {path} belongs to another run: {name} is {old!r} there and {new!r} here. "
                "Use the same settings to go on, or another folder to start anew."
            )
        check_fields("progress", Progress, header["progress"])
        known = {each.name for each in dataclasses.fields(Progress)}
        if not known - _LATER <= set(header["progress"]) <= known:
            raise FileFormatError(
                f"train: {path} was written by another version of this library. "
                "Use that version, or start again in another folder."
            )
        progress = Progress(**header["progress"])
        if min(progress.step, progress.tokens, progress.evaluated, progress.metrics_bytes, progress.threads - 1) < 0:
            raise ValueError("a count in its progress is negative")
    return progress


def load_model(path: str | Path) -> tuple[LanguageModel, dict[str, Any]]:
    """The model of a checkpoint (or of best.safetensors), in evaluation mode on the CPU, and the stored configuration
    with the keys "identity" (model, task, training) and "operator".

    Raises: FileFormatError when the file is not a whole checkpoint of this library.
    """
    tensors, header = load_tensors(path, KIND)
    with understood("load_model", path):
        identity = header["config"]["identity"]
        if "model" not in identity:
            raise FileFormatError(
                f"load_model: {path} does not say which model it holds. "
                "Required: a checkpoint written by `zonal train` or `zonal compare`."
            )
        config = ModelConfig.from_dict(identity["model"])
        weights = under(tensors, "model/")
        # whatever sizes the file states, nothing of them is made before they are those of its weights
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            if wrong := unlike(weights, class_of(config)(config).state_dict()):
                raise ValueError(wrong)
        _finite(weights)
        dtype = torch.float64 if identity["training"]["dtype"] == "float64" else torch.float32
        model = language_model(config, seed=0).to(dtype)
        model.load_state_dict(weights)
    return model.eval(), header["config"]


def _finite(tensors: dict[str, Tensor]) -> None:
    """Refuse weights and moments that no run can have left."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} holds NaN or infinity")


def _optimiser_states(
    path: Path, tensors: dict[str, Tensor], model: nn.Module, optimiser: Optimizer
) -> dict[int, dict[str, Tensor]]:
    """Saved states by the optimiser's own numbering of parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimiser.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Tensor]] = {}
    saved = under(tensors, "optimiser/")
    for index, name in enumerate(order):
        # parameter names have dots, never slashes; a state of "a.b" is "a.b/exp_avg"
        state = under(saved, f"{name}/")
        if state:
            states[index] = state
    if saved and set(order) != {name.rsplit("/", 1)[0] for name in saved}:
        raise FileFormatError(
            f"train: the optimiser state in {path} is for other parameters. It was written by another version."
        )
    return states
