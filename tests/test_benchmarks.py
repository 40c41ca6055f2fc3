"""The benchmarks' shared parts, and that the planner's benchmark runs. What they measure is no test's business."""

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import common, gpu, planner, tiled
from zonal.errors import ArgumentError

CPU = torch.device("cpu")


def test_the_gate() -> None:
    reference = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert common.gate("x", reference.float(), reference, 1e-6) == 0
    assert common.gate("x", reference + 0.004, reference, 1e-2) == pytest.approx(1e-3)
    assert common.gate("x", torch.zeros(0), torch.zeros(0, dtype=torch.float64), 0.0) == 0
    for wrong in (reference + 0.1, reference * float("nan"), reference[:1]):
        with pytest.raises(common.GateError, match=r"^some path: "):
            common.gate("some path", wrong, reference, 1e-3)


def test_quantiles() -> None:
    found = common.Quantiles.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found.median, found.low, found.high, found.least, found.runs) == (3, 2, 4, 1, 5)
    assert common.Quantiles.of([1.0, 2.0]).low == 1.25
    assert common.Quantiles.of([7.0]).high == 7


def test_turns() -> None:
    """One warm-up each, then round after round; what is too slow once is not run again."""
    order = []
    times = common.interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, rounds=3, budget=0.0)
    assert order[:4] == ["a", "b", "a", "b"]
    assert len(times["a"]) == len(times["b"]) >= 1
    order.clear()
    times = common.interleaved({"slow": lambda: order.append("slow"), "quick": lambda: None}, CPU, rounds=3, budget=0.05, cap=0.0)
    assert order == ["slow"]
    assert len(times["slow"]) == 1


def test_pairs() -> None:
    x = torch.randn(64, 64)
    found = common.compare(lambda: (x @ x, x @ x, x @ x, x @ x), lambda: x @ x, CPU, pairs=5, budget=0.2)
    assert found.ratio.runs == found.subject.runs == found.peer.runs >= 1
    assert found.ratio.median > 1
    assert json.loads(json.dumps(found.to_dict()))["ratio"]["median"] == found.ratio.median


def test_report_says_where_and_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "x.json"
    common.report(str(out), "x", "about x", {"a": 1}, [{"b": 2}], {"c": 3}, common.circumstances(CPU))
    value = json.loads(out.read_text())
    assert value["device"]["name"]
    assert value["device"]["threads"] == torch.get_num_threads()
    assert value["versions"]["torch"] == torch.__version__
    assert value["date"].startswith("20")
    assert (value["benchmark"], value["settings"], value["rows"], value["summary"]) == ("x", {"a": 1}, [{"b": 2}], {"c": 3})
    common.report("-", "x", "", {}, [], {}, {})
    assert capsys.readouterr().out == f"wrote {out}\n"


def test_table() -> None:
    assert common.table([("a", "1"), ("bbb", "22")], ("name", "n")) == "name  n\na     1\nbbb   22"


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--device", "cuda"]])
def test_arguments_that_do_not_fit(arguments: list[str]) -> None:
    if arguments[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ArgumentError, match="bench: --"):
        common.prepare(common.parser("", "x").parse_args(arguments))


def test_the_planner_grid() -> None:
    """Sixty different calls: the operators and ranges that the claim is about."""
    cases = planner.grid()
    assert len(cases) == len({str(case) for case in cases}) == 60
    assert {case.spec for case in cases} == set(planner.SPECS)
    assert {case.keys for case in cases} >= {16, 8192}
    assert any(case.queries == 1 and case.keys >= 4096 for case in cases)
    assert {case.gradients for case in cases} == {True, False}
    assert {case.dim for case in cases} >= {16, 64}


def test_paths_that_cannot_win_are_left_out() -> None:
    small, big = (next(case for case in planner.grid() if case.spec == "linear" and case.keys == keys) for keys in (64, 2048))
    hopeless = planner.Hopeless()
    growth = {"dense": 2, "tiled": 2, "chunked": 1, "streaming": 1}
    hopeless.add(small, {"dense": 1.0, "tiled": 2.0, "chunked": 30.0, "streaming": 200.0})
    assert "slower than chunked" in str(hopeless.reason(big, "streaming", growth))
    # dense is far ahead of both when short, and grows faster: that proves nothing
    assert hopeless.reason(big, "chunked", growth) is None
    assert hopeless.reason(big, "tiled", growth) is None
    assert hopeless.reason(small, "streaming", growth) is not None
    assert planner.Hopeless().reason(big, "streaming", growth) is None


def test_the_planner_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "planner.json"
    assert planner.main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "checking every path" in printed
    assert "calls (required 90%)" in printed
    assert not out.exists(), "a quick run is no result"


def test_the_planner_benchmark_refuses_a_wrong_path(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planner.zonal.attention

    def wrong(q, k, v, operator, *, causal, path):
        y = whole(q, k, v, operator, causal=causal, path=path)
        return y * 1.01 if path == "tiled" else y

    monkeypatch.setattr(planner.zonal, "attention", wrong)
    with pytest.raises(common.GateError, match="path tiled"):
        planner.main(["--quick", "--out", "-"])


def test_the_benchmark_of_tiles_runs_and_refuses_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiled.main(["--quick", "--out", "-"]) == 0
    assert "of SDPA  sko, T=127, forward+backward" in capsys.readouterr().out
    whole = tiled.zonal.attention

    def wrong(q, k, v, operator, *, causal, cu_seqlens, path):
        y = whole(q, k, v, operator, causal=causal, cu_seqlens=cu_seqlens, path=path)
        return y * 1.001 if path == "tiled" else y

    monkeypatch.setattr(tiled.zonal, "attention", wrong)
    with pytest.raises(common.GateError, match="T=127"):
        tiled.main(["--quick", "--out", "-"])


def test_the_table_of_tiles() -> None:
    """Every row is another one, and documents end where the sequence ends."""
    cases = tiled.table()
    assert len({str(case) for case in cases}) == len(cases) >= 34
    assert sum(case.bound is not None for case in cases) == 14
    packed = next(case for case in cases if case.documents == 20)
    assert (packed.edges[0], packed.edges[-1], len(packed.edges)) == (0, packed.tokens, 21)


def test_the_table_of_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row is another one; lengths, head sizes, packed documents and decoding are there, and --list prints them without a device."""
    cases = gpu.table()
    assert len({str(case) for case in cases}) == len(cases) == 114
    plain = {(c.operator, c.tokens, c.dim, c.gradients) for c in cases if c.documents == 1 and not c.keys}
    assert plain == {(o, t, d, g) for o in ("sko", "yat", "softmax") for t in gpu.LENGTHS for d in (64, 128) for g in (False, True)}
    assert {case.keys for case in cases} == {0, *gpu.MEMORIES}
    assert all(case.heads * case.dim == 2048 and case.batch * case.tokens >= 16384 for case in cases if not case.keys)
    packed = next(case for case in cases if case.documents > 1)
    assert (packed.edges[0], packed.edges[-1], len(packed.edges)) == (0, packed.tokens, 33)
    assert gpu.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(str(case) in printed for case in cases)


def test_operations_of_a_row() -> None:
    """By hand: two products a visible pair forward, five more backward."""
    case = gpu.Case("sko", 4, 64, batch=3, width=128)
    assert case.operations == 3 * 2 * (1 + 2 + 3 + 4) * 4 * 64
    assert replace(case, gradients=True).operations == case.operations * 3.5
    assert replace(case, documents=2).operations < case.operations
    decode = gpu.Case("sko", 1, 64, keys=100, width=512)
    assert (decode.operations, decode.bytes, decode.kv_heads) == (8 * 100 * 4 * 64, 2 * 2 * 2 * 100 * 64, 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_gpu_it_says_what_to_do(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu.main(["--device", device, "--out", "-"]) == 2
    said = capsys.readouterr().err
    assert "a CUDA device of compute capability 8.0 or later was required" in said
    assert ("sees none" if device == "cuda" else "received --device cpu") in said
    assert "--list" in said


@pytest.fixture
def gpu_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[gpu.Case]:
    """The benchmark with the CPU in the place of the device: two short rows of its kinds."""
    cases = [gpu.Case("sko", 130, 16, gradients=True, width=64), gpu.Case("softmax", 1, 16, keys=300, width=64)]
    monkeypatch.setattr(gpu, "table", lambda: cases)
    monkeypatch.setattr(gpu, "required", lambda device: None)
    monkeypatch.setattr(gpu, "flash", contextlib.nullcontext)
    monkeypatch.setattr(gpu, "peak_bytes", lambda work, device: 5)
    monkeypatch.setattr(gpu, "peaks", lambda device: {"matmul_flops": 1e12, "copy_bytes": 1e10})
    return cases


def test_the_benchmark_of_the_gpu_measures(gpu_on_cpu: list[gpu.Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--budget", "0.05", "--out", str(out)]) == 0
    assert "of FlashAttention  sko, T=130, forward+backward, d=16, H=4, B=1" in capsys.readouterr().out
    value = json.loads(out.read_text())
    assert (value["benchmark"], value["summary"]["not_run"], len(value["rows"])) == ("gpu", [], 2)
    assert all(0 <= error <= gpu.TOLERANCE for error in value["summary"]["errors"].values())
    for row, case in zip(value["rows"], gpu_on_cpu, strict=True):
        seconds = row["against_flash"]["subject"]["median"]
        assert row["flops"] == pytest.approx(case.operations / seconds)
        assert row["share"] == pytest.approx(case.bytes / seconds / 1e10 if case.keys else row["flops"] / 1e12)
        assert math.isfinite(row["against_flash"]["ratio"]["median"])
    # out of time at once: what was not run is named
    assert gpu.main(["--device", "cpu", "--minutes", "-1", "--out", str(out)]) == 0
    assert len(json.loads(out.read_text())["summary"]["not_run"]) == 2


def test_the_benchmark_of_the_gpu_refuses_a_wrong_kernel(gpu_on_cpu: list[gpu.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gpu.zonal.attention

    def wrong(q, k, v, operator, *, causal, cu_seqlens, path):
        y = whole(q, k, v, operator, causal=causal, cu_seqlens=cu_seqlens, path=path)
        return y * 1.05 if path == "tiled" else y

    monkeypatch.setattr(gpu.zonal, "attention", wrong)
    with pytest.raises(common.GateError, match="T=777"):
        gpu.main(["--device", "cpu", "--out", "-"])
    monkeypatch.setenv("ZONAL_KERNELS", "off")
    with pytest.raises(ArgumentError, match=r"the compiled kernel was required for .* ZONAL_KERNELS=off"):
        gpu.main(["--device", "cpu", "--out", "-"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here (`make test-gpu` where there is one)")
def test_the_benchmark_of_the_gpu_runs_there() -> None:
    assert gpu.main(["--quick", "--out", "-"]) == 0
