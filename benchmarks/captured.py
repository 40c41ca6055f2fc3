"""Queries, keys and values of a trained model, layer by layer, or from a file."""

import importlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zonal.cli.generate import checkpoint_in
from zonal.data.corpora import novel
from zonal.errors import ArgumentError, FileFormatError
from zonal.features.fidelity import Sample
from zonal.models import CausalLM
from zonal.nn import Attention
from zonal.tasks import registry
from zonal.training import load_model


def of_layers(model: CausalLM, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k (B, H, T, d) and v (B, H, T, P) as each attention layer hands them to its operator, key heads repeated.
    tokens (B, T).
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    found: list[dict[str, Tensor]] = []
    handles: list[Any] = []

    def keep(name: str, heads: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            # projections are (B, T, H d); norms come after the split into heads
            found[-1][name] = output if output.dim() == 4 else output.unflatten(2, (heads, -1)).transpose(1, 2)

        return hook

    def turned(module: nn.Module, inputs: Any, output: Tensor) -> None:
        # a layer turns its queries first, then its keys; layers may share the module
        found[-1]["key" if "turned" in found[-1] else "query"] = output
        found[-1]["turned"] = output

    for layer in layers:
        handles.append(layer.register_forward_pre_hook(lambda module, inputs: found.append({})))
        for name, module, heads in (
            ("query", layer.query, layer.heads), ("key", layer.key, layer.kv_heads),
            ("value", layer.value, layer.kv_heads),
            ("query", layer.query_norm, layer.heads), ("key", layer.key_norm, layer.kv_heads),
        ):  # fmt: skip
            if module is not None:
                handles.append(module.register_forward_hook(keep(name, heads)))
    handles += [
        module.register_forward_hook(turned)
        for module in {layer.rotary for layer in layers if layer.rotary is not None}
    ]
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    groups = [layer.heads // layer.kv_heads for layer in layers]
    return [
        (kept["query"], kept["key"].repeat_interleave(group, 1), kept["value"].repeat_interleave(group, 1))
        for kept, group in zip(found, groups, strict=True)
    ]


def opened(call: str, path: Path, implementation: str) -> tuple[Any, Any]:
    """(model, tokeniser) of a folder of Hugging Face or a GGUF file, in float32, for inference.

    Raises: ArgumentError, in the name of ``call``, when the package transformers is missing or cannot read the model.
    """
    transformers(call, path)
    model, tokenizer = importlib.import_module("zonal.hf.pretrained").opened(call, path)
    model.set_attn_implementation(implementation)
    return model, tokenizer


def transformers(call: str, path: Path) -> Any:
    """The package. Raises: ArgumentError when it is missing."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ArgumentError(
            f"{call}: {path} is a model of Hugging Face, which the package transformers reads ({error}). pip "
            "install transformers gguf accelerate"
        ) from error


def recording(found: list[tuple[Tensor, Tensor, Tensor]]) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers that puts what each layer attends with into a list, key heads repeated,
    and attends as ever.
    """

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        found.append((q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling).transpose(1, 2), None

    return attend


def of_transformers(path: Path, length: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k (2, H, T, d) after their positions and v (2, H, T, P) of each layer of a Hugging Face causal model, key
    heads repeated.

    path: the folder of a model, or a GGUF file. The tokens are two neighbouring stretches from the middle of the
        embedded novel.

    Raises: ArgumentError when the package transformers is missing or cannot read the model.
    """
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    transformers("bench fidelity", path).AttentionInterface.register("zonal_captured", recording(found))
    model, tokenizer = opened("bench fidelity", path, "zonal_captured")
    text = novel()
    ids = tokenizer(text[len(text) // 2 :][: 20 * length])["input_ids"]
    if len(ids) < 2 * length:
        raise ArgumentError(
            f"bench fidelity: --length {length} is more than the middle of the novel has tokens for, {len(ids) // 2}."
        )
    with torch.no_grad():
        model(torch.tensor(ids[: 2 * length]).view(2, length), use_cache=False)
    return found


def samples(path: Path, length: int, layers: Collection[int] | None = None) -> list[tuple[str, Sample, Sample]]:
    """(name, data to measure on, other data of the same kind) for each layer of a model or for the tensors of a file.

    path: a checkpoint of this library or the folder of a run: q, k, v on two sequences of its task's evaluation set. Or
    a model of Hugging Face (its folder, or a GGUF file): on two stretches of the embedded novel. Or a safetensors file
    with q, k, v, (H, T, d) each: its first half is measured, its second half is what fits may look at. layers: which of
    a model's, from 1; default: all.

    Raises: FileFormatError for anything else, ArgumentError for layers that it does not have.
    """
    hugging_face = path.suffix == ".gguf" or (path / "config.json").is_file()
    own = None if hugging_face else _tensors(path)
    if own is not None:
        q, k, v = own
        half = min(length, q.shape[1] // 2)
        return [
            (
                path.stem,
                _sample(q[:, :half], k[:, :half], v[:, :half]),
                _sample(q[:, half : 2 * half], k[:, half : 2 * half], v[:, half : 2 * half]),
            )
        ]
    if hugging_face:
        found, name = of_transformers(path, length), path.stem
    else:
        model, config = load_model(checkpoint_in(path))
        tokens = next(iter(registry.from_config(config["identity"]["task"]).evaluation_batches(2))).tokens[:2, :length]
        if tokens.shape[0] < 2:
            raise ArgumentError(
                "bench fidelity: two evaluation sequences are required, one to measure on and one for fits; the "
                "model's task gave fewer."
            )
        found, name = of_layers(model, tokens), path.resolve().name
    wanted = range(1, len(found) + 1) if layers is None else layers
    if not set(wanted) <= set(range(1, len(found) + 1)):
        raise ArgumentError(
            f"bench fidelity: --layers must be from 1 to {len(found)}, received {','.join(map(str, wanted))}."
        )
    return [
        (
            f"{name}, layer {layer}",
            _sample(*(x[0] for x in found[layer - 1])),
            _sample(*(x[1] for x in found[layer - 1])),
        )
        for layer in wanted
    ]


def _tensors(path: Path) -> tuple[Tensor, Tensor, Tensor] | None:
    """q, k, v of a plain safetensors file; None when the file holds something else."""
    if path.is_dir():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if not {"q", "k", "v"} <= set(file.keys()):
                return None
            q, k, v = (file.get_tensor(name) for name in "qkv")
    except (OSError, SafetensorError) as error:
        raise FileFormatError(f"bench fidelity: {path} cannot be read as safetensors ({error}).") from error
    if q.dim() != 3 or q.shape != k.shape or v.shape[:2] != q.shape[:2] or q.shape[1] < 4:
        raise FileFormatError(
            f"bench fidelity: q, k, v must be (H, T >= 4, d) with equal H and T, {path} has {tuple(q.shape)}, "
            f"{tuple(k.shape)}, {tuple(v.shape)}."
        )
    return q, k, v


def _sample(q: Tensor, k: Tensor, v: Tensor) -> Sample:
    unit = nn.functional.normalize
    return Sample(unit(q.double(), dim=-1), unit(k.double(), dim=-1), v.double())


__all__ = ["of_layers", "of_transformers", "opened", "recording", "samples", "transformers"]
