"""Train a tiny model on a text of yours, continue a prompt with it, and look at what a memory of fixed size holds.

    python examples/train_on_your_text.py [FILE.txt]

Without a file it takes the embedded novel. A few seconds of training make short words, no more; raise STEPS and DIM for
sentences.
"""

import sys
import tempfile

import torch

from zonal.models import ModelConfig, build
from zonal.tasks import Text
from zonal.training import TrainConfig, events, train

STEPS, DIM = 400, 64


def show(event: events.Event) -> None:
    """Print the evaluations as they come."""
    if isinstance(event, events.Evaluated):
        print(
            f"step {event.step:4d}  held-out loss {event.metrics['loss']:.3f} nats a byte  ({event.seconds:.0f} "
            "s of training)"
        )


def main(source: str = "novel") -> None:
    task = Text(source, tokenizer="byte", length=64, evaluation_bytes=8192)
    print(task.describe())

    # any operator in any layer; each keeps a state of fixed size, so text can go on for ever
    config = ModelConfig(task.vocab_size, dim=DIM, layers=("squared_affine", "ska(power=1)"), heads=4, conv=4)
    model = build(config, seed=0)
    print(
        f"{model.num_parameters():,} parameters; memory of one sequence: {model.memory_bytes(1000):,} bytes "
        "after 1000 tokens, "
        f"{model.memory_bytes(100_000):,} after 100,000"
    )

    settings = TrainConfig(steps=STEPS, batch_size=4, learning_rate=3e-3, eval_every=STEPS // 4, tensorboard=False)
    with tempfile.TemporaryDirectory() as folder:  # give a folder of yours, and the same call goes on where it stopped
        result = train(
            model, task, settings, folder, on_event=show, threads=1
        )  # tensors this small gain nothing from more
    assert result.final is not None
    print(f"{task.bits_per_byte(result.final['loss']):.2f} bits a byte on text it has not seen\n")

    model.eval()
    prompt = "The "
    drawn = model.generate(torch.tensor([task.encode(prompt)]), 120, temperature=0.8, top_k=20, seed=0)
    print(prompt + task.decode([int(token) for token in drawn]))


if __name__ == "__main__":
    main(*sys.argv[1:2])
