"""Explanations of the terms on the page, for readers who do not know the library."""

from collections.abc import Mapping

HOW_TO_READ = (
    (
        "Operator",
        "the rule by which a token looks back at earlier tokens. "
        "The models compared here are the same in everything else: the same layers, sizes, data in the same order and "
        "the same initial values wherever two operators share a parameter.",
    ),
    (
        "Seed",
        "the number that fixes the random choices of a run. "
        "The same operator with another seed gives a slightly different result.",
    ),
    (
        "Mean ± spread",
        "the mean over seeds and the sample standard deviation over seeds (divisor n − 1). "
        "Bands in the charts show the same. One seed has no spread.",
    ),
    (
        "Within the spread",
        "operators are compared seed by seed. When the 95% interval of these differences contains zero, "
        "the runs do not tell the two operators apart, and the page says so. "
        "With two or three seeds the interval is wide. No correction is made for the number of comparisons: "
        "of twenty pairs of equal operators, about one leaves the spread by chance.",
    ),
    ("Loss", "mean cross-entropy on held-out data in nats for each predicted token: 0 is perfect, lower is better."),
    (
        "Accuracy",
        "share of the asked tokens that the model predicts exactly, first averaged within an example, "
        "then over examples.",
    ),
    (
        "Bits per byte",
        "the loss on text, counted in bits for each byte of the text, so that tokenisers can be compared.",
    ),
    (
        "Learning rate",
        "the size of the training steps. Where several were tried, every operator had the same list and is shown with "
        "the one whose mean result was best: on other data of the same kind, or, where the page says so, on the "
        "reported data, which is slightly optimistic, equally for all.",
    ),
    (
        "Steps to 0.9",
        "training steps until the first evaluation at or above this accuracy, for the highest listed accuracy that "
        "some operator reached with every seed.",
    ),
    (
        "Tokens to a loss",
        "tokens of training until the held-out loss is as low as the lowest that every run on the page reached, "
        "on straight lines between evaluations; × is the ratio to softmax. Fewer is better.",
    ),
    (
        "Tokens a second",
        "training tokens per second of training time on the machine named below, without evaluation; × is "
        "the ratio to softmax. Other work on the machine slows a run, and is not recorded.",
    ),
    ("Peak memory", "the parameters plus the largest growth of memory while training."),
    (
        "Memory a sequence",
        "what a model must keep to continue one sequence after 1k, 16k or 128k tokens, in bytes: "
        "a cache that grows with the text, or a state of fixed size.",
    ),
    (
        "Kernel curve Φ(x)",
        "how an operator turns x, the match of query and key (their cosine, or their scaled dot product), "
        "into an unnormalised weight.",
    ),
    (
        "η, γ, ridge, degrees",
        "learnt numbers of some operators: η scales the output, γ is the factor of each Koopman step, "
        "ridge is the regulariser of a least-squares fit, degrees are those of the polynomial in the kernel curve.",
    ),
    (
        "Eigenvalues, condition, rank",
        "of the matrix that a least-squares memory inverts, its regulariser included: "
        "the smallest eigenvalue bounds how much an error is amplified, the condition number is the largest over the "
        "smallest, and the effective rank is how many directions the stored keys really use.",
    ),
    (
        "Spectrum on the unit disk",
        "eigenvalues of the operator that leads from one step to the next: near the rim is remembered long, "
        "near the centre is forgotten, and nothing may lie outside.",
    ),
    (
        "Weights of distances, curvature",
        "an operator that attends by distance adds up distances of several spaces; "
        "each head learns how much each counts, in units of the distance typical there. "
        "The curvature is their balance: 1 if only the sphere counts, −1 if only the hyperbolic space, 0 if the plane, "
        "or both equally.",
    ),
    (
        "Where keys lie",
        "the keys of some held-out tokens in two numbers: the plane from its mean, in the two directions in which they "
        "spread most; the sphere as a disk seen from afar; the hyperbolic space as Poincaré's disk, "
        "where distances grow without end towards the rim and each point keeps its distance from the middle. "
        "The share says how much of the points is seen.",
    ),
    (
        "Leverage and capacity",
        "leverage is how much of its own value a key would return: near 1 it is recalled, near 0 it drowns in the "
        "others. Capacity is the number of stored keys estimated to be recalled; the dashed line is all of them.",
    ),
)

LEARNED_NAMES = {
    "eta": "η (output scale)",
    "gamma": "γ (step factor)",
    "ridge": "ridge (regulariser)",
    "rates": "decay per token",
    "factor": "factor of queries and keys",
}
DIAGNOSTIC_NAMES = {
    "smallest_eigenvalue": "Smallest eigenvalue",
    "condition": "Condition number",
    "effective_rank": "Effective rank",
}
SLICE_NAMES = {
    "pairs": "number of key-value pairs", "length": "sequence length", "mqar": "MQAR",
    "system-prompt": "system prompt", "system-prompt-distractors": "system prompt, distractors",
    "tool-trace": "tool trace", "economy": "resource economy", "needle": "needle in a haystack", "two-hop": "two hops",
    "two-hop-written": "two hops, the first written out", "common-word": "common word", "common-value": "common value",
    "depth": "depth of the expression", "distance": "distance in the tree", "hops": "number of hops",
    "composition": "composition of relations", "frequencies": "number of frequencies",
}  # fmt: skip

CHART_HELP = (
    "Drag inside a chart to enlarge a part, double-click to go back. "
    "The coloured names switch an operator off and on everywhere."
)


def slice_name(key: str) -> str:
    """ "pairs" → "number of key-value pairs"; an unknown property as it is."""
    return SLICE_NAMES.get(key, key)


def cell_name(slices: Mapping[str, int | str]) -> str:
    """{"pairs": "held out", "distance": 2} → "held out, distance 2": a number needs its name, a word is one."""
    return (
        ", ".join(str(value) if isinstance(value, str) else f"{name} {value}" for name, value in slices.items())
        or "all"
    )


def learned_name(key: str) -> str:
    """ "eta" → "η (output scale)"; an unknown quantity as it is."""
    return LEARNED_NAMES.get(key, key.replace("_", " "))
