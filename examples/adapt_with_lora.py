"""LoRA on a converted model: the adapter trains together with what the operators learn, is saved, and is merged.

python examples/adapt_with_lora.py
"""

import tempfile
import warnings
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zonal import hf

try:
    import peft
except ImportError:
    peft = None


def converted() -> Any:
    """A small model on local-global attention, which learns its far features."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)  # fmt: skip
    model = LlamaForCausalLM(config)
    hf.convert(model, "local_global(window=8, first=2, far='hedgehog', weight=0.1)", cache="memory")
    return model


def main() -> None:
    if peft is None:
        print("This example needs peft: pip install 'peft>=0.21'")
        return
    warnings.filterwarnings("ignore", category=FutureWarning)  # peft asks transformers by an old name
    config = peft.LoraConfig(
        r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["operator"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(converted(), config)
    learned = {name: value for name, value in model.named_parameters() if value.requires_grad}
    print(f"{len(learned)} tensors are trained, {sum('operator' in name for name in learned)} of them of operators")
    tokens = torch.arange(64).repeat(4, 2)[:, :96]
    optimiser = torch.optim.AdamW(learned.values(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}")
    assert losses[-1] < losses[0]
    model.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        again = peft.PeftModel.from_pretrained(converted(), folder).eval()
        assert torch.equal(again(tokens).logits, model(tokens).logits)
        merged = again.merge_and_unload()
        assert torch.allclose(merged(tokens).logits, model(tokens).logits, atol=1e-4)
    print("the adapter was saved, loaded onto a fresh conversion, and merged: the same logits")


if __name__ == "__main__":
    main()
