"""What merging tokens costs in accuracy and gains in speed: a vision transformer on Fashion-MNIST, at shares of 0 to
60% of its tokens.

Two models from the same initial weights see the same images in the same order: one is trained on all tokens, the other
on a share that is drawn anew for every update. Both are tested with each share merged away, spread over the layers
(even) or at once before the second (early). Speed is that of classifying on the CPU, by schedule and share, in
turns with the model that merges nothing; it is the same for both models. Training goes on where it was stopped: run the
same command again.
"""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import common, merging_page
from zonal.data.images import FASHION_MNIST, Images, fashion_mnist
from zonal.models import VisionConfig, VisionEncoder
from zonal.nn import Merged, MergeSchedule
from zonal.training.checkpoint import Progress, load_checkpoint, save_checkpoint, set_random_states
from zonal.training.optimiser import adamw, set_learning_rate
from zonal.training.schedule import learning_rate
from zonal.training.step import clip_gradient

SCHEDULES: dict[str, Callable[[float, int], MergeSchedule]] = {"even": MergeSchedule.even, "early": MergeSchedule.early}
TRAINED = {"all tokens": False, "merged tokens": True}

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and its training; ``--quick`` takes small ones."""

    patch: int = 4
    dim: int = 64
    layers: int = 4
    heads: int = 4
    steps: int = 937
    batch: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    shares: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    tested: int = 250
    seed: int = 0


QUICK = Sizes(patch=2, dim=16, layers=2, heads=2, steps=6, batch=16, shares=(0.0, 0.3, 0.6), tested=50)


def configured(sizes: Sizes, image: int) -> VisionConfig:
    return VisionConfig(
        image=image, patch=sizes.patch, dim=sizes.dim, layers=("softmax",) * sizes.layers, heads=sizes.heads
    )


def rows_of(step: int, sizes: Sizes, count: int) -> Tensor:
    """Which images an update sees: every image once before any comes again."""
    each = count // sizes.batch
    order = torch.randperm(count, generator=torch.Generator().manual_seed(sizes.seed * 1000 + step // each))
    return order[(step % each) * sizes.batch :][: sizes.batch]


def share_of(step: int, sizes: Sizes) -> float:
    """The share that an update merges away, where training merges."""
    generator = torch.Generator().manual_seed(sizes.seed * 1_000_000 + step)
    return sizes.shares[int(torch.randint(len(sizes.shares), (), generator=generator))]


def train(name: str, images: Images, sizes: Sizes, folder: Path, every: int = 100) -> tuple[VisionEncoder, Progress]:
    """One of the two models, from its checkpoint on where there is one."""
    config = configured(sizes, images.pixels.shape[-1])
    model = VisionEncoder(config, sizes.seed)
    optimiser = adamw(model, weight_decay=sizes.weight_decay, betas=(0.9, 0.99))
    identity = {
        "identity": {
            "model": config.to_dict(),
            "training": {**dataclasses.asdict(sizes), "shares": list(sizes.shares)},
            "merges": TRAINED[name],
            "images": images.sha256,
        }
    }
    path = folder / f"{name.replace(' ', '-')}.safetensors"
    progress = Progress(threads=torch.get_num_threads())
    if path.exists():
        progress, random_states = load_checkpoint(path, model, optimiser, identity)
        set_random_states(random_states, images.pixels.device)
    while progress.step < sizes.steps:
        start = time.perf_counter()
        rows = rows_of(progress.step, sizes, len(images))
        merge = SCHEDULES["even"](share_of(progress.step, sizes), sizes.layers) if TRAINED[name] else None
        total, count = model.loss(images.scaled(rows), images.labels[rows], merge=merge)
        optimiser.zero_grad()
        (total / count).backward()
        clip_gradient(model, 1.0)
        set_learning_rate(
            optimiser,
            learning_rate(
                progress.step, steps=sizes.steps, peak=sizes.learning_rate, warmup_ratio=0.05, min_ratio=0.02
            ),
        )
        optimiser.step()
        progress.step += 1
        progress.seconds += time.perf_counter() - start
        if progress.step % every == 0 or progress.step == sizes.steps:
            save_checkpoint(path, model, optimiser, progress, identity)
            print(
                f"{name}: {progress.step} of {sizes.steps} updates, loss {total.item() / count:.3f}, "
                f"{progress.seconds:.0f} s",
                flush=True,
            )
    return model.eval(), progress


def schedules(sizes: Sizes) -> Iterator[tuple[str, float, MergeSchedule]]:
    """Name, share and schedule of everything that is tested; without merging both schedules are the same one."""
    for name, make in SCHEDULES.items():
        for share in sizes.shares:
            yield name, share, make(share, sizes.layers)


@torch.no_grad()
def accuracy(model: VisionEncoder, images: Images, merge: MergeSchedule, size: int) -> float:
    """The share of images that are named rightly."""
    right = 0
    for begin in range(0, len(images), size):
        part = slice(begin, begin + size)
        right += int((model(images.scaled(part), merge=merge).argmax(-1) == images.labels[part]).sum())
    return right / len(images)


@torch.no_grad()
def gate(model: VisionEncoder, images: Images, sizes: Sizes) -> float:
    """The largest error of layers on merged tokens as they run here, against the dense definition in float64 on the
    same buckets.

    The buckets are given: which of two pairs that are equally alike is joined may differ with the last digit.
    """
    double = VisionEncoder(model.config, sizes.seed).double()
    double.load_state_dict(model.state_dict())
    errors, whole = [], Merged.of(model.tokens(images.scaled(slice(0, 16))))
    for share in sizes.shares:
        state = whole.without(int(share * model.config.tokens))
        for block, exact in zip(model.encoder.blocks, double.encoder.blocks, strict=True):
            wanted = exact(state.x.double(), mass=state.mass.double(), path="dense")
            state = state.holding(block(state.x, mass=state.mass))
            errors.append(common.gate(f"share {share}", state.x, wanted, 1e-4))
    return max(errors)


@torch.no_grad()
def speeds(model: VisionEncoder, images: Images, sizes: Sizes, device: torch.device, budget: float) -> Iterator[Row]:
    """Images a second by schedule and share, and the time as a part of that without merging."""
    pixels = images.scaled(slice(0, sizes.tested))
    cases = {f"{name} {share}": (name, share, merge) for name, share, merge in schedules(sizes)}
    works = {label: functools.partial(model, pixels, merge=merge) for label, (_, _, merge) in cases.items()}
    found = common.interleaved(works, device, rounds=9, budget=budget)
    for label, (name, share, _) in cases.items():
        seconds, whole = found[label], found[f"{name} 0.0"]
        yield {
            "part": "speed", "schedule": name, "share": share,
            "tokens": list(SCHEDULES[name](share, sizes.layers).counts(model.config.tokens)),
            "seconds": dataclasses.asdict(common.Quantiles.of(seconds)),
            "images_per_second": len(pixels) / min(seconds),
            "speedup": common.Quantiles.of([a / b for a, b in zip(whole, seconds, strict=True)]).median,
        }  # fmt: skip


def summarised(rows: list[Row]) -> dict[str, Any]:
    """For each model and schedule the largest share that costs at most one point of accuracy, and the speed there."""
    speed = {(row["schedule"], row["share"]): row["speedup"] for row in rows if row["part"] == "speed"}
    found: dict[str, Any] = {}
    for model in TRAINED:
        whole = next(
            (
                row["accuracy"]
                for row in rows
                if row["part"] == "accuracy" and row["model"] == model and row["share"] == 0
            ),
            math.nan,
        )
        for schedule in SCHEDULES:
            good = [
                row["share"]
                for row in rows
                if row["part"] == "accuracy"
                and row["model"] == model
                and row["schedule"] == schedule
                and row["accuracy"] >= whole - 0.01
            ]
            share = max(good, default=0.0)
            found[f"trained on {model}, {schedule}"] = {
                "accuracy": whole,
                "share_within_a_point": share,
                "speedup": speed[schedule, share],
            }
    return found


def show(row: Row) -> str:
    """One line for who watches."""
    if row["part"] == "accuracy":
        return f"accuracy  trained on {row['model']:<14} {row['schedule']:<6}{row['share']:4.0%}  {row['accuracy']:.4f}"
    return (
        f"speed     {row['schedule']:<6}{row['share']:4.0%}  {row['images_per_second']:8.0f} images/s  "
        f"{row['speedup']:.2f}x  tokens {row['tokens']}"
    )


def main(argv: list[str] | None = None) -> int:
    """Train, test and time, and write JSON and page; 0 when all is finite."""
    parser = common.parser(__doc__ or "", "merging", "budget", "page", budget=60.0)
    parser.add_argument(
        "--data",
        default=str(FASHION_MNIST),
        help=(
            "folder of Fashion-MNIST, or of another set laid out as MNIST (default: %(default)s, where the "
            "Debian package is)"
        ),
    )
    parser.add_argument("--work", default="runs/merging", help="folder of the checkpoints (default: %(default)s)")
    parser.add_argument("--train-only", action="store_true", help="stop after training")
    options = parser.parse_args(argv)
    if options.page:
        common.write_page(options.out, merging_page.html)
        return 0
    run = common.Run(options, only_cpu="models are trained and timed on the CPU")
    device = run.device
    sizes = QUICK if options.quick else Sizes()
    learnt, tested = fashion_mnist(options.data)
    made = {name: train(name, learnt, sizes, Path(options.work)) for name in TRAINED}
    if options.train_only:
        return 0
    models = {name: model for name, (model, _) in made.items()}
    first = next(iter(models.values()))
    error = gate(first, tested, sizes)
    rows: list[Row] = []
    for row in speeds(first, tested, sizes, device, run.budget):
        rows.append(row)
        print(show(row), flush=True)
    for name, model in models.items():
        for schedule, share, merge in schedules(sizes):
            rows.append(
                {
                    "part": "accuracy",
                    "model": name,
                    "schedule": schedule,
                    "share": share,
                    "accuracy": accuracy(model, tested, merge, sizes.tested),
                }
            )
            print(show(rows[-1]), flush=True)
    summary = {
        "error": error, "parameters": first.num_parameters(), "images": [len(learnt), len(tested)], **summarised(rows),
        "training_seconds": {name: round(progress.seconds) for name, (_, progress) in made.items()},
    }  # fmt: skip
    run.write(rows, summary, dataclasses.asdict(sizes))
    common.write_page(run.target, merging_page.html)
    return 0 if math.isfinite(error) else 1


if __name__ == "__main__":
    sys.exit(main())
