"""A converted model against its original and against transformers' Mamba-2 of the same number of parameters, on a CPU:
a training step, reading a prompt, decoding one token, and the bytes of the cache.

All three run in one process in float32 with one sequence. Reading and training steps take turns; what takes more than a
minute runs once, and each row says how often a model ran ("runs"). Their bytes are what the process grows by at its
peak. Mamba-2 has random weights: its speed does not depend on them. It has no kernels for CPUs, here or in
transformers. Speed of decoding is measured after a context of random keys and values (of random tokens for Mamba-2,
whose state has the same size after any context). Needs transformers:

    python -m benchmarks.converted --model runs/smol-memory --original SmolLM2-135M --threads 1
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from zonal.errors import ArgumentError
from zonal.hf import examine, pretrained

CALL = "bench converted"
STEP = 512  # tokens of a training step
PREFILL = (1024, 4096, 8192, 32768)
DECODING = (1024, 8192, 16384, 32768)
DECODED = 16  # tokens
PARTS = ("decoding", "prefill", "training")
LONG = 60.0  # seconds; what takes longer runs once


def mamba2(original: Any) -> Any:
    """transformers' Mamba-2 of the original's width and vocabulary, with so many layers that it has about as many
    parameters.
    """
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = original.config.get_text_config()
    width = config.hidden_size

    def made(layers: int) -> Any:
        return Mamba2ForCausalLM(
            Mamba2Config(
                vocab_size=config.vocab_size, hidden_size=width, num_hidden_layers=layers, num_heads=2 * width // 64,
                head_dim=64, n_groups=1, state_size=128, tie_word_embeddings=config.tie_word_embeddings,
            )
        )  # fmt: skip

    with torch.device("meta"):
        one, two = (made(layers).num_parameters() for layers in (1, 2))
    return made(round((original.num_parameters() - one) / (two - one)) + 1).eval()


def training_step(model: Any, tokens: Tensor) -> Callable[[], object]:
    """Loss, backward pass and AdamW of all parameters."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        optimiser.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimiser.step()

    return step


def reading(model: Any, tokens: Tensor) -> Callable[[], object]:
    """The logits of the last token."""
    return torch.no_grad()(lambda: model(tokens, use_cache=False, logits_to_keep=1))


def decoding(name: str, model: Any, length: int) -> dict[str, float]:
    """Seconds of a token after ``length`` others, and the bytes of what is kept."""
    if name != "mamba2":
        found = examine.decoding(model, length, DECODED)
        return {"seconds": 1 / found["tokens_per_second"], "bytes": found["bytes"]}
    token = torch.tensor([[1]])
    with torch.no_grad():
        # called cache_params, and cache since transformers 5.24
        _, (called, cache) = model(torch.ones(1, 64, dtype=torch.int64), use_cache=True).items()
        times = [
            common.once(lambda: model(token, **{called: cache}, use_cache=True), torch.device("cpu"))
            for _ in range(DECODED + 1)
        ]
    held = [x for layer in cache.layers for part in (layer.conv_states, layer.recurrent_states) for x in part.values()]
    return {"seconds": sum(times[1:]) / DECODED, "bytes": float(sum(x.nbytes for x in held))}


def timed(part: str, works: dict[str, Callable[[], object]], tokens: int, budget: float) -> dict[str, Any]:
    """A row: seconds of each model, the median of its runs in turns, and bytes at the peak. The first run of each model
    gives the bytes; its time counts if it took more than ``LONG`` seconds, and then there is no other run.
    """
    cpu = torch.device("cpu")
    times: dict[str, list[float]] = {name: [] for name in works}
    peaks = {
        name: float(common.peak_bytes(lambda own=times[name], work=work: own.append(common.once(work, cpu))))
        for name, work in works.items()
    }
    short = {name: work for name, work in works.items() if times[name][0] <= LONG}
    times |= common.interleaved(short, cpu, rounds=3, budget=budget)
    seconds = {name: common.Quantiles.of(each).median for name, each in times.items()}
    return _row(part, tokens, seconds, peaks, {name: len(each) for name, each in times.items()})


def _row(
    part: str, tokens: int, seconds: dict[str, float], found: dict[str, float], runs: dict[str, int]
) -> dict[str, Any]:
    ratios = {name: each / seconds["original"] for name, each in seconds.items()}
    print(
        f"{part}, {tokens} tokens: "
        + ", ".join(
            f"{name} {seconds[name]:.3g} s ({ratios[name]:.2f}), {found[name] / 1e6:.4g} MB, {runs[name]} runs"
            for name in ratios
        )
    )
    return {"part": part, "tokens": tokens, "seconds": seconds, "to_original": ratios, "bytes": found, "runs": runs}


def main(argv: Sequence[str]) -> int:
    """Run; 0 when it went through."""
    parser = common.parser(__doc__ or "", "converted", "budget", budget=20.0, by_machine=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of the converted model")
    parser.add_argument("--original", type=Path, required=True, help="folder or GGUF file of the model that it was")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default: all)")
    parser.add_argument("--longest", type=int, default=max(PREFILL), help="tokens read or kept at most (default: all)")
    options = parser.parse_args(argv)
    run = common.Run(options, only_cpu="a converted model is compared on the CPU")
    models = {
        "original": pretrained.opened(CALL, options.original)[0],
        "converted": pretrained.opened(CALL, options.model)[0],
    }
    models["mamba2"] = mamba2(models["original"])
    sizes = {name: model.num_parameters() for name, model in models.items()}
    if (
        models["original"].config.get_text_config().vocab_size
        != models["converted"].config.get_text_config().vocab_size
    ):
        raise ArgumentError(f"{CALL}: --model must be a conversion of --original; their vocabularies differ.")
    generator = torch.Generator().manual_seed(0)
    vocabulary = models["original"].config.get_text_config().vocab_size

    def tokens(length: int) -> Tensor:
        return torch.randint(vocabulary, (1, length), generator=generator)

    short = options.quick

    def lengths(part: str, usual: Sequence[int], quick: Sequence[int]) -> list[int]:
        measured = quick if short else usual
        return [length for length in measured if part in options.parts and length <= options.longest]

    rows = []
    for length in lengths("decoding", DECODING, (64, 128)):
        found = {name: decoding(name, model, length) for name, model in models.items()}
        seconds = {name: each["seconds"] for name, each in found.items()}
        held = {name: each["bytes"] for name, each in found.items()}
        rows.append(_row("decoding", length, seconds, held, dict.fromkeys(models, DECODED)))
    for length in lengths("prefill", PREFILL, (64,)):
        given = tokens(length)
        works = {name: reading(model, given) for name, model in models.items()}
        rows.append(timed("prefill", works, length, run.budget))
    if "training" in options.parts:
        given = tokens(64 if short else STEP)
        for model in models.values():
            model.train().requires_grad_(True)
        works = {name: training_step(model, given) for name, model in models.items()}
        rows.append(timed("training step", works, given.shape[1], run.budget))
    settings = {"model": options.model.name, "original": options.original.name, "dtype": "float32", "batch": 1}
    run.write(rows, {"parameters": sizes}, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
