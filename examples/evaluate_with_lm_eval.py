"""lm-eval on a converted model, on a task of its own that needs no network.

python examples/evaluate_with_lm_eval.py [MODEL TASK,...]

MODEL is a folder that `zonal convert` or `save_pretrained` wrote. The command `lm_eval` does not import this library,
so `python -m zonal.hf lm_eval ...` runs it; this program does the same by lm-eval's functions.
"""

import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from zonal import hf

TASK = """\
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def small() -> tuple[Any, Any]:
    """An untrained model and a tokeniser of bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, eos_token_id=1, pad_token_id=0)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    hf.convert(model, "squared_affine", cache="memory")
    return model, ByT5Tokenizer()


def evaluate(model: Any, tokenizer: Any, tasks: list[str], folder: Path | None = None) -> None:
    """Print the accuracy of each task."""
    lm_eval: Any = importlib.import_module("lm_eval")
    harness = importlib.import_module("lm_eval.models.huggingface")
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=None if folder is None else str(folder))
    found = lm_eval.simple_evaluate(
        harness.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4), tasks=tasks, task_manager=manager,
        bootstrap_iters=0,
    )  # fmt: skip
    for name, numbers in found["results"].items():
        print(name, {key: value for key, value in numbers.items() if isinstance(value, float)})


def main() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        print("This example needs lm-eval: pip install lm-eval")
        return
    if len(sys.argv) > 1:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
        evaluate(model.eval(), tokenizer, sys.argv[2].split(","))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"text": f"{a} comes before", "choices": [" b", " z"], "answer": 0} for a in "aaaa"]
        (folder / "letters.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        (folder / "letters.yaml").write_text(TASK.format(data=folder / "letters.jsonl"), encoding="utf-8")
        evaluate(*small(), ["letters"], folder)


if __name__ == "__main__":
    main()
