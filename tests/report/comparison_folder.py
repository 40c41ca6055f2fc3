"""Writes comparison folders that follow the schema of the training code, with made-up but plausible numbers."""

import contextlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zonal import report

OPERATORS = ("softmax", "sko", "squared_affine", "linear", "ska(power=0)")
SLUGS = {spec: spec.replace("(", "-").replace(")", "").replace("=", "-").replace("_", "-") for spec in OPERATORS}

# final accuracy, speed (tokens a second), grows with the text?
PROFILE = {
    "softmax": (0.991, 52_000, True),
    "sko": (0.973, 41_000, True),
    "squared_affine": (0.62, 47_500, False),
    "linear": (0.31, 66_000, False),
    "ska(power=0)": (0.988, 23_400, False),
}
MEMORY = {
    True: {"1024": 1_048_576, "16384": 16_777_216, "131072": 134_217_728},
    False: dict.fromkeys(("1024", "16384", "131072"), 140_352),
}


def curve(spec: str, layer: int, trained: bool, heads: int = 4) -> dict[str, Any]:
    """A kernel curve as ``Operator.learned`` gives it."""
    x = [i / 20 - 1 for i in range(41)]
    if spec != "sko":
        values = [math.exp(v) if spec == "softmax" else (v + 0.04) ** 2 if spec == "squared_affine" else v for v in x]
        return {"kernel_curve": {"x": x, "heads": [values] * heads}}
    shift = 0.4 * (layer + 1) if trained else 0.0
    lines = [[(0.2 + shift * head) * v + (1 + shift) * v ** (2 + head) for v in x] for head in range(heads)]
    return {"kernel_curve": {"x": x, "heads": lines}}


def learned(spec: str, trained: bool) -> list[dict[str, Any]]:
    layers = [{"layer": layer, "operator": spec, **curve(spec, layer, trained)} for layer in range(2)]
    if spec.startswith("ska"):
        for layer in layers:
            layer["ridge"] = [0.1, 0.093, 0.12, 0.101] if trained else [0.1] * 4
            layer["eta"] = [0.81, 1.02, 0.64, 0.9] if trained else [0.0] * 4
    if spec == "sko":
        for layer in layers:
            layer["degrees"] = [2.0, 3.0, 4.0, 5.0]
    return layers


def write_run(folder: Path, record: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_record(
    spec: str,
    seed: int,
    rate: float,
    final: float,
    *,
    text: bool,
    steps: int,
    status: str = "done",
    message: str | None = None,
) -> dict[str, Any]:
    _, speed, grows = PROFILE[spec]
    loss = 2.6 - final if text else -math.log(max(final, 1e-3)) * 1.3 + 0.02
    metrics: dict[str, Any] = {"loss": loss, "accuracy": final}
    if text:
        metrics |= {"bits_per_byte": loss / math.log(2), "slices": {}}
    else:
        pairs = {str(p): max(0.0, final - 0.012 * i * (1 + 20 * (1 - final))) for i, p in enumerate((4, 8, 16, 32))}
        metrics["slices"] = {"pairs": pairs, "length": {"64": final, "128": final * 0.97, "256": final * 0.9}}
    return {
        "operator": spec,
        "label": spec,
        "seed": seed,
        "learning_rate": rate,
        "status": status,
        "message": message,
        "steps_done": steps,
        "steps": steps,
        "parameters": 181_248 + 512 * OPERATORS.index(spec),
        "seconds": steps * 2048 / speed,
        "tokens_per_second": float(speed + 500 * seed),
        "peak_memory_bytes": 88_000_000 + 9_000_000 * OPERATORS.index(spec),
        "memory_bytes": MEMORY[grows],
        "final": metrics if status == "done" else None,
        "best": metrics if status == "done" else None,
        "steps_to": {}
        if text
        else {"0.5": 120 if final > 0.5 else None, "0.9": 240 + 20 * seed if final > 0.9 else None},
        "learned": learned(spec, True),
        "learned_before": learned(spec, False),
    }


def metrics_lines(spec: str, seed: int, final: float, *, text: bool, steps: int) -> list[dict[str, Any]]:
    noise = random.Random(f"{spec} {seed}")
    speed = PROFILE[spec][1]
    lines = []
    for step in range(1, steps + 1):
        part = step / steps
        grown = final / (1 + math.exp(-14 * (part - 0.35))) if not text else final * (1 - math.exp(-4 * part))
        loss = 5.4 - (5.4 - (2.6 - final)) * (1 - math.exp(-4 * part)) if text else 6.2 * (1 - grown) + 0.02
        shared = {"step": step, "tokens": step * 2048, "seconds": step * 2048 / speed}
        lines.append(
            {
                "kind": "train",
                **shared,
                "loss": loss * (1 + noise.gauss(0, 0.03)),
                "learning_rate": 1e-3,
                "gradient_norm": 1.0,
            }
        )
        if step % (steps // 15) == 0:
            lines.append(
                {
                    "kind": "eval",
                    **shared,
                    "loss": loss * (1 + noise.gauss(0, 0.01)),
                    "accuracy": min(1.0, max(0.0, grown + noise.gauss(0, 0.012))),
                }
            )
    return lines


def write_comparison(
    folder: Path,
    *,
    name: str = "mqar",
    operators: tuple[str, ...] = OPERATORS,
    seeds: tuple[int, ...] = (0, 1, 2),
    rates: tuple[float, ...] = (0.001, 0.003),
    steps: int = 300,
    finals: dict[tuple[str, int], float] | None = None,
    failed: dict[tuple[str, int], str] | None = None,
    changes: dict[str, Any] | None = None,
) -> Path:
    """A whole comparison folder.

    ``finals`` overrides (operator, seed) → accuracy at the best rate, ``failed`` → message; ``changes`` to
    comparison.json.
    """
    text = name == "text"
    finals, failed = finals or {}, failed or {}
    command = (
        f"zonal compare --task {'text --data novel' if text else 'mqar-demo'} --operators "
        f"'{','.join(operators)}' --seeds {len(seeds)} --budget 10m --out runs/x"
    )
    record = {
        "schema": 1,
        "title": "The text of a novel" if text else "Multi-query associative recall",
        "command": command,
        "created": "2026-01-31T12:00:00Z",
        "metric": "loss" if text else "accuracy",
        "task": {"name": name, "length": 256 if text else 64, "vocab_size": 256 if text else 512},
        "task_description": "Predict the next byte of Moby Dick; the last tenth is held out."
        if text
        else "Remember which value goes with which key: 4 to 32 pairs in up to 256 tokens, vocabulary 512.",
        "model": {
            "vocab_size": 512,
            "dim": 64,
            "layers": ["operator", "operator"],
            "heads": 4,
            "conv": 4,
            "rotary": False,
        },
        "training": {"steps": steps, "batch_size": 32, "weight_decay": 0.1, "betas": [0.9, 0.95], "dtype": "float32"},
        "operators": list(operators),
        "labels": list(operators),
        "seeds": list(seeds),
        "learning_rates": list(rates),
        "budget_seconds": 600.0,
        "steps": steps,
        "versions": {"zonal": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "device": {"name": "Some Processor", "cores": 2, "threads": 2, "memory_bytes": 8 * 2**30},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps(record | (changes or {})))
    for spec in operators:
        for seed in seeds:
            for rate in rates:
                run = folder / "runs" / SLUGS[spec] / f"seed-{seed}-lr-{rate:g}"
                message = failed.get((spec, seed))
                value = finals.get((spec, seed), PROFILE[spec][0] - 0.004 * seed * (1 + 5 * (1 - PROFILE[spec][0])))
                value -= 0.06 * rates.index(rate)
                if text:
                    value = value / 5 + 0.85
                if message is not None:
                    stopped = run_record(
                        spec, seed, rate, value, text=text, steps=steps // 2, status="failed", message=message
                    )
                    write_run(run, stopped, metrics_lines(spec, seed, value, text=text, steps=steps)[: steps // 2])
                else:
                    write_run(
                        run,
                        run_record(spec, seed, rate, value, text=text, steps=steps),
                        metrics_lines(spec, seed, value, text=text, steps=steps),
                    )
    return folder


def compared(
    folder: Path,
    values: dict[str, tuple[float, ...]],
    *,
    missing: Sequence[tuple[str, int]] = (),
    rates: tuple[float, ...] = (0.001,),
    changes: dict[str, Any] | None = None,
) -> report.Summary:
    """A comparison with the accuracies of each operator's seeds, of which ``missing`` failed."""
    finals = {(spec, seed): value for spec, each in values.items() for seed, value in enumerate(each)}
    seeds = tuple(range(max(len(each) for each in values.values())))
    write_comparison(
        folder, operators=tuple(values), finals=finals, rates=rates, steps=30, seeds=seeds,
        failed=dict.fromkeys(missing, "the loss became nan"), changes=changes,
    )  # fmt: skip
    return summary_of(folder)


def summary_of(folder: Path) -> report.Summary:
    return report.summarise(report.load(folder))


def drawn(page: Path) -> Any:
    """What the script of a page draws: a list of comparisons, or what another page has."""
    return json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])


@contextlib.contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """The record in a file, to be changed; then it is written again."""
    record = json.loads(path.read_text())
    yield record
    path.write_text(json.dumps(record))
