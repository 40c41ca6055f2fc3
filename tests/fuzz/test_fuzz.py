"""Every case that fuzzing has found to fail, and a few new ones of each target: the same in every run."""

import base64
import gzip
import itertools
import lzma
from pathlib import Path
from typing import Any

import pytest
from fuzz import calls, readers
from fuzz.calls import Attention, Misfit
from fuzz.damaged import Damage
from fuzz.sequences import Sequence
from fuzz.targets import TARGETS
from fuzz.texts import Spec
from hypothesis import HealthCheck, Phase, given, settings
from matrix import Case
from torch import Tensor

from zonal.data.images import read_idx
from zonal.errors import FileFormatError
from zonal.report import archive


def row(**rest: Any) -> Case:
    """One head, which sees all keys; a row of one key unless said otherwise."""
    one = {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 1, "keys": 1, "causal": False, "shared": True}
    return Case(**(one | rest))


KEPT: dict[str, tuple[str, Any]] = {
    "a Koopman read-out with padding, of a batch of no rows": (
        "attention", Attention("kernel_ridge-chunk", Case(batch=0, queries=3, keys=3, causal=False, padding="random")),
    ),
    "keys of no numbers under a fading ridge": (
        "attention", Attention("ska-fading", Case(queries=2, keys=2, key_dim=0), dtype="float64"),
    ),
    "keys of no numbers under a ridge relative to their length": (
        "attention", Attention("ska-relative", Case(queries=1, keys=1, key_dim=0, causal=False)),
    ),
    "the gradient of masses that take no part in a plan": (
        "attention",
        Attention(
            "hyperbolic_transport",
            Case(batch=3, heads=3, kv_heads=1, queries=3, keys=3, key_dim=33, value_dim=33, causal=False,
                 padding="random", key_bias=True, masses=True),
            path="tiled", seed=3,
        ),
    ),
    **{
        f"gradients: {name}": ("attention", case)
        for name, case in (
            ("unit vectors of 1e-20 in bfloat16", Attention("cosine", row(queries=2, keys=2, key_dim=2, value_dim=2),
             "tiled", "bfloat16", "tiny")),
            ("squares of cosines of 1e-20 in bfloat16", Attention("polynomial_square",
             Case(batch=1, heads=9, kv_heads=3, queries=70, keys=70, key_dim=2, value_dim=2, causal=False,
                  packed=(0, 24, 70)), dtype="bfloat16", values="tiny")),
            ("a point near its key, with a bias of keys", Attention("distance", Case(batch=3, heads=2, kv_heads=2,
             queries=70, keys=33, key_dim=1, value_dim=1, causal=False, key_bias=True, shared=True))),
            ("a row of one key", Attention("distance-squared", row(key_dim=1, value_dim=16), "tiled", values="huge")),
            ("a row of one key, of terms of 1e9", Attention("rewa_operator", row(queries=5, key_dim=33, value_dim=7,
             causal=True), values="huge")),
            ("a weight made again from a sum whose logarithm is 5e6", Attention("rewa_operator", row(queries=2,
             key_dim=3, value_dim=1), "tiled", values="huge")),
            ("weights made again in a document", Attention("rewa_operator", Case(batch=1, heads=2, kv_heads=2,
             queries=2, keys=2, key_dim=33, value_dim=1, causal=False, packed=(0, 2), shared=True), "tiled",
             values="mixed", seed=228)),
            ("a plan with all keys at their bounds", Attention("sinkhorn-bounded", row(queries=3, keys=2, key_dim=1,
             value_dim=2), values="huge", seed=1)),
            ("a share of features", Attention("sko", row(key_dim=1, value_dim=1), "chunked", values="tiny")),
            ("the strength of a ridge with equal keys", Attention("ska-0", row(batch=2, queries=8, keys=8, key_dim=2,
             value_dim=1), values="equal")),
            ("the strength of a kernel ridge with equal keys", Attention("kernel_ridge", row(queries=17, keys=17,
             key_dim=2, value_dim=2), values="equal")),
            ("a query that one key decides", Attention("softmax", Case(batch=1, heads=2, kv_heads=2, queries=1, keys=3,
             key_dim=7, value_dim=33, causal=False, shared=True), "tiled", values="huge", seed=105)),
            ("documents of one key in bfloat16", Attention("yat", row(queries=2, keys=2, key_dim=7, value_dim=7,
             packed=(0, 1, 2), key_bias=True), "tiled", "bfloat16", seed=320)),
        )
    },
    "a sum of weights whose inverse float32 has not": (
        "attention", Attention("hedgehog", row(key_dim=8, value_dim=1), "tiled", values="huge"),
    ),
    "the end of a window's past is no beginning": (
        "memories", Sequence("local_global-learned", (("steps", 1), ("steps", 1), ("call", 6), ("subtract-end", 4)),
        seed=33),
    ),
    "a temperature that float32 has not": ("specs", Spec("rewa_riemannian(temperature=1e-320)")),
    "a bias whose square float32 has not": ("specs", Spec("squared_affine(bias=1e30)")),
    "a Yat kernel that is infinite in float32": ("specs", Spec("yat(eps=1e-320)")),
    "random directions that do not fit in memory": ("specs", Spec("rewa_functional(dim=65537)")),
    "sums in float32 read with queries in float64": ("memories", Sequence("squared_affine", (), "float32")),
    **{
        f"{name} is {value}": ("arguments", Misfit("softmax", ((name, index),), entry))
        for entry, name, index, value in (
            ("attention", "q", 0, "None"), ("attention", "causal", 18, "a tensor"), ("attention", "scale", 14,
            "a dict"),
            ("attention", "scale", 7, "too large"), ("attention", "log_decay", 2, "a number"),
            ("attention", "key_bias", 33, "sparse"), ("attention", "key_padding_mask", 6, "infinite"),
            ("attention", "cu_seqlens", 1, "a bool"), ("attention", "cu_seqlens", 37, "of fractions"),
            ("attention", "dropout", 0, "None"), ("attention", "return_memory", 18, "a tensor"),
            ("plan", "q", 2, "no shape"), ("absorb", "k", 0, "None"), ("absorb", "key_padding_mask", 5, "NaN"),
            ("absorb", "action_mask", 2, "a number"), ("read", "q", 9, "a text"),
        )
    },
    "weights of a model that are whole numbers": ("files", Damage("model", "tensor", place=3429, value=3)),
    "pictures whose compression is broken": ("files", Damage("images", "tensor", place=1856, value=3)),
    "pictures that end before": ("files", Damage("images", "json", place=3914, value=11)),
    "memories of layers without axes": ("files", Damage("memories of layers", "tensor", value=8)),
    "a list for a scale": ("files", Damage("memory", "json", place=10, value=10)),
    "a list for a least norm": ("files", Damage("memory of a window", "json", place=22, value=22)),
    "learned numbers of no head": ("files", Damage("memory", "tensor", place=791)),
    "learned numbers that are complex": ("files", Damage("memory", "tensor", place=791, value=12)),
    "coefficients that are none": ("files", Damage("memory of a window", "json", place=25, value=21)),
    "sums of an operator without features": ("files", Damage("memory of a window", "json", place=3562, value=8)),
    "complex keys in a window": ("files", Damage("memory of a window", "tensor", file=12, place=1186, value=26)),
    "spans without ends": ("files", Damage("archive/", "tensor", file=2, place=3)),
    "a least norm that float32 has not": ("files", Damage("memory of a window", "json", place=22, value=5)),
    "a pipe of pictures": ("files", Damage("images", "pipe")),
    "a shard that is a link to itself": ("files", Damage("corpus/", "link", file=1, value=2)),
    "a line of a log in ten thousand brackets": ("files", Damage("comparison/", "write", file=1, value=10)),
    "a document of no name": ("models", Damage("context/", "json", file=2, place=9497, value=19)),
    "a document of more tokens than can be counted": ("models", Damage("context/", "json", place=9, value=8)),
    "a class of models that is no text": ("models", Damage("converted by name/", "json", value=1)),
    "a pipe for an index of documents": ("models", Damage("context/", "pipe", file=2)),
    "a tokeniser that a library refuses by a bare exception": ("models", Damage("own/", "json", file=3, value=1)),
    "no weights in a folder": ("models", Damage("converted by name/", "gone", file=2)),
    "queries of no head": ("arguments", Misfit("ridge", (("causal", 1), ("key_padding_mask", 0), ("q", 31)))),
    "potentials that are none": ("arguments", Misfit("sinkhorn", (("start", 24),))),
    "masses that are a list": ("arguments", Misfit("sinkhorn", (("key_mass", 13),))),
    "queries on the device meta": ("arguments", Misfit("softmax", (("k", 28), ("q", 28), ("v", 28)))),
}  # fmt: skip
# what fuzz.guided has found to fail: a target of fuzz.readers, and its bytes in base64
BYTES: tuple[tuple[str, str], ...] = ()
SLICE = {"attention": 12, "arguments": 40, "memories": 8, "specs": 60, "presets": 30, "files": 25, "models": 6,
         "commands": 6}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_failed_once(name: str) -> None:
    target, case = KEPT[name]
    TARGETS[target].check(case)


def test_bytes_that_failed_once() -> None:
    for name, data in BYTES:
        readers.check(name, base64.b64decode(data))


@pytest.mark.parametrize("name", ["presets", "criterion", "run/"])
def test_readers_of_bytes(name: str) -> None:
    """Good bytes, and changed ones, are read or refused."""
    for data in readers.seeds(name):
        readers.check(name, data)
        for number in range(10):
            readers.check(name, readers.changed(name, data, number) or data[:number])


def test_an_error_of_python_in_a_reader_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    data = readers.seeds("memory")[0]
    monkeypatch.setattr("zonal.memory.Memory.read", lambda *_: {}["x"])
    with pytest.raises(KeyError):
        readers.check("memory", data)


@pytest.mark.parametrize(
    ("case", "factor", "more"),
    [
        (Attention("softmax", Case(), "tiled"), 1.001, 0.0),
        (Attention("yat", Case(), "tiled"), 1.001, 0.0),
        (Attention("sko", Case(), "chunked"), 1.001, 0.0),
        (Attention("distance", Case(key_bias=True)), 1.001, 0.0),
        (Attention("ska-0", Case(), "chunked"), 1.01, 0.0),
        (Attention("sinkhorn", Case(causal=False)), 1.1, 0.0),
        # the gradient of q is zero, a difference of terms of a thousand
        (Attention("distance-squared", row(key_dim=1, value_dim=16), "tiled", values="huge"), 1.0, 0.5),
    ],
    ids=str,
)
def test_a_wrong_gradient_is_seen(case: Attention, factor: float, more: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, runs = calls.results, itertools.count()

    def wrong(*given: Any) -> list[Tensor]:
        y, dq, *others = ordinary(*given)
        return [y, dq, *others] if next(runs) else [y, factor * dq + more, *others]  # the first is of the path

    monkeypatch.setattr(calls, "results", wrong)
    with pytest.raises(AssertionError, match="item 1"):
        calls.check_attention(case)
    runs = itertools.count(1)
    calls.check_attention(case)


@pytest.mark.parametrize("name", TARGETS)
def test_a_slice(name: str) -> None:
    @settings(
        max_examples=SLICE[name], derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
    )  # fmt: skip
    @given(TARGETS[name].draw())
    def each(case: Any) -> None:
        TARGETS[name].check(case)

    each()


def test_files_that_would_unpack_to_gigabytes(tmp_path: Path) -> None:
    """A small archive of runs, and pictures that state a large shape: refused before anything of that size is made."""
    bomb = tmp_path / "images.gz"
    bomb.write_bytes(gzip.compress(b"\0\0\x08\x02\0\1\0\0\0\1\0\0" + bytes(1000)))
    with pytest.raises(FileFormatError, match="has lost some"):
        read_idx(bomb)
    with lzma.open(tmp_path / archive.NAME, "w", preset=0) as file:
        for _ in range(2**8 + 1):
            file.write(bytes(2**20))
    with pytest.raises(FileFormatError, match="would unpack to"):
        archive.unpack(tmp_path)
