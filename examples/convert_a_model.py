"""The stages of `zonal convert` from Python: attention transfer, the choice of layers, distillation.

python examples/convert_a_model.py

A small untrained model stands for yours; the errors fall as they do there.
"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zonal.data.corpora import novel
from zonal.hf import distil, examine

OPERATOR = "local_global(window=16, first=2, far='hedgehog', weight=30.0)"


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)  # fmt: skip
    original = LlamaForCausalLM(config).eval()
    text = distil.Text.of([list(novel()[:200_000].encode())], windows=2, length=128)

    everywhere = distil.converted(original, OPERATOR)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        stage = distil.Stage(steps=40, rate=1e-2)
        task, window = distil.Transfer(everywhere), text.held_out[:1]
        first = task.losses(window)["error"]
        for _ in distil.learn(task, stage, text, length=128, seed=0, state=work / "transfer.safetensors"):
            pass
        print(f"error of attention, mean of the layers: {first:.3f} → {task.losses(window)['error']:.3f}")
        harm = distil.harms(everywhere, text.held_out)
        chosen = sorted(range(4), key=harm.__getitem__)[:2]
        print("nats a token that each layer alone costs:", [round(value, 4) for value in harm], "chosen:", chosen)

        learned = distil.learned_by(everywhere)
        hybrid = distil.converted(original, OPERATOR, {index: learned[index] for index in chosen})
        stage = distil.Stage(steps=10, rate=1e-4)
        updates = list(
            distil.learn(
                distil.Distillation(hybrid, original), stage, text, length=128, seed=0,
                state=work / "distillation.safetensors",
            )
        )  # fmt: skip
    print(f"nats between the predictions: {updates[0].losses['nats']:.4f} → {updates[-1].losses['nats']:.4f}")
    before, after = (examine.nats(model, text.held_out).mean().exp() for model in (original, hybrid.eval()))
    print(f"perplexity of the original {before:.1f}, converted {after:.1f}")


if __name__ == "__main__":
    main()
