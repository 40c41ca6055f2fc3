"""The experiments that the REWA paper plans, scaled to a small machine, and what the paper predicts of them."""

import dataclasses

from zonal.cli.options import ModelOptions, TaskOptions, TrainingOptions
from zonal.cli.preset import Preset
from zonal.report.published import Published

_SOURCE = "Phadke, The Universal REWA Attention Framework, 2025, section 8, a plan of experiments with predictions: the paper has no results"
_WIDTH = 16
_PLANE, _SPHERE, _HYPERBOLIC, _PRODUCT = (
    f"rewa(parts={parts})" for parts in ((_WIDTH, 0, 0), (0, _WIDTH, 0), (0, 0, _WIDTH), (6, 5, 5))
)
_HALF = f"rewa(parts={(3, 3, 2)})"
_FUNCTIONAL, _OPERATOR = "rewa_functional", "rewa_operator(size=4)"
_GEOMETRIES = {
    "Softmax": "softmax", "REWA, plane alone": _PLANE, "REWA, sphere alone": _SPHERE, "REWA, hyperbolic alone": _HYPERBOLIC, "REWA, product": _PRODUCT,
    "REWA, product, half the width": _HALF,
}  # fmt: skip

_UNLIKE = "Predictions are of models of 124M parameters and data of gigabytes; runs here are small and short, and speak of the mechanism alone."
_SELF = "Queries and keys have maps of their own here. With the paper's one witness each token attends most to itself, always."
_SCALE: tuple[tuple[str, str, str], ...] = (
    ("layers, width, heads", "12, 768, 12", f"2, 64, 2 of {_WIDTH} numbers (S-expressions: 4)"),
    (
        "width of a geometry",
        "128 + 384 + 256 or 256 + 512 + 256 a token",
        f"{_WIDTH} = 6 + 5 + 5 a head, half of it 3 + 3 + 2",
    ),
    ("positions", "learned", "a short convolution of 4 tokens, no others"),
)

_FULL = (6, 5, 5)
# section 8.2: what is left out, how numbers are shared out among plane, sphere and hyperbolic space, and tau
_REMOVED = {"nothing": _FULL, "plane": (0, 8, 8), "sphere": (8, 0, 8), "hyperbolic": (8, 8, 0)}
_SPLITS = (_FULL, (10, 3, 3), (3, 10, 3), (3, 3, 10), (2, 7, 7), (7, 2, 7), (7, 7, 2))
_TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0)

_MODEL = ModelOptions(layers=2, dim=64, heads=2, head_dim=_WIDTH, conv=4)
_TRAINING = TrainingOptions(
    steps=2000, batch_size=64, weight_decay=0.01, eval_every=200, eval_batch_size=50, tensorboard=False
)


def _ablation(about: str, models: dict[str, str], *notes: str) -> Preset:
    """Hypernyms again: the task where the paper says which geometry it takes."""
    return Preset(
        f"ablation of section 8.2 of the REWA paper, on hypernyms: {about}", models, "2", "3e-3", TaskOptions(task="hypernyms", test_examples=200), _MODEL,
        dataclasses.replace(_TRAINING, steps=1000),
        Published(_SOURCE, (), (("data", "those of each experiment", "WordNet's mammals; half of the pairs at a distance of 2 or more held out"), *_SCALE), (*notes, _UNLIKE)),
    )  # fmt: skip


PRESETS = {
    "rewa-sexpr": Preset(
        "experiment 2 of the REWA paper: the missing subtree of S-expressions of depth 5, 10 and 15",
        _GEOMETRIES, "2", "3e-3", TaskOptions(task="sexpr", test_examples=50), dataclasses.replace(_MODEL, heads=4, tie_embeddings=False),
        dataclasses.replace(_TRAINING, steps=1500, batch_size=32),
        Published(
            _SOURCE, (),
            (
                ("data", "Lisp expressions; what determines the missing subtree is not said", "two readings of one tree, so that it is determined"),
                ("metric", "exact match, parse error rate", "the same, written greedily; and accuracy of its tokens"),
                *_SCALE,
            ),
            (
                "Predicted: the product of geometries at a total width of the baseline outperforms it at depth 15; a wider one is right in more than 95%; accuracy of tree completion +15%.",
                _UNLIKE, _SELF,
            ),
        ),
    ),
    "rewa-hypernyms": Preset(
        "hierarchies: which candidate is an ancestor in WordNet, on pairs that were never trained",
        {**_GEOMETRIES, "REWA, hyperbolic alone, half the width": f"rewa(parts={(0, 0, _WIDTH // 2)})"}, "2", "3e-3", TaskOptions(task="hypernyms", test_examples=200),
        _MODEL, _TRAINING,
        Published(
            _SOURCE, (),
            (("data", "trees in general (corollary of theorem 4.3)", "WordNet's mammals; half of the pairs at a distance of 2 or more held out"), *_SCALE),
            (
                "Predicted: a tree of depth D takes 2 hyperbolic dimensions, and 2^D spherical ones. Neither holds: on a tree of 127 nodes the paper's construction in the disk stretches "
                "distances by 3.5, a sphere of 10 dimensions does it within 1.7.",
                _UNLIKE, _SELF,
            ),
        ),
    ),
    "rewa-paths": Preset(
        "experiment 6 of the REWA paper: one to four relations of WordNet, among them sequences that were never trained; operators against dot products",
        {
            "Softmax": "softmax", "REWA, product": _PRODUCT, "REWA operator": _OPERATOR, "REWA operator, 1 relation": "rewa_operator(relations=1, size=4)",
            "REWA operator, 2 relations": "rewa_operator(relations=2, size=4)", "REWA operator, 4 relations": "rewa_operator(relations=4, size=4)",
            "REWA operator, 2 chosen relations": "rewa_operator(relations=2, choices=4, size=4)",
            "REWA operator, 4 chosen relations": "rewa_operator(relations=4, choices=4, size=4)",
            "REWA functional": _FUNCTIONAL,
        },
        "2", "3e-3", TaskOptions(task="paths", test_examples=100), _MODEL, _TRAINING,
        Published(
            _SOURCE, (),
            (("data", "HotpotQA, 2 to 3 steps of reasoning over texts", "relations among WordNet's carnivores and their groups, learned, 1 to 4 steps"), ("metric", "exact match, F1, recall at 5", "accuracy and average precision"), *_SCALE),
            (
                "Predicted: operators improve exact match by 5 to 10 points over dot products (+8 in its table 1).",
                "The distance of operators is softmax attention with a key bias, and a path that is the same for all queries is softmax attention: "
                "its relations fold into the query's projection. Only with chosen relations does a query name its path, among as many relations as the task has.",
                "Two chosen relations have 0.8% more parameters than softmax attention, four 1.3%.",
                _UNLIKE,
            ),
        ),
    ),
    "rewa-periodic": Preset(
        "periodic patterns: the next value of 1 to 8 waves without a common period; random features against dot products",
        {
            "Softmax": "softmax", "REWA functional": _FUNCTIONAL, "REWA functional, learned frequencies": "rewa_functional(learn=True)",
            "REWA oscillatory": f"rewa_oscillatory(parts={(6, 5, 5)})", "REWA, plane alone": _PLANE,
        },
        "2", "3e-3", TaskOptions(task="periodic", test_examples=50), _MODEL, dataclasses.replace(_TRAINING, steps=1500, batch_size=16, eval_every=150),
        Published(
            _SOURCE, (),
            (("data", "patterns of K frequencies without a common period (theorem 5.1)", "their sum in 32 levels, frequencies drawn anew for each sequence"), *_SCALE),
            ("Predicted: K periods take 2^K dimensions without random features. They take 2 K, in any attention of dot products.", _UNLIKE),
        ),
    ),
    "rewa-sample-efficiency": Preset(
        "experiment 3 of the REWA paper: tokens until a loss; run it with --train-fraction 0.1, 0.3 and 1",
        {"Softmax": "softmax", "REWA, product": _PRODUCT, "REWA, product, half the width": _HALF}, "2", "3e-3",
        TaskOptions(task="text", length=128, evaluation_bytes=16_384), _MODEL, dataclasses.replace(_TRAINING, steps=1000, batch_size=16, eval_every=50, eval_batch_size=32),
        Published(
            _SOURCE, (),
            (("data", "OpenWebText, 10%, 30% and 100% of 70 GB", "the embedded novel, or --data; --train-fraction of what is not held out, in bytes"), ("goal", "a perplexity of 15", "the lowest loss that every run reached"), *_SCALE),
            ("Predicted: 3 to 5 times fewer tokens to a perplexity (−70% in its table 1), and a final perplexity 2 to 5% lower.", _UNLIKE, _SELF),
        ),
    ),
    "rewa-interpretability": Preset(
        "experiment 4 of the REWA paper: weights of the geometries after training on a kind of text; run it with --data code, reference and novels",
        {"Softmax": "softmax", "REWA, product": _PRODUCT, "REWA, product, weights a query": "rewa(parts=(5, 4, 4), adaptive=True)"}, "2", "3e-3",
        TaskOptions(task="text", length=128, evaluation_bytes=16_384), _MODEL, dataclasses.replace(_TRAINING, steps=1000, batch_size=16, eval_every=200, eval_batch_size=32),
        Published(
            _SOURCE, (),
            (("data", "Python of GitHub, Wikipedia, novels", "--data; by default the embedded novel"), ("models", "fine-tuned", "trained from the start"), *_SCALE),
            (
                "Predicted: hyperbolic weight above the spherical on code, spherical weight above the others on encyclopaedic text, plane above hyperbolic on novels.",
                "Curvature is (spherical − hyperbolic) / sum, from −1 to 1. The paper's formula has the opposite sign, so that its prediction for code contradicts itself.",
                _UNLIKE, _SELF,
            ),
        ),
    ),
    "rewa-ablation-components": _ablation(
        "each geometry removed, and each alone, at one width",
        {
            "Softmax": "softmax", **{f"REWA without {part}" if part != "nothing" else "REWA, product": f"rewa(parts={parts})" for part, parts in _REMOVED.items()},
            "REWA, plane alone": _PLANE, "REWA, sphere alone": _SPHERE, "REWA, hyperbolic alone": _HYPERBOLIC,
        },
        "Predicted: the sphere alone is a transformer, and hierarchies take the hyperbolic space (corollary 4.7), so that leaving it out costs most. "
        "A sphere alone has no lengths and the distance in place of its cosine, so that it is not softmax attention.",
    ),
    "rewa-ablation-split": _ablation(
        "how the numbers of a head are shared out", {f"REWA, {m} + {n} + {p}": f"rewa(parts={(m, n, p)})" for m, n, p in _SPLITS},
        "The paper varies (m, n, p) at a fixed sum and predicts nothing of it; its larger models have 256 + 512 + 256.",
    ),
    "rewa-ablation-temperature": _ablation(
        "the temperature", {f"REWA, tau = {tau:g}": f"rewa(parts={_FULL}, temperature={tau})" for tau in _TEMPERATURES},
        "The paper sweeps tau from 0.01 to 1 and predicts nothing of it. Here weights are learned beside a fixed tau, and distances are in units of what is typical at the start.",
    ),
}  # fmt: skip
