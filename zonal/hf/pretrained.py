"""Opens pre-trained causal models and their tokenisers from a folder or a GGUF file."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from zonal import device_memory, store
from zonal.errors import ArgumentError, FileFormatError, ZonalError

RECORD = "conversion.json"


def opened(call: str, path: Path) -> tuple[Any, Any]:
    """(model, tokeniser) of a folder of Hugging Face or a GGUF file, in float32, for inference.

    Code in a folder is never run.

    Raises: ArgumentError, in the name of ``call``, when there is no such path, transformers cannot read it, or its
        weights are not those of its config; FileFormatError as ``check_files``.
    """
    if not path.exists():
        raise ArgumentError(
            f"{call}: {path} does not exist. Give the folder of a model (config.json, safetensors) or a GGUF file."
        )
    check_files(call, path)
    where: dict[str, Any] = (
        {"pretrained_model_name_or_path": path}
        if path.is_dir()
        else {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    )
    with readable(call, path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, found = loaded
    check_loaded(call, path, found)
    with readable(call, path, f"the tokeniser in {path}; copy it there with tokenizer.save_pretrained"):
        tokenizer = AutoTokenizer.from_pretrained(**where)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one of a model's own kind
            raise OSError("no file has its tokens")
    if path.suffix == ".gguf":  # its weights are plain float32 numbers now, which can be saved
        model.hf_quantizer.remove_quantization_config(model)
    return model.eval(), tokenizer


@contextlib.contextmanager
def readable(call: str, path: str | Path, what: str = "") -> Iterator[None]:
    """Turn what transformers raises for a damaged folder or file, which may be anything, into an ArgumentError. what:
    is read, if not all of it.
    """
    try:
        yield
    except ZonalError:
        raise
    except SafetensorError as error:
        raise ArgumentError(f"{call}: a file in {path} is damaged or truncated; copy it again. {error}") from error
    except Exception as error:
        if device_memory.exhausted(error):
            raise
        detail = str(error) if isinstance(error, OSError | ValueError | ImportError) else repr(error)
        raise ArgumentError(f"{call}: transformers cannot read {what or path}: {detail}") from error


def check_files(call: str, folder: Path) -> None:
    """Raise FileFormatError for a file that is not as `zonal convert` wrote it, by the digests in conversion.json.

    Other folders of transformers have no digests.
    """
    record = folder / RECORD
    if not record.is_file():
        return
    with store.understood(call, record):
        for name, digest in store.checked(record, store.read_json(record), call).get("files", {}).items():
            if (folder / name).is_file() and digest_of(folder / name) != digest:
                raise FileFormatError(
                    f"{call}: {folder / name} is not what `zonal convert` wrote: it was damaged, copy it again. If it "
                    f"was changed on purpose, remove {RECORD} from the folder."
                )


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_loaded(call: str, path: str | Path, found: dict[str, Any]) -> None:
    """Raise ArgumentError for weights that a folder lacks, has beside those of its config, or has in other shapes.

    found: what transformers reports with ``output_loading_info=True``.
    """
    shapes = [f"{name} of shape {tuple(held)} for {tuple(wanted)}" for name, held, wanted in found["mismatched_keys"]]
    for said, names in (
        ("lacks", found["missing_keys"]), ("has, beside those of its model,", found["unexpected_keys"]), ("has", shapes)
    ):  # fmt: skip
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise ArgumentError(
                f"{call}: {path} {said} the weight {min(names)}{more}. Its config.json must be the one that was saved "
                "with the weights; save both again with save_pretrained."
            )


@contextlib.contextmanager
def drawn_plainly(model: Any) -> Iterator[None]:
    """Let ``generate`` draw as its call alone says: without beams, penalties and the cache of the model's generation
    config, of which the tokens that end a text or are never drawn are kept.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, suppress_tokens=own.suppress_tokens)
    try:
        yield
    finally:
        model.generation_config = own


def encoded(call: str, model: Any, tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text.

    Raises: ArgumentError for a tokeniser that is not of the model.
    """
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    check_tokens(call, model, tokens)
    return tokens


def check_tokens(call: str, model: Any, tokens: list[int]) -> None:
    """Raise ArgumentError for tokens that the model does not know, so that their tokeniser is not of the model."""
    size = model.config.get_text_config().vocab_size
    if tokens and max(tokens) >= size:
        raise ArgumentError(
            f"{call}: the tokeniser made token {max(tokens)}, and the model knows {size} tokens. Use the tokeniser "
            "that the model was trained with, or call model.resize_token_embeddings first."
        )


__all__ = [
    "RECORD",
    "check_files",
    "check_loaded",
    "check_tokens",
    "digest_of",
    "drawn_plainly",
    "encoded",
    "opened",
    "readable",
]
