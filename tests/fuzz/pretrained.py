"""Folders and files of models of transformers, what is kept beside them, and how each is read."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from small_llama import SIZES, word_tokenizer

from zonal import hf
from zonal.hf.pretrained import opened

VOCABULARY = 30
# thousands of reports of weights that do not fit
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def tokenizer() -> Any:
    return word_tokenizer(f"w{index}" for index in range(VOCABULARY))


@functools.cache
def own() -> Any:
    torch.manual_seed(0)
    return hf.ZonalForCausalLM(
        hf.ZonalConfig(vocab_size=VOCABULARY, dim=8, layers="retention, ska(power=1)", heads=2)
    ).eval()


def converted() -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **SIZES))
    hf.convert(model, "squared_affine", cache="memory")
    return model


def folder_of(model: Callable[[], Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        model().save_pretrained(path)
        tokenizer().save_pretrained(path)

    return write


def write_gguf(path: Path) -> None:
    """A Llama of one layer with random weights."""
    import gguf

    file, draw = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    file.add_context_length(16)
    file.add_embedding_length(8)
    file.add_block_count(1)
    file.add_feed_forward_length(8)
    file.add_head_count(2)
    file.add_head_count_kv(1)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(4)
    file.add_vocab_size(VOCABULARY)
    file.add_tokenizer_model("gpt2")
    file.add_token_list([f"w{index}" for index in range(VOCABULARY - 1)] + ["w1w2"])
    file.add_token_merges(["w1 w2"])
    file.add_token_types([1] * VOCABULARY)
    file.add_eos_token_id(0)
    whole = ("token_embd", "output", "output_norm")
    layer = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "ffn_norm")
    rows = {"token_embd": VOCABULARY, "output": VOCABULARY, "attn_k": 4, "attn_v": 4}
    for name in (*whole, *layer):
        shape = (8,) if name.endswith("norm") else (rows.get(name, 8), 8)
        place = name if name in whole else f"blk.0.{name}"
        file.add_tensor(f"{place}.weight", draw.standard_normal(shape).astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def write_context(path: Path) -> None:
    context = hf.ContextMemory(own(), tokenizer())
    for name in ("a letter", "é"):
        context.read(name, "w1 w2 w3 w4")
    context.save(path)


def read_context(path: Path) -> None:
    context = hf.ContextMemory(own(), tokenizer())
    context.load(path)
    if context.contents():
        context.score("w5 w6")


READERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "own/": (folder_of(own), lambda path: opened("generate", path)),
    "converted/": (folder_of(converted), lambda path: opened("generate", path)),
    "converted by name/": (folder_of(converted), hf.from_pretrained),
    "context/": (write_context, read_context),
    "refusal": (
        lambda path: hf.Refusal(1, 0, "support", "last", 0.5, 0.05, 0.9, 0.95).save(path), hf.Refusal.load
    ),
}  # fmt: skip
if importlib.util.find_spec("gguf") is not None:  # transformers reads these files with it
    READERS["model.gguf"] = (write_gguf, lambda path: opened("convert", path))

__all__ = ["READERS"]
