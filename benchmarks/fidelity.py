"""How near feature maps come to spherical Yat attention: features a token against the relative l2 error of
row-normalised outputs.

Every map is measured on data of known form, or on the queries and keys of a trained model, against the float64
definition. Lines of
reference: the mean of all visible values, and the least error that any map of so many features can have that does not
look at the data. The file is written after every panel, and `--resume` goes on from it. `--preset slay-table10` repeats
the protocol of the paper's ablation beside the numbers it prints.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import captured, common, fidelity_page, fidelity_picture
from benchmarks.fidelity_maps import SCALES, TABLE_10, Candidate, candidates, table_10
from zonal import store
from zonal.algebra.link import SquaredAffine, Yat
from zonal.errors import ArgumentError
from zonal.evaluation import spread
from zonal.features import FeatureMap, average_error, distil, fidelity, mercer_bound, sample, square
from zonal.features.fidelity import (
    INPUTS,
    Inputs,
    OutputFidelity,
    Readout,
    Sample,
    feature_kernel,
    kernel_fidelity,
    kernel_value,
)

_BOUND_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_GATE = 1e-10
_RATE = 0.02
_TRAINED_ON = 256
# what a panel is called by, and how it was measured: a panel with other numbers here is measured again
_NAME = ("input", "dim", "eps", "length")
_PROTOCOL = (*_NAME, "heads", "seeds", "learn")
# (what is promised, d, eps, m, error): causal, independent uniform unit vectors, scores never negative
CLAIMS = (("squared affine", 32, 0.01, 600, 0.25), ("recommended", 8, 1.0, 512, 0.10))


def gate() -> dict[str, float]:
    """The measure itself: polynomial features of a polynomial kernel have no error."""
    data = sample("iid", 2, 64, 8, 0)
    error = fidelity(square(0.3), {}, data, SquaredAffine(0.3)).error
    if not error < _GATE:
        raise common.GateError(
            f"exact features are off by {error:.3g} of the outputs, {_GATE:g} is allowed; nothing was measured"
        )
    return {"exact features": error}


def buffers_for(
    found: Candidate, seen: Sample, eps: float, seed: int, steps: int, causal: bool
) -> dict[str, torch.Tensor]:
    """What the map draws for a seed, chosen from and trained on ``seen``."""
    heads, _, dim = seen.k.shape
    drawn = found.features.prepare(dim, heads, seed=seed, dtype=torch.float64, keys=seen.k)
    if not found.trained:
        return drawn
    yat = Yat(eps)
    single = {name: value.float() for name, value in drawn.items()}
    q, k = (x[None, :, :_TRAINED_ON].float() for x in (seen.q, seen.k))
    trained = distil(
        found.features,
        single,
        q,
        k,
        lambda x: kernel_value(yat, x.clamp(-1, 1)),
        causal=causal,
        steps=steps,
        rate=_RATE,
    )
    return {name: value.double() for name, value in trained.items()}


def point(
    found: Candidate,
    data: Sequence[tuple[Sample, Sample]],
    eps: float,
    steps: int,
    modes: Sequence[bool],
    readouts: Sequence[Readout] | None = None,
) -> dict[str, Any]:
    """One map over all seeds: errors, shares of negative values and of rows that cannot be divided."""
    features: FeatureMap = found.features
    dim = data[0][0].q.shape[-1]
    row: dict[str, Any] = {
        "family": found.family, "label": found.label, "m": features.dimension(dim), "flops": features.flops(dim),
        "positive": features.positive,
        "claim": features.claim.kind,
    }  # fmt: skip
    results: dict[bool, list[OutputFidelity]] = {causal: [] for causal in modes}
    for seed, (measured, seen) in enumerate(data):
        kernel = None
        for causal in modes:
            if kernel is None or found.trained:  # what is trained is trained for a mask
                kernel = feature_kernel(features, buffers_for(found, seen, eps, seed, steps, causal), measured)
            results[causal].append(
                kernel_fidelity(kernel, measured, Yat(eps), causal=causal, readout=readouts[seed] if readouts else None)
            )
    for causal, of_seeds in results.items():
        total = spread([result.error for result in of_seeds])
        row["causal" if causal else "bidirectional"] = {
            "error": _short(total.mean), "sd": _short(total.deviation),
            "negative": _short(max(result.negative for result in of_seeds)),
            "unsafe": _short(max(result.unsafe for result in of_seeds)),
        }  # fmt: skip
    return row


def _short(value: float | None) -> float | None:
    """Six digits: a file of thousands of rows stays small, and their seeds differ in the second."""
    return None if value is None else float(f"{value:.6g}")


def references(
    data: Sequence[tuple[Sample, Sample]], eps: float, modes: Sequence[bool], readouts: Sequence[Readout] | None = None
) -> dict[str, Any]:
    """The mean of all visible values, and the bound, which holds for vectors without a preferred direction."""
    dim = data[0][0].q.shape[-1]
    average = {
        "causal" if causal else "bidirectional": _short(
            spread(
                [
                    average_error(measured, Yat(eps), causal=causal, readout=readouts[seed] if readouts else None)
                    for seed, (measured, _) in enumerate(data)
                ]
            ).mean
        )
        for causal in modes
    }
    return {
        "average": average,
        "bound": {
            "m": list(_BOUND_SIZES),
            "error": [_short(mercer_bound(Yat(eps), dim, size)) for size in _BOUND_SIZES],
        },
    }


def panels(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Callable[[], list[tuple[Sample, Sample]]]]]:
    """(what it is and how it is measured, the data to measure and other data of the kind, for each seed)."""
    common_part = {"length": options.length, "heads": options.heads, "seeds": options.seeds, "learn": options.learn}
    if options.checkpoint is not None:
        for name, measured, seen in captured.samples(options.checkpoint, options.length, options.layers):
            heads, length, dim = measured.q.shape
            for eps in options.eps:
                about = {
                    "input": name,
                    "dim": dim,
                    "eps": eps,
                    "length": length,
                    "heads": heads,
                    "seeds": 1,
                    "learn": options.learn,
                }
                yield about, functools.partial(list, [(measured, seen)])
        return
    for dim in options.dims:
        for eps in options.eps:
            for kind in options.inputs:
                yield (
                    {"input": kind, "dim": dim, "eps": eps, **common_part},
                    functools.partial(drawn, kind, dim, options),
                )


def drawn(kind: Inputs, dim: int, options: argparse.Namespace) -> list[tuple[Sample, Sample]]:
    """Data of a kind for every seed."""
    return [
        tuple(sample(kind, options.heads, options.length, dim, start + seed) for start in (0, 1000))
        for seed in range(options.seeds)
    ]  # type: ignore[misc]


def sweep(
    options: argparse.Namespace, kept: Sequence[dict[str, Any]], keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """One row for each map and panel, the references in a row of their own. ``keep`` gets all rows after every panel.

    kept: rows of earlier sweeps. Panels among them that were measured in the same way are not measured again.
    """
    names = ["causal" if causal else "bidirectional" for causal in options.modes]
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in kept:
        found.setdefault(_called(row), []).append(row)
    for about, data in panels(options):
        reference = found.get(_called(about), [{}])[0]
        if all(reference.get(key) == about[key] for key in _PROTOCOL) and all(
            name in reference["average"] for name in names
        ):
            continue
        began = time.perf_counter()
        samples, name = data(), {key: about[key] for key in _NAME}
        rows = [{**about, "family": "reference", **references(samples, about["eps"], options.modes)}]
        for candidate in candidates(about["dim"], about["eps"], samples[0][1], options.learn > 0):
            rows.append({**name, **point(candidate, samples, about["eps"], options.learn, options.modes)})
        print(
            f"\nd = {about['dim']}, eps = {about['eps']:g}, {about['input']}, T = {about['length']} "
            f"({time.perf_counter() - began:.0f} s)"
        )
        print(listing(rows[1:], rows[0], options.modes), flush=True)
        found[_called(about)] = rows
        keep(_in_order(found))
    return _in_order(found)


def _called(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in _NAME)


def _in_order(found: Mapping[tuple[Any, ...], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Panels of known form by kind, size and eps, then those of models as they came."""

    def place(called: tuple[Any, ...]) -> tuple[Any, ...]:
        kind, dim, eps, length = called
        return (INPUTS.index(kind), dim, eps, length) if kind in INPUTS else (len(INPUTS), 0, 0, 0)

    return [row for called in sorted(found, key=place) for row in found[called]]


def claims(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The best map within each of CLAIMS whose panel is among ``rows``, and whether it keeps the promise."""
    said = []
    for name, dim, eps, size, error in CLAIMS:
        fitting = [
            row for row in rows
            if row["family"] != "reference" and (row["input"], row["dim"], row["eps"]) == ("iid", dim,
            eps) and row["m"] <= size and row["positive"] and "causal" in row
        ]  # fmt: skip
        if fitting:
            best = min(fitting, key=lambda row: row["causal"]["error"])
            said.append(
                {
                    "claim": name, "dim": dim, "eps": eps, "m_at_most": size, "error_at_most": error,
                    "map": f"{best['family']}, {best['label']}", "m": best["m"],
                    "error": best["causal"]["error"], "met": best["causal"]["error"] <= error,
                }
            )  # fmt: skip
    return said


def listing(rows: Sequence[dict[str, Any]], reference: dict[str, Any], modes: Sequence[bool]) -> str:
    """The maps, best first."""
    names = ["causal" if causal else "bidirectional" for causal in modes]

    def cell(row: dict[str, Any], name: str) -> str:
        value = row[name]
        return (
            f"{value['error']:.3g}"
            + ("" if value["sd"] is None else f" ± {value['sd']:.1g}")
            + (f" ({value['unsafe']:.1%} unsafe)" if value["unsafe"] else "")
        )

    body = [
        [
            row["family"],
            row["label"],
            str(row["m"]),
            "yes" if row["positive"] else "no",
            *(cell(row, name) for name in names),
        ]
        for row in sorted(rows, key=lambda row: row[names[0]]["error"])
    ]
    average = ["mean of all values", "", "1", "yes", *(f"{reference['average'][name]:.3g}" for name in names)]
    return common.table([*body, average], ["map", "", "m", "scores >= 0", *names])


def repeat_table_10(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The paper's ablation: T, R, D and P as printed; one layer of width 256 with 8 heads and random tied projections.

    The paper states neither eps, causality, biases nor inputs: eps = 0.01, normal inputs, both masks, without and with
    biases are ours.
    """
    rows: list[dict[str, Any]] = []
    width, heads, eps = 256, 8, options.eps[0]
    names = ["causal" if causal else "bidirectional" for causal in options.modes]
    for scale in SCALES[:1] if options.quick else SCALES:
        length, printed = TABLE_10[scale]
        for biases in (False, True):
            about = {
                "scale": scale,
                "length": length,
                "eps": eps,
                "dim": width // heads,
                "input": f"{scale}, {'biases' if biases else 'no biases'}",
            }
            layers = [layer(width, heads, length, seed, biases) for seed in range(options.seeds)]
            data, readouts = [(inputs, inputs) for inputs, _ in layers], [readout for _, readout in layers]
            reference = {**about, "family": "reference", **references(data, eps, options.modes, readouts)}
            found = [
                {
                    **about,
                    **point(candidate, data, eps, 0, options.modes, readouts),
                    "paper": printed.get(candidate.family),
                }
                for candidate in table_10(scale, eps, width // heads)
            ]
            body = [
                [
                    row["family"],
                    str(row["m"]),
                    *(f"{row[name]['error']:.3g}" for name in names),
                    "" if row["paper"] is None else f"{row['paper']:.4g}",
                ]
                for row in found
            ]
            body.append(["mean of all values", "1", *(f"{reference['average'][name]:.3g}" for name in names), ""])
            print(f"\n{about['input']}: T = {length}, eps = {eps:g}, {heads} heads of {width // heads}")
            print(common.table(body, ["map", "m", *names, "paper"]), flush=True)
            rows += [reference, *found]
    return rows


def layer(width: int, heads: int, length: int, seed: int, biases: bool) -> tuple[Sample, Readout]:
    """A layer's q, k, v for normal inputs, and its output projection; all weights uniform within 1/sqrt(width), as
    torch's linear layers start.
    """
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(length, width, generator=draw, dtype=torch.float64)

    def uniform(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=draw, dtype=torch.float64) * 2 - 1) / math.sqrt(width)

    def linear() -> Readout:
        weight, bias = uniform(width, width), uniform(width) * biases
        return lambda inputs: inputs @ weight + bias

    query, key, value, output = (linear() for _ in range(4))
    unit = torch.nn.functional.normalize
    q, k, v = (project(x).unflatten(1, (heads, -1)).transpose(0, 1) for project in (query, key, value))
    return Sample(unit(q, dim=-1), unit(k, dim=-1), v), lambda y: output(y.transpose(0, 1).flatten(1))


def numbers(option: str, text: str, kind: type, least: float) -> list[Any]:
    """Comma-separated numbers, each > ``least``. Raises: ArgumentError naming the option."""
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(value > least and math.isfinite(value) for value in values):
        raise ArgumentError(
            f"bench fidelity: {option} takes numbers > {least:g} with commas between them, received {text!r}."
        )
    return values


def _parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__ or "", "fidelity", "resume")
    parser.add_argument("--dims", default="8,16,32,64", help="sizes of q and k (default: %(default)s)")
    parser.add_argument("--eps", default=None, help="of the Yat kernel (default: 0.001,0.01,0.1,1; 0.01 for a preset)")
    parser.add_argument("--inputs", default=",".join(INPUTS), help="kinds of data (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="T (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=2, help="heads measured together (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=None, help="of data and of maps (default: 2; 3 for a preset)")
    parser.add_argument(
        "--learn",
        type=int,
        default=100,
        metavar="STEPS",
        help="training steps of learned maps; 0 leaves them out (default: %(default)s)",
    )
    parser.add_argument(
        "--mask", choices=("causal", "bidirectional", "both"), default=None, help="default: causal; both for a preset"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=None,
        help=(
            "measure on q, k, v of a trained model (checkpoint or folder of a run, Hugging Face folder, GGUF "
            "file) or of a safetensors file"
        ),
    )
    parser.add_argument("--layers", default=None, help="with --checkpoint: which layers, from 1 (default: all)")
    parser.add_argument("--preset", choices=("slay-table10",), default=None, help="repeat a published protocol")
    parser.add_argument(
        "--page", default="auto", help="where the chart goes; '-' writes none (default: beside the JSON)"
    )
    parser.add_argument("--picture", type=Path, default=None, help="draw the panels of the documentation as SVG")
    return parser


def _settled(options: argparse.Namespace) -> argparse.Namespace:
    """The options with their defaults, lists as tuples. Raises: ArgumentError for what does not fit."""
    options.seeds = options.seeds if options.seeds is not None else 3 if options.preset else 2
    for name in ("length", "heads", "seeds"):
        if getattr(options, name) < 1:
            raise ArgumentError(f"bench fidelity: --{name} must be >= 1, received {getattr(options, name)}.")
    if options.learn < 0:
        raise ArgumentError(f"bench fidelity: --learn must be >= 0, received {options.learn}.")
    if options.preset and (options.resume or options.checkpoint or options.picture):
        raise ArgumentError(
            "bench fidelity: --preset has data of its own and is measured as a whole; leave --resume, "
            "--checkpoint and --picture out."
        )
    options.dims = numbers("--dims", options.dims, int, 1)
    options.eps = numbers("--eps", options.eps or ("0.01" if options.preset else "0.001,0.01,0.1,1"), float, 0)
    options.layers = None if options.layers is None else numbers("--layers", options.layers, int, 0)
    options.inputs = options.inputs.split(",")
    if not set(options.inputs) <= set(INPUTS):
        raise ArgumentError(
            f"bench fidelity: --inputs takes {', '.join(INPUTS)}, received {','.join(options.inputs)!r}."
        )
    options.modes = {"causal": (True,), "bidirectional": (False,), "both": (True, False)}[
        options.mask or ("both" if options.preset else "causal")
    ]
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when it ran."""
    options = _settled(_parser().parse_args(argv))
    if options.quick:
        options.dims, options.eps, options.inputs, options.seeds = (
            options.dims[:1],
            options.eps[:1],
            options.inputs[:1],
            1,
        )
        options.length, options.heads, options.learn = min(options.length, 64), 1, min(options.learn, 2)
    run = common.Run(options, only_cpu="errors are measured in float64 on the CPU")
    errors = gate()
    settings = {
        "dims": options.dims, "eps": options.eps, "inputs": options.inputs, "T": options.length, "heads": options.heads,
        "seeds": options.seeds,
        "learn": options.learn, "preset": options.preset,
        "checkpoint": None if options.checkpoint is None else options.checkpoint.name, "dtype": "float64",
    }  # fmt: skip

    def keep(rows: list[dict[str, Any]]) -> None:
        run.write(rows, {"errors": errors, "claims": claims(rows)}, settings, options.out)

    if options.preset:
        rows = repeat_table_10(options)
    else:
        rows = sweep(options, common.kept(options.out, options.resume, None, run.device), keep)
    keep(rows)
    for claim in claims(rows):
        print(
            f"{'kept' if claim['met'] else 'BROKEN'}: {claim['claim']}, d = {claim['dim']}, eps = "
            f"{claim['eps']:g}, iid, causal: {claim['error']:.3g} with m = {claim['m']} "
            f"({claim['map']}); at most {claim['error_at_most']:g} with m <= {claim['m_at_most']} is promised"
        )
    page = (
        str(Path(options.out).with_suffix(".html")) if options.page == "auto" and options.out != "-" else options.page
    )
    if page not in ("-", "auto"):
        store.write_bytes(page, fidelity_page.html(rows).encode())
        print(f"wrote {page}")
    if options.picture is not None:
        fidelity_picture.write(options.picture, rows)
        print(f"wrote {options.picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
