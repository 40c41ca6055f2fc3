"""``zonal.explain``: the plan in words and as plain values, from shapes alone."""

import json

import pytest
import torch
from live_memory import LiveMemory
from matrix import CASES, OPERATORS, fitted, inputs

import zonal
from zonal import Operator, prior
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.execution import plan
from zonal.execution.call import prepare
from zonal.execution.explain import LENGTHS, Explanation, explain, size
from zonal.execution.machine import TYPICAL_CPU, TYPICAL_GPU


def test_the_page() -> None:
    page = str(explain(m.sko(), (1, 8, 4096, 64), causal=True))
    for line in (
        "operator  sko: Cosine x Gegenbauer x Count",
        "path      tiled",
        "float32, cpu, causal, no gradients",
        "estimates",
        "ledger",
    ):
        assert line in page
    assert "* tiled" in page
    assert "dense" in page
    assert "chunked   link Gegenbauer of degree 5 needs" in page
    assert "keys; one sequence keeps 4 MiB after 1k, 64 MiB after 16k, 512 MiB after 128k tokens" in page
    assert (
        "  ├─ restriction [link] zonal polynomial: evidence is a polynomial in the cosine, of degree 2, 3, 4, 5" in page
    )
    assert not any(line != line.rstrip() for line in page.splitlines())


def test_plain_values() -> None:
    made = explain(
        m.squared_affine(),
        (2, 8, 512, 32),
        (2, 2, 600, 32),
        (2, 2, 600, 16),
        causal=True,
        gradients=True,
        key_padding=True,
    )
    value = json.loads(json.dumps(made.to_dict()))
    assert value["path"] == made.path
    assert value["why"] == made.why
    assert value["call"] == {
        "batch": 2, "heads": 8, "kv_heads": 2, "queries": 512, "keys": 600, "key_dim": 32, "value_dim": 16,
        "dtype": "float32", "device": "cpu",
        "causal": True, "gradients": True, "key_padding": True, "documents": 1, "memory_tokens": 0,
    }  # fmt: skip
    assert {e["path"] for e in value["estimates"]} | set(value["refused"]) == set(plan.PATHS)
    assert value["estimates"][0]["seconds"] > 0
    assert value["memory"]["kind"] == "features"
    assert [move["step"] for move in value["ledger"]] == [
        "closure",
        "restriction",
        "restriction",
        "quotient",
        "section",
        "approximation",
    ]
    assert value["ledger"][1]["derives"][0] == {
        "theorem": "square features",
        "text": "hence nonnegative, and exact with (d + 1)(d + 2)/2 features",
    }
    assert value["machine"].startswith(zonal.execution.machine.name(torch.device("cpu")))


@pytest.mark.parametrize("case_name", ["causal", "causal-gqa-odd", "bidirectional", "decode", "left-padding", "packed"])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("gradients", [False, True])
def test_explains_what_attention_plans(name: str, case_name: str, gradients: bool) -> None:
    """The same plan, from shapes, as ``choose`` makes for a real call of those shapes."""
    operator = OPERATORS[name]()
    case = fitted(operator, CASES[case_name])
    data = inputs(case).to(torch.float32)
    with torch.set_grad_enabled(gradients):
        call = prepare(
            operator,
            data.q,
            data.k,
            data.v,
            causal=data.causal,
            key_padding_mask=data.key_padding_mask,
            cu_seqlens=data.cu_seqlens,
        )
        expected = plan.choose(call)
    made = explain(
        operator, data.q.shape, data.k.shape, data.v.shape, causal=data.causal, gradients=gradients,
        key_padding=bool(case.padding),
        packed=case.packed or None,
    )  # fmt: skip
    assert made.plan == expected


@pytest.mark.parametrize("path", ["dense", "tiled", "chunked", "streaming"])
def test_a_path_that_is_asked_for_is_explained_beside_the_others(path: str) -> None:
    """A forced path had no estimates, and what runs on each path was said to have no kernel."""
    operator, shape = m.squared_affine(), (1, 4, 300, 16)
    free, forced = explain(operator, shape, causal=True), explain(operator, shape, causal=True, path=path)
    assert forced.path == forced.plan.estimates[0].path == path
    assert forced.why == f"path={path!r} was asked for"
    assert set(forced.plan.estimates) == set(free.plan.estimates)
    assert forced.plan.refused == free.plan.refused
    assert {route.path for route in forced.plan.routes} == {path}
    for name in ("tiles", "sums", "ridge", "candidates", "decode"):
        assert getattr(forced, name) == getattr(free, name)


@pytest.mark.parametrize("packed", ["ab", [0, None, 4], [[0], [2, 4]]])
def test_borders_that_are_none_are_refused(packed: object) -> None:
    with pytest.raises(ArgumentError, match=r"explain: packed must hold the borders of documents"):
        explain(m.softmax(), (1, 2, 4, 3), packed=packed)  # type: ignore[arg-type]


def test_values_of_the_operator_do_not_matter() -> None:
    """Rows a head, learned values and the device of parameters change nothing; what is frozen needs no gradient."""
    operator = m.sko()
    shape = (1, 8, 300, 16)
    assert explain(operator.for_heads(8), shape).plan == explain(operator, shape).plan
    learning = explain(operator, shape, gradients=True).plan.estimates[0]
    frozen = explain(m.sko().requires_grad_(False), shape, gradients=True).plan.estimates[0]
    assert frozen.flops < learning.flops


@pytest.mark.parametrize(
    "operator",
    [m.softmax(), m.squared_affine(), m.ska(power=2), m.retention(), m.cosine()],
    ids=lambda operator: operator.name,
)
def test_memory_bytes_are_those_of_a_memory(operator: Operator) -> None:
    made = explain(operator, (1, 4, 64, 16), (1, 2, 64, 16), causal=True)
    k, v = torch.randn(1, 2, 1024, 16), torch.randn(1, 2, 1024, 16)
    memory = zonal.Memory.empty(operator, 1, 2, 16, 16).absorb(k, v)
    assert made.memory_kind == memory.kind
    assert made.memory_bytes[1024] == memory.nbytes
    assert tuple(made.memory_bytes) == LENGTHS


def test_half_precision_halves_keys() -> None:
    full, half = (
        explain(m.softmax(), (1, 4, 64, 16), causal=True, dtype=dtype).memory_bytes
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert half[16384] * 2 == full[16384]


def test_after_a_memory() -> None:
    made = explain(m.ska(power=1), (4, 8, 1, 64), causal=True, memory=True)
    assert made.path == "streaming"
    assert "has only sums" in made.plan.refused["dense"]
    assert "after 1024 tokens" in str(made)
    assert explain(m.softmax(), (1, 2, 1, 16), causal=True, memory=5000).shape.past == 5000
    assert not explain(m.softmax(), (1, 2, 1, 16), causal=True, memory=0).plan.refused.get("dense")


def test_packed() -> None:
    made = explain(m.linear(), (1, 4, 100, 16), causal=True, packed=torch.tensor([0, 10, 100]))
    assert "2 packed documents" in str(made)
    assert made.to_dict()["call"]["documents"] == 2


def test_nothing_of_the_size_is_allocated() -> None:
    with LiveMemory() as live:
        made = explain(m.softmax(), (64, 32, 100_000, 128), causal=True)
    assert made.path == "tiled"
    # positions of the queries, no more: the inputs alone would be 100 GB
    assert live.real < 16 * 100_000 * 8


def test_too_big_for_the_machine() -> None:
    made = explain(m.softmax(), (1, 8, 200_000, 64), causal=True)
    assert "bytes" in made.plan.refused["dense"]
    assert "are available" in made.plan.refused["dense"]


def test_a_device_that_is_not_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    made = explain(m.softmax(), (1, 8, 4096, 64), causal=True, device="cuda")
    assert TYPICAL_GPU.name in str(made)
    assert made.to_dict()["call"]["device"] == "cuda"


def test_the_machine_is_named() -> None:
    assert TYPICAL_CPU.name not in str(explain(m.softmax(), (1, 1, 8, 8)))
    assert "thread" in explain(m.softmax(), (1, 1, 8, 8)).machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q_shape": (1, 8, 64)}, "q_shape must be 4 whole numbers"),
        ({"q_shape": (1, 8, 64, -1)}, "q_shape must be 4 whole numbers"),
        ({"q_shape": (1, 8, 64, 2.5)}, "q_shape must be 4 whole numbers"),
        ({"q_shape": torch.zeros(1, 8, 4, 2)}, r"received a tensor; pass its shape, torch.Size\(\[1, 8, 4, 2\]\)"),
        ({"q_shape": (1, 8, 64, 16), "k_shape": (1, 3, 64, 16)}, "must be a multiple of the heads of k and v"),
        ({"q_shape": (1, 8, 64, 16), "k_shape": (1, 8, 64, 8)}, "must share the head dimension"),
        ({"q_shape": (2, 8, 64, 16), "packed": (0, 64)}, "need batch size 1"),
        ({"q_shape": (1, 8, 64, 16), "packed": (0, 60)}, "end at the packed length 64"),
        ({"q_shape": (1, 8, 64, 16), "dtype": torch.int64}, "must be float16, bfloat16, float32 or float64"),
        ({"q_shape": (1, 8, 64, 16), "memory": -1}, "memory must be"),
        ({"q_shape": (1, 8, 64, 16), "memory": "yes"}, "memory must be"),
        ({"q_shape": (1, 8, 64, 16), "memory": 10, "packed": (0, 30, 64)}, "neither take nor leave a memory"),
        ({"q_shape": (1, 8, 4, 16), "k_shape": (1, 8, 64, 16), "memory": 10, "causal": True}, "as many tokens as k"),
        ({"q_shape": (1, 8, 64, 16), "memory": 10, "operator": "sinkhorn"}, "reads all queries together"),
        ({"q_shape": (1, 8, 64, 16), "packed": (0, 3.5, 64)}, "cu_seqlens must hold whole numbers"),
        ({"q_shape": (1, 8, 64, 16), "dtype": "float32"}, "dtype must be a type of torch such as torch.float32"),
        ({"q_shape": (1, 8, 64, 16), "gradients": None}, "gradients must be True or False"),
        ({"q_shape": (1, 8, 64, 16), "key_padding": torch.ones(1, 64) > 0}, "key_padding must be True or False"),
        ({"q_shape": (1, 8, 64, 16), "device": "gpu"}, "device must be one of torch"),
    ],
)
def test_what_attention_refuses_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        explain(**{"operator": m.softmax(), **arguments})


def test_an_operator_is_required() -> None:
    with pytest.raises(ArgumentError, match="an Operator or a spec"):
        explain(5, (1, 1, 8, 8))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cannot be run"):
        explain(m.sko().replace(anchor=zonal.anchor.Row()), (1, 1, 8, 8))
    with pytest.raises(ArgumentError, match="fades with time"):
        explain(m.retention(), (1, 1, 8, 8))


def test_it_is_a_value() -> None:
    made = explain(m.softmax(prior=prior.ALiBi()), (1, 1, 8, 8))
    assert isinstance(made, Explanation)
    with pytest.raises(AttributeError):
        made.machine = "another"  # type: ignore[misc]


def test_bytes_for_people() -> None:
    assert [size(n) for n in (0, 1023, 2048, 3 << 20, 5 << 30)] == ["0 B", "1023 B", "2 KiB", "3 MiB", "5 GiB"]
    assert [plan.duration(s) for s in (2e-6, 3e-3, 1.5, 12345.0)] == ["2 µs", "3 ms", "1.5 s", "12,345 s"]
