"""Refusals of all families of compiled kernels, structs of the C++ sources, and operators made from one declaration."""

import ast
from pathlib import Path

import pytest
import torch

from zonal.formula import FORMULAS, Term
from zonal.kernels import abi, decode, distance, mixer, native, ridge, ridge_decode, sparse, sums, tile
from zonal.kernels.op import decode as decoded
from zonal.kernels.op import encode

FAMILIES = {
    module.FAMILY.source: module.FAMILY for module in (decode, distance, mixer, ridge, ridge_decode, sparse, sums, tile)
}
OPERATORS = (
    distance.distance,
    mixer.gated_norm,
    mixer.short_convolution,
    ridge.ridge,
    sparse.sparse,
    sums.sums,
    tile.tile,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_of_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment, device, type, the family's own, on CUDA its own and triton, else the compiler: each is asked when
    those before it do not refuse.
    """
    family, code, asked = FAMILIES[name], FORMULAS["identity"], []

    def own() -> str:
        asked.append("own")
        return "own"

    monkeypatch.setattr(native, "has_triton", lambda: False)
    monkeypatch.setattr(native, "missing", lambda code, source: f"{code.name} {source}")
    assert family.refusal("mps", torch.float64, own) == "there is no kernel for device 'mps'"
    assert "float64" in str(family.refusal("cpu", torch.float64, own))
    assert not asked
    assert family.refusal("cpu", torch.float32, own, code=code) == "own"
    assert family.refusal("cpu", torch.float32, lambda: None, code=code).split()[1] == family.source
    found = [family.refusal("cuda", torch.float32, lambda: None, cuda=cuda, code=code) for cuda in (own, lambda: None)]
    assert found == (
        ["own", "triton is not installed (pip install triton)"]
        if family.cuda
        else ["there is no kernel for device 'cuda'"] * 2
    )
    monkeypatch.setenv(native.VARIABLE, "off")
    assert family.refusal("mps", torch.float64, own) == "the environment says ZONAL_KERNELS=off"


def test_structs_are_as_a_compiler_lays_them_out() -> None:
    call = abi.Struct("common.hpp", "Call")
    assert list(call.members)[:7] == ["q", "k", "v", "scale", "coefficients", "slope", "row"]
    assert list(call.members)[8:14] == ["rows.batch", "rows.head", "cols.batch", "cols.head", "key_mask", "edges"]
    assert call.members["edges"].dtypes == (torch.int64,)
    assert call.members["q"].dtypes == ()  # void
    # 10 pointers, 2 strides of 2 and 4 of 3, 18 numbers, 12 pointers, 2 numbers
    assert call.size == 8 * (10 + 2 * 2 + 4 * 3 + 18 + 12 + 2)
    convolution = abi.Struct("mixer.cpp", "Convolution")
    assert [name for name in convolution.members if name.startswith("y.1")] == [
        "y.1.data",
        "y.1.batch",
        "y.1.token",
        "y.1.head",
    ]
    step = abi.Struct("ridge_decode.cpp", "Step")
    assert sum(name.startswith("rows.") for name in step.members) == ridge_decode.LATE


def test_numbers_of_the_sources() -> None:
    """What Python repeats of the C++ sources, beside structs."""
    common, ridges, mixers, outcome = (
        (abi.FOLDER / name).read_text() for name in ("common.hpp", "ridge.hpp", "mixer.cpp", "decode.cpp")
    )
    for name, number in abi.ANCHORS.items():
        assert any(f"{name.upper()} = {number}" in text for text in (common, outcome)), name
    assert f"DOUBLE = {ridge.DOUBLE}" in ridges
    assert f"RANGE = {mixer._RANGE}" in mixers


@pytest.mark.parametrize("declared", ["int64_t f(int64_t a);", "std::vector<float> x;", "Unknown x;"])
def test_other_declarations_are_refused(declared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "FOLDER", tmp_path)
    (tmp_path / "common.hpp").write_text("")
    (tmp_path / "own.cpp").write_text(f"struct Own {{\n  {declared}\n}};\n")
    with pytest.raises(ValueError, match="expected"):
        abi.Struct("own.cpp", "Own")


def test_arguments_refuse_members_and_tensors_of_another_kind() -> None:
    call = abi.Arguments(abi.Struct("sums.cpp", "Dots", {"a": "B P", "out": "B tasks"}), {"B": 2, "P": 3}, {"tasks": 4})
    with pytest.raises(KeyError):
        call.set({"batch": 1})
    with pytest.raises(TypeError, match=r"must be torch\.float64"):
        call.fill("out", torch.zeros(2, 4))
    with pytest.raises(TypeError, match="of shape"):
        call.point("a", torch.zeros(2, 4))
    with pytest.raises(TypeError, match="the negative bit"):
        call.fill("out", torch._neg_view(torch.zeros(2, 4, dtype=torch.float64)))


def test_rules_travel_as_plain_values() -> None:
    rules = tile.TileSpec(FORMULAS["polynomial"], "count", left=3)
    spec = distance.DistanceSpec(rules, (Term("sphere", 0, 4, 1e-4), Term("product", 0, 4)), 2)
    text = encode(spec)
    assert ast.literal_eval(text)
    assert decoded(distance.DistanceSpec, text) == spec
    kept = sparse.SparseSpec(sparse.Factors(("sphere",), (4,), (0.5,)), 3)
    assert decoded(sparse.SparseSpec, encode(kept)) == kept


def test_schemas_follow_from_declarations() -> None:
    for op in OPERATORS:
        schema = op.operator._opoverload._schema
        assert [argument.name for argument in schema.arguments] == [*op.inputs._fields, "spec"]
        assert set(op.learned) <= set(op.inputs._fields)
        backward = op.backward_operator._opoverload._schema
        assert len(backward.returns) == len(op.learned)
