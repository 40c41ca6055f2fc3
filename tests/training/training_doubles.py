"""A task of a few lines and a model of a few numbers, so that whole runs take a second."""

import json
from pathlib import Path

import torch

from zonal.models import ModelConfig, build
from zonal.tasks.task import Batch, Task
from zonal.training import TrainConfig


class Recall(Task):
    """Which token followed the first token the first time? Learned by looking back one place."""

    name = "recall double"
    metric = "accuracy"

    def __init__(self, vocab_size=16, length=8, evaluation_rows=24, poison_step=None, first_seed=0):
        self.vocab_size, self.length, self.evaluation_rows = vocab_size, length, evaluation_rows
        self.poison_step = poison_step
        self.first_seed = first_seed

    def _batch(self, rows, seed):
        generator = torch.Generator().manual_seed(seed + self.first_seed)
        tokens = torch.randint(self.vocab_size, (rows, self.length), generator=generator)
        targets = torch.full_like(tokens, -100)
        targets[:, 1:] = tokens[:, :-1]
        targets[:, 1:][torch.rand(rows, self.length - 1, generator=generator) < 0.3] = -100
        targets[:, -1] = tokens[:, -2]
        return Batch(tokens, targets, {"length": [self.length] * rows, "pairs": (tokens[:, 0] % 3).tolist()})

    def train_batch(self, step, batch_size, seed):
        return self._batch(batch_size, 1 + seed * 1_000_003 + step)

    def evaluation_batches(self, batch_size):
        whole = self._batch(self.evaluation_rows, 0)
        for start in range(0, self.evaluation_rows, batch_size):
            part = slice(start, start + batch_size)
            yield Batch(
                whole.tokens[part], whole.targets[part], {name: values[part] for name, values in whole.slices.items()}
            )

    def config(self):
        return {"name": self.name, "vocab_size": self.vocab_size, "length": self.length, "first_seed": self.first_seed}

    def describe(self):
        return "a double"

    def decode(self, tokens):
        return None


def tiny_model(operator="softmax", seed=0, layers=1, vocab_size=16):
    config = ModelConfig(
        vocab_size=vocab_size, dim=16, layers=(operator,) * layers, heads=2, mlp="none", conv=2, init_std=0.1
    )
    return build(config, seed)


def tiny_config(**changes):
    settings = {
        "steps": 12, "batch_size": 8, "learning_rate": 1e-2, "eval_every": 5, "checkpoint_every": 4,
        "checkpoint_seconds": None,
        "tensorboard": False,
    }  # fmt: skip
    return TrainConfig(**{**settings, **changes})


def lines(directory):
    """metrics.jsonl without what the clock wrote."""
    found = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "crc32")
    return [json.dumps({name: value for name, value in line.items() if name not in timed}) for line in found]
