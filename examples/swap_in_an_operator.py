"""A model of transformers with other attention: the same answers first, then an operator with a constant memory.

python examples/swap_in_an_operator.py
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from zonal import hf


def main() -> None:
    torch.manual_seed(0)
    # yours: AutoModelForCausalLM.from_pretrained(...)
    config = LlamaConfig(vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(384, (1, 200))
    with torch.no_grad():
        before = model(tokens).logits
        hf.convert(model, "softmax")
        print(f"softmax of this library: logits differ by {(model(tokens).logits - before).abs().max():.1e}")
        assert torch.allclose(model(tokens).logits, before, atol=1e-4)

        hf.convert(model, "squared_affine", layers=[1, 3], cache="memory")
        print("operators by layer:", ", ".join(operator.name for operator in hf.operators(model)))
        cache = hf.MemoryCache()
        for _ in range(2):
            model(tokens, **{hf.CACHE: cache})  # cache=, before transformers 5.24 past_key_values=
            sizes = [layer.nbytes for layer in cache.memory().layers]
            print(f"after {cache.get_seq_length()} tokens, bytes by layer: {sizes}")
        assert sizes[0] > sizes[1]

        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = AutoModelForCausalLM.from_pretrained(folder)
            assert torch.equal(again(tokens).logits, model(tokens).logits)
            print("saved and loaded by an Auto class: the same logits")
    print("Training comes next: zonal convert, or the Trainer of transformers.")


if __name__ == "__main__":
    main()
