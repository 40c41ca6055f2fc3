"""What a pre-trained model's perplexity becomes when its attention is converted: exactly, and as the REWA paper writes
it (its experiment 1).

Windows of the same tokens through one set of weights, with another operator in all layers each time: transformers' own
attention; the exact form, a dot product with three closed gates beside it; softmax of the cosine, (x - 1)/tau; and the
paper's exp(-arccos(x)/tau), tau = sqrt(2) tau_T, once with tau_T = sqrt(d) as a layer's scores are divided, once with
the tau_T of each head that makes typical cosines weigh what typical products did, once with the paper's one witness,
keys in the place of queries. Where the temperature is a head's own, factors of 1/2, 1, 2 and 4 are tried on other
tokens, and the best is taken. The error of attention is the Frobenius norm of the difference of T x T matrices, a head.
Then the gates are opened by a few steps of training, beside as many factors of queries.
"""

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zonal
from benchmarks import captured, common, page
from zonal import Operator, hf, mechanisms, store
from zonal.algebra.anchor import Row as RowAnchor
from zonal.algebra.link import Exp
from zonal.algebra.metric import Product, Sphere
from zonal.algebra.score import NegativeDistance
from zonal.data import open_source
from zonal.errors import ArgumentError

CALL = "bench convert"
PREDICTED = {"perplexity difference": 0.01, "attention error": 0.02}
ORIGINAL, EXACT, COSINE, ARCCOS, PLAIN, WITNESS = (
    "softmax, as it came",
    "rewa, gates closed",
    "cosine, (x - 1)/τ",
    "paper, τ of each head",
    "paper, τ = √(2d)",
    "paper, one witness",
)
GATES, CONTROL = "rewa, gates opened", "softmax, factors of queries"
SPACES = ("plane", "sphere", "hyperbolic")
FACTORS = (0.5, 1.0, 2.0, 4.0)
BLOCKS = 6  # factors of queries a head, for the control: as many as gates and weights
Row = dict[str, Any]


def arccos(temperature: float = 1.0) -> Operator:
    """exp(-arccos(x) / tau), a tau a head."""
    return Operator(
        NegativeDistance(Product((Sphere(),), weights=(1 / temperature,), normalise=False)),
        Exp(),
        RowAnchor(),
        name="arccos",
    )


def set_temperatures(operator: Operator, temperatures: Tensor) -> None:
    """tau (H,) of a ``cosine`` or ``arccos`` operator with a row a head."""
    with torch.no_grad():
        if "score_log_temperature" in operator.learned_parts:
            target = operator.learned_parts["score_log_temperature"]
            target.copy_(temperatures.log().view_as(target))
        else:
            target, weight = operator.learned_parts["score_weight"], 1 / temperatures.double()
            target.copy_((weight + torch.log(-torch.expm1(-weight))).view_as(target))


def matched(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """tau_T (H,) with cos/tau_T = c q.k for queries and keys (B, H, T, d) of mean length."""
    return 1 / (scale * q.norm(dim=-1).mean((0, 2)) * k.norm(dim=-1).mean((0, 2)))


def attention_weights(operator: Operator, q: Tensor, k: Tensor) -> Tensor:
    """W (B, H, T, T) of a causal call."""
    return zonal.attention(q, k, torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1), operator, causal=True)


class Subject:
    """A model of transformers whose attention is exchanged form by form; calibration: tokens (B, T) by which
    temperatures are chosen.

    Raises: ArgumentError for a model whose layers have no maps ``q_proj`` and ``k_proj``.
    """

    def __init__(self, model: Any, calibration: Tensor) -> None:
        self.model, self.calibration = model, calibration
        self.layers: list[Any] = [
            module for module in model.modules() if hasattr(module, "q_proj") and hasattr(module, "k_proj")
        ]
        if not self.layers:
            raise ArgumentError(
                f"{CALL}: a model whose layers of attention have maps q_proj and k_proj is required, such as "
                f"Llama, received {type(model).__name__}."
            )
        self.queries = [layer.q_proj.weight for layer in self.layers]
        self.scales = [float(layer.scaling) for layer in self.layers]
        self.captured: list[tuple[Tensor, Tensor, Tensor]] = []
        captured.transformers(CALL, Path()).AttentionInterface.register(
            "zonal_captured", captured.recording(self.captured)
        )
        model.set_attn_implementation("zonal_captured")
        self.nats(calibration)
        self.temperatures = [matched(q, k, scale) for (q, k, _), scale in zip(self.captured, self.scales, strict=True)]
        self.factors: dict[str, float] = {}

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits.float()

    def nats(self, tokens: Tensor) -> Tensor:
        """A token of each row of tokens (B, T), (B,) float64."""
        return torch.stack([F.cross_entropy(self.logits(row[None])[0, :-1], row[1:]).double() for row in tokens])

    def put(self, form: str) -> None:
        """Exchange the attention of all layers."""
        for own, layer in zip(self.queries, self.layers, strict=True):
            if form == WITNESS:  # queries are made by the keys' map
                keys = layer.k_proj.weight.detach().unflatten(0, (-1, layer.head_dim))
                own = nn.Parameter(
                    keys.repeat_interleave(own.shape[0] // layer.k_proj.weight.shape[0], 0).flatten(0, 1),
                    requires_grad=False,
                )
            layer.q_proj.weight = own
        if form == ORIGINAL:
            self.model.set_attn_implementation("sdpa")
        elif form == EXACT:
            hf.convert(self.model)
        elif form == PLAIN:
            hf.convert(self.model, lambda scale: arccos(math.sqrt(2) / scale))
        else:
            self._sharpened(form, self._factor(form))

    def _sharpened(self, form: str, factor: float) -> None:
        """A form whose temperatures are the heads' own, divided by a factor."""
        found = hf.convert(self.model, mechanisms.cosine() if form == COSINE else arccos())
        for operator, own in zip(found, self.temperatures, strict=True):
            set_temperatures(operator, own * (1 if form == COSINE else math.sqrt(2)) / factor)

    def _factor(self, form: str) -> float:
        """The best of FACTORS on the calibration tokens, found once."""
        if form not in self.factors:
            losses = {}
            for factor in FACTORS:
                self._sharpened(form, factor)
                losses[factor] = float(self.nats(self.calibration).mean())
            self.factors[form] = min(losses, key=losses.__getitem__)
        return self.factors[form]

    @torch.no_grad()
    def errors(self, form: str) -> Row:
        """||A - A_softmax||_F over layers and heads on the calibration tokens, from the queries and keys of the model
        as it came.
        """
        self.put(form)
        off, whole = [], []
        for (q, k, _), scale, operator in zip(self.captured, self.scales, hf.operators(self.model), strict=True):
            meant = attention_weights(mechanisms.softmax(scale), q, k)
            off.append((attention_weights(operator, k if form == WITNESS else q, k) - meant).norm(dim=(-2, -1)))
            whole.append(meant.norm(dim=(-2, -1)))
        error, size = torch.stack(off).flatten(), torch.stack(whole).flatten()
        return {
            "part": "attention",
            "form": form,
            "error": float(error.mean()),
            "least": float(error.min()),
            "most": float(error.max()),
            "relative": float((error / size).mean()),
            "matrices": error.numel(),
            "tokens": self.calibration.shape[1],
        }


def windows(text: str, tokenizer: Callable[[str], Any], count: int, length: int) -> Tensor:
    """(count, length) tokens from places evenly spread over a text.

    Raises: ArgumentError for a text that is too short.
    """
    rows = []
    for index in range(count):
        start = text.find(" ", len(text) * index // count) + 1
        rows.append(tokenizer(text[start : len(text) * (index + 1) // count][: 12 * length])["input_ids"][:length])
    if min(map(len, rows)) < length:
        raise ArgumentError(
            f"{CALL}: texts that hold {count} windows of {length} tokens are required. Ask for fewer (--windows) "
            "or shorter ones (--length)."
        )
    return torch.tensor(rows)


def differences(base: Tensor, other: Tensor, draws: int = 2000) -> tuple[float, float, float]:
    """Perplexity of ``other`` less that of ``base``, nats a token of the same windows (n,); and the central 95 % over
    windows drawn again.
    """
    drawn = torch.randint(len(base), (draws, len(base)), generator=torch.Generator().manual_seed(0))
    spread = (other[drawn].mean(1).exp() - base[drawn].mean(1).exp()).sort().values
    return (
        float(other.mean().exp() - base.mean().exp()),
        float(spread[int(0.025 * draws)]),
        float(spread[int(0.975 * draws) - 1]),
    )


def perplexities(subject: Subject, texts: Mapping[str, Tensor], base: dict[str, Tensor], row: Row) -> Iterator[Row]:
    """A row for each text of the model as it stands. base: nats of the model as it came, which the first call finds."""
    for name, tokens in texts.items():
        nats = subject.nats(tokens)
        change, low, high = differences(base.setdefault(name, nats), nats)
        yield {
            "text": name,
            **row,
            "perplexity": float(nats.mean().exp()),
            "difference": change,
            "low": low,
            "high": high,
            "tokens": tokens.numel(),
            "nats": nats.tolist(),
        }


def untrained(subject: Subject, form: str) -> Row:
    subject.put(form)
    return {"part": "perplexity", "form": form, "factor": subject.factors.get(form)}


def opened_gates(subject: Subject, tokens: Tensor, rate: float) -> Row:
    """Train gates and weights of the exact form, a step a row of tokens (n, T), and nothing else."""
    subject.put(EXACT)
    found = hf.operators(subject.model)
    row = trained(subject, [p for operator in found for p in operator.parameters()], tokens, rate)
    gates = torch.stack([operator.learned_parts["score_gate"].detach() for operator in found])
    return {
        **row,
        "form": GATES,
        "mean_gate": dict(zip(SPACES, gates.mean((0, 1)).tolist(), strict=True)),
        "open": dict(zip(SPACES, (gates > 0.01).float().mean((0, 1)).tolist(), strict=True)),
    }


def factored(subject: Subject, tokens: Tensor, rate: float) -> Row:
    """Train as many factors of queries, a few of each head's numbers sharing one. They stay in the weights."""
    subject.put(ORIGINAL)
    factors = [
        nn.Parameter(torch.ones(own.shape[0] // layer.head_dim, BLOCKS))
        for own, layer in zip(subject.queries, subject.layers, strict=True)
    ]

    def spread_out(factor: Tensor, size: int) -> Tensor:
        """(H, BLOCKS) -> (H size, 1)."""
        return factor[:, torch.arange(size) * BLOCKS // size].reshape(-1, 1)

    handles = [
        layer.q_proj.register_forward_hook(
            lambda module, inputs, output, factor=factor, size=layer.head_dim: output * spread_out(factor, size)[:, 0]
        )
        for factor, layer in zip(factors, subject.layers, strict=True)
    ]
    try:
        row = trained(subject, factors, tokens, rate)
    finally:
        for handle in handles:
            handle.remove()
    for own, layer, factor in zip(subject.queries, subject.layers, factors, strict=True):
        layer.q_proj.weight = nn.Parameter(
            own.detach() * spread_out(factor.detach(), layer.head_dim), requires_grad=False
        )
    return {**row, "form": CONTROL}


def trained(subject: Subject, parameters: Sequence[nn.Parameter], tokens: Tensor, rate: float) -> Row:
    subject.model.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimiser, losses, begun = torch.optim.Adam(parameters, lr=rate), [], time.process_time()
    for row in tokens:
        loss = subject.model(row[None], labels=row[None], use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return {
        "part": "trained",
        "steps": len(tokens),
        "length": tokens.shape[1],
        "rate": rate,
        "parameters": sum(p.numel() for p in parameters),
        "losses": losses,
        "processor_seconds": time.process_time() - begun,
    }


def show(row: Row) -> str:
    """One line for who watches."""
    if row["part"] == "attention":
        return (
            f"{row['form']:<28}||A - A_softmax||_F {row['error']:8.4f} ({row['least']:.4f} to "
            f"{row['most']:.4f}), {row['relative']:.3f} of ||A_softmax||_F"
        )
    return (
        f"{row['form']:<28}{row['text']:<12}perplexity {row['perplexity']:9.3f}  {row['difference']:+9.4f} "
        f"({row['low']:+.4f} to {row['high']:+.4f})"
    )


def summarised(rows: Sequence[Row], error: float) -> dict[str, Any]:
    """The largest difference of perplexity of each form, and its mean error of attention, beside what the paper
    predicts.
    """
    worst: dict[str, float] = {}
    for row in rows:
        if row["part"] == "perplexity":
            worst[row["form"]] = max(worst.get(row["form"], 0.0), abs(row["difference"]))
    attention = {row["form"]: row["error"] for row in rows if row["part"] == "attention"}
    return {
        "gate_error": error,
        "predicted": PREDICTED,
        "perplexity_difference": worst,
        "attention_error": attention,
        "exact_holds": worst[EXACT] < PREDICTED["perplexity difference"],
    }


def tables(rows: Sequence[Row]) -> list[page.Table]:
    """What the page shows."""
    changed = [row for row in rows if row["part"] == "perplexity"]
    texts = list(dict.fromkeys(row["text"] for row in changed))
    found = {(row["form"], row["text"], row["part"]): row for row in rows if "text" in row}

    def cell(row: Row) -> str:
        return (
            f"{row['perplexity']:.2f}"
            if row["form"] == ORIGINAL
            else f"{row['perplexity']:.2f} ({row['difference']:+.4g}: {row['low']:+.4g} to {row['high']:+.4g})"
        )

    forms = list(dict.fromkeys(row["form"] for row in changed))
    made = [
        page.Table(
            "Perplexity without training",
            f"Predicted: a difference of less than {PREDICTED['perplexity difference']}. In brackets the "
            "difference, and the central 95 % of it over windows drawn again.",
            ["form", *texts],
            [[form, *(cell(found[form, text, "perplexity"]) for text in texts)] for form in forms],
        ),
        page.Table(
            "Error of attention",
            f"$\\lVert A - A_{{\\text{{softmax}}}} \\rVert_F$ of a head's matrix, over all layers and heads. "
            f"Predicted: less than {PREDICTED['attention error']}.",
            ["form", "mean", "least", "most", "part of the norm"],
            [
                [row["form"], *(f"{row[name]:.3g}" for name in ("error", "least", "most", "relative"))]
                for row in rows
                if row["part"] == "attention"
            ],
        ),
    ]
    learned = [row for row in rows if row["part"] == "trained" and "text" in row]
    if learned:
        arms = {row["form"]: row for row in learned}
        about = "; ".join(
            f"{form}: {row['parameters']} numbers, {row['steps']} steps of {row['length']} tokens of {texts[0]}, "
            f"Adam, rate {row['rate']:g}"
            for form, row in arms.items()
        )
        made.append(
            page.Table(
                "After a few steps of training",
                f"{about}. The differences are from the model as it came.",
                ["form", *texts],
                [[form, *(cell(found[form, text, "trained"]) for text in texts)] for form in arms],
            )
        )
    return made


def write_page(options: argparse.Namespace) -> None:
    """The page beside the JSON."""
    target = Path(options.out)
    value = store.read_json(target)
    settings = value["settings"]
    quantised = (
        " Its weights were quantised to about four bits and are read back as float32."
        if options.model.suffix == ".gguf"
        else ""
    )
    about = [
        f"{settings['model']}, {settings['parameters']:,} parameters; {settings['windows']} windows of "
        f"{settings['length']} tokens of each text.{quantised}"
    ]
    about += [paragraph.replace("\n", " ") for paragraph in value["about"].split("\n\n")]
    command = " ".join(
        [
            "zonal bench convert --threads 1 --model",
            page.shown(options.model),
            *(f"--text {page.shown(Path(text))}" for text in options.text),
            f"--windows {settings['windows']} --length {settings['length']}",
        ]
    )
    page.write(
        target.with_suffix(".md"),
        "A pre-trained model with its attention exchanged",
        about,
        tables(value["rows"]),
        value,
        command,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and write its JSON and page; 0 when the exact form keeps the perplexity to what is
    predicted.
    """
    parser = common.parser(__doc__ or "", "convert", "page", "resume")
    parser.add_argument("--model", type=Path, required=True, help="folder of a model of Hugging Face, or a GGUF file")
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        help="a text beside the embedded novel: a UTF-8 file; may be given several times",
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=6, help="windows of each text (default: %(default)s)")
    parser.add_argument(
        "--steps",
        type=int,
        default=24,
        help="steps of training with gates open, and of the control; 0 for none (default: %(default)s)",
    )
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate of both (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.page:
        write_page(options)
        return 0
    run = common.Run(options, only_cpu="the model is read on the CPU")
    run.start["versions"]["transformers"] = captured.transformers(CALL, options.model).__version__
    if options.quick:
        options.length, options.windows, options.steps = 32, 2, 2
    model, tokenizer = captured.opened(CALL, options.model, "sdpa")
    whole = {
        source.title.partition(" (")[0].removesuffix(".txt"): "".join("".join(pieces) for pieces in source.documents())
        for source in map(open_source, ["novel", *options.text])
    }
    # the last fifth of the novel chooses temperatures and trains gates, and measures nothing
    kept = {name: text[: len(text) * 4 // 5] for name, text in whole.items()}
    rest = next(iter(whole.values()))[len(next(iter(kept.values()))) :]
    texts = {name: windows(text, tokenizer, options.windows, options.length) for name, text in kept.items()}
    settings = {
        "model": options.model.stem,
        "parameters": model.num_parameters(),
        "texts": list(texts),
        "length": options.length,
        "windows": options.windows,
        "factors": FACTORS,
        "rate": options.rate,
        "steps": options.steps,
    }
    rows = common.kept(run.target, options.resume, settings, run.device)
    subject = Subject(model, windows(rest, tokenizer, 1, options.length))
    subject.factors = {row["form"]: row["factor"] for row in rows if row.get("factor")}
    base = {row["text"]: torch.tensor(row["nats"], dtype=torch.float64) for row in rows if row["form"] == ORIGINAL}
    error = gate(subject, subject.calibration)
    todo = {
        form: functools.partial(untrained, subject, form) for form in (ORIGINAL, EXACT, COSINE, ARCCOS, PLAIN, WITNESS)
    }
    if options.steps:
        tokens = windows(rest, tokenizer, options.steps, min(options.length, 256))
        todo |= {
            form: functools.partial(train, subject, tokens, options.rate)
            for form, train in ((GATES, opened_gates), (CONTROL, factored))
        }
    for form, prepared in todo.items():
        if any(row["form"] == form for row in rows):
            continue
        row = prepared()
        measured = [
            *perplexities(subject, texts, base, row),
            *([subject.errors(form)] if row["part"] == "perplexity" and form != ORIGINAL else []),
        ]
        print("\n".join(map(show, measured)), flush=True)
        rows += measured
        # after each, since they take minutes
        if {ORIGINAL, EXACT} <= {row["form"] for row in rows}:
            run.write(rows, summarised(rows, error), settings)
    if run.target != "-":
        write_page(options)
    summary = summarised(rows, error)
    print(
        f"the exact form's perplexity is within {PREDICTED['perplexity difference']}: "
        f"{'holds' if summary['exact_holds'] else 'MISSED'}"
    )
    return 0 if summary["exact_holds"] else 1


def gate(subject: Subject, tokens: Tensor) -> float:
    """The error of the exact form's logits against transformers' own."""
    subject.put(ORIGINAL)
    reference = subject.logits(tokens)
    subject.put(EXACT)
    return common.gate("logits of the exact form", subject.logits(tokens), reference.double(), 1e-4)


if __name__ == "__main__":
    sys.exit(main())
