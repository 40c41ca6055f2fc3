"""Questions over a folder of texts: each file is read once into a memory, and any number of questions follow.

python examples/ask_a_folder.py [MODEL FOLDER "question"]

MODEL is a folder that `zonal convert` wrote. Without arguments a small untrained model reads three short texts; its
answers mean nothing, its memories are real.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from zonal import hf

TEXTS = {
    "mill.txt": "The mill stands at the end of the lane. It was built in 1804.",
    "road.txt": "The road over the hill is closed in winter.",
    "inn.txt": "The inn has nine rooms. The landlady is called Mrs Harker.",
}


def small() -> tuple[Any, Any]:
    """An untrained model and a tokeniser of bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    hf.convert(model, "squared_affine", cache="memory")
    return model, ByT5Tokenizer()


def answer(model: Any, tokenizer: Any, folder: Path, question: str) -> None:
    """Read all files of a folder and ask each of them, then all together."""
    context = hf.ContextMemory(model, tokenizer)
    for path in sorted(folder.glob("*.txt")):
        read = context.read(path.name, path.read_text(encoding="utf-8"))
        print(f"{read.name}: {read.tokens} tokens in {read.nbytes:,} bytes")
    asked = f"\n\nQuestion: {question}\nAnswer:"
    for document in context.contents():
        print(f"{document.name}: {context.ask(asked, [document.name], max_new_tokens=20, do_sample=False)!r}")
    print(f"all: {context.ask(asked, max_new_tokens=20, do_sample=False)!r}")
    context.forget(context.contents()[0].name)
    print("left after forgetting one:", ", ".join(document.name for document in context.contents()))


def main() -> None:
    if len(sys.argv) > 1:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
        answer(model.eval(), tokenizer, Path(sys.argv[2]), sys.argv[3])
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, text in TEXTS.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        answer(*small(), Path(folder), "When was the mill built?")


if __name__ == "__main__":
    main()
