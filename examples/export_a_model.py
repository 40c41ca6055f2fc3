"""A small model as two programs of torch.export, which read a prompt and take steps without this library.

python examples/export_a_model.py [FOLDER]

FOLDER gets prefill.pt2 and step.pt2; without it they are only tried.
"""

import sys
import tempfile
from pathlib import Path

import torch

from zonal.models import ModelConfig, build, export


def main() -> None:
    config = ModelConfig(vocab_size=256, dim=32, layers=("softmax", "squared_affine"), heads=2, rotary=True)
    model = build(config, seed=0)
    prompt = torch.tensor([list(b"The old house stood at the end of")])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else name)
        folder.mkdir(parents=True, exist_ok=True)
        for kind, program in export(model, longest=512)._asdict().items():
            torch.export.save(program, folder / f"{kind}.pt2")
            print(f"{kind}.pt2: {(folder / f'{kind}.pt2').stat().st_size / 1e3:.0f} kB")
        prefill, step = (torch.export.load(folder / f"{kind}.pt2").module() for kind in ("prefill", "step"))

    made = []
    with torch.no_grad():
        logits, state = prefill(prompt)  # of any length up to 512
        for _ in range(8):
            made.append(int(logits.argmax()))
            logits, state = step(torch.tensor([made[-1:]]), state)
    expected = [int(token) for token in model.generate(prompt, max_new_tokens=8, temperature=0.0)]
    print("the state:", {key: tuple(value.shape) for key, value in state.items()})
    print("eight greedy tokens from the programs:", made, "from the model:", expected)
    assert made == expected


if __name__ == "__main__":
    main()
