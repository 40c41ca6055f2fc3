"""Opens pre-trained causal models and their tokenisers from a folder or a GGUF file."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from zonal.errors import ArgumentError


def opened(call: str, path: Path) -> tuple[Any, Any]:
    """(model, tokeniser) of a folder of Hugging Face or a GGUF file, in float32, for inference.

    Code in a folder is never run.

    Raises: ArgumentError, in the name of ``call``, when there is no such path or transformers cannot read it.
    """
    if not path.exists():
        raise ArgumentError(
            f"{call}: {path} does not exist. Give the folder of a model (config.json, safetensors) or a GGUF file."
        )
    where: dict[str, Any] = (
        {"pretrained_model_name_or_path": path}
        if path.is_dir()
        else {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    )
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, ImportError) as error:
        raise ArgumentError(f"{call}: transformers cannot read {path}: {error}") from error
    if path.suffix == ".gguf":  # its weights are plain float32 numbers now, which can be saved
        model.hf_quantizer.remove_quantization_config(model)
    return model.eval(), tokenizer


__all__ = ["opened"]
