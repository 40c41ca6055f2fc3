"""The benchmarks' shared parts, and that the planner's benchmark runs. What they measure is no test's business."""

import contextlib
import itertools
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zonal
from benchmarks import (
    common,
    gpu,
    linear,
    linear_peers,
    peers,
    planner,
    rewa,
    sparse,
    sparse_page,
    tiled,
)  # fmt: skip
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
    times = common.interleaved(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, rounds=3, budget=0.0
    )
    assert order[:4] == ["a", "b", "a", "b"]
    assert len(times["a"]) == len(times["b"]) >= 1
    order.clear()
    times = common.interleaved(
        {"slow": lambda: order.append("slow"), "quick": lambda: None}, CPU, rounds=3, budget=0.05, cap=0.0
    )
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
    assert (value["benchmark"], value["settings"], value["rows"], value["summary"]) == (
        "x",
        {"a": 1},
        [{"b": 2}],
        {"c": 3},
    )
    common.report("-", "x", "", {}, [], {}, {})
    assert capsys.readouterr().out == f"wrote {out}\n"


def test_table() -> None:
    assert common.table([("a", "1"), ("bbb", "22")], ("name", "n")) == "name  n\na     1\nbbb   22"


@pytest.mark.parametrize(
    "argument", ["--threads 0", "--device cuda", "--device xyz", "--budget -1", "--budget 0", "--budget nan"]
)
def test_arguments_that_do_not_fit(argument: str) -> None:
    if argument.split()[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ArgumentError, match="bench: --"):
        common.Run(common.parser("", "x", "budget", budget=1.0).parse_args(argument.split()))


@pytest.mark.parametrize("words", ["", "2", "0/3", "4/3", "a/b", "-1/3"])
def test_parts_that_are_none(words: str) -> None:
    with pytest.raises(ArgumentError, match="like 2/3"):
        planner.part_of(words)
    assert planner.part_of("2/3") == (2, 3)


def test_the_calls_of_the_planner_s_benchmark() -> None:
    """At least sixty different calls, a third of which go on from a memory."""
    cases = planner.held_out()
    assert not set(cases) & set(planner.development())
    assert len(cases) == len({str(case) for case in cases}) >= 60
    assert {case.spec for case in cases} == {*planner.SPECS}
    assert sum(case.past is not None for case in cases) >= len(cases) / 3
    assert {case.gradients for case in cases} == {case.causal for case in cases} == {True, False}
    assert any(case.queries == 1 and case.keys >= 2000 for case in cases)


def test_the_planner_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "planner.json"
    assert planner.main(["--quick", "--out", str(out)]) == 0
    assert "calls (required 95%)" in capsys.readouterr().out
    assert json.loads(out.read_text())["benchmark"] == "planner"
    with pytest.raises(ArgumentError, match="--part 999/999 has no calls"):
        planner.main(["--part", "999/999"])


def test_the_planner_benchmark_refuses_a_wrong_path(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planner.zonal.attention

    def wrong(q, k, v, operator, *, causal, path, memory=None):
        y = whole(q, k, v, operator, causal=causal, path=path, memory=memory)
        return y * 1.01 if path == "tiled" else y

    monkeypatch.setattr(planner.zonal, "attention", wrong)
    with pytest.raises(common.GateError, match="path tiled"):
        planner.main(["--quick", "--out", "-"])


def test_the_benchmark_of_tiles_runs_and_refuses_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiled.main(["--quick", "--out", "-"]) == 0
    assert "of SDPA  sko, T=127, forward+backward" in capsys.readouterr().out
    whole = tiled.zonal.attention

    def wrong(q, k, v, operator, *, causal, cu_seqlens, path):
        y = whole(q, k, v, operator, causal=causal, cu_seqlens=cu_seqlens, path=path)
        return y * 1.001 if path == "tiled" else y

    monkeypatch.setattr(tiled.zonal, "attention", wrong)
    with pytest.raises(common.GateError, match="T=127"):
        tiled.main(["--quick", "--out", "-"])


def test_the_benchmark_of_sums_runs_and_refuses_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert linear.main(["--quick", "--out", "-"]) == 0
    assert "of sdpa  sq, d=8, T=300, forward+backward" in capsys.readouterr().out
    made = linear.zonal.plan

    def wrong(operator, shape, **settings):
        plan = made(operator, shape, **settings)
        return lambda q, k, v: plan(q, k, v) * 1.001

    monkeypatch.setattr(linear.zonal, "plan", wrong)
    with pytest.raises(common.GateError, match="T=300"):
        linear.main(["--quick", "--out", "-"])


def test_the_benchmark_of_distances_runs_and_refuses_a_wrong_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rewa.main(["--quick", "--out", "-"]) == 0
    printed = capsys.readouterr().out
    assert "rewa, T=200, forward+backward, against maps" in printed
    assert "rewa_oscillatory, T=200, forward, against sdpa" in printed
    # rows that are there already are not measured again
    case, out = rewa.Case(tokens=130), tmp_path / "rewa.json"
    monkeypatch.setattr(rewa, "table", lambda: [case, replace(case, gradients=True, bound=1e-9)])
    assert rewa.main(["--only", "forward,", "--resume", "--out", str(out), "--budget", "0.1"]) == 0
    assert rewa.main(["--resume", "--out", str(out), "--budget", "0.1"]) == 1
    kept = json.loads(out.read_text())
    assert [row["row"] for row in kept["rows"]] == [
        "rewa, T=130, forward, against sdpa",
        "rewa, T=130, forward+backward, against sdpa",
    ]
    assert kept["summary"]["missed"] == ["rewa, T=130, forward+backward, against sdpa: time"]
    assert capsys.readouterr().out.count("rewa, T=130, forward,") == 1
    with pytest.raises(ArgumentError, match="holds results of other settings"):
        rewa.main(["--resume", "--out", str(out), "--budget", "0.2"])
    kept["device"]["threads"] += 1
    out.write_text(json.dumps(kept))
    with pytest.raises(ArgumentError, match="another number of threads"):
        rewa.main(["--resume", "--out", str(out), "--budget", "0.1"])
    whole = rewa.zonal.attention

    def wrong(q, k, v, operator, *, causal, path):
        y = whole(q, k, v, operator, causal=causal, path=path)
        return y * 1.001 if path == "tiled" else y

    monkeypatch.setattr(rewa.zonal, "attention", wrong)
    with pytest.raises(common.GateError, match="T=130"):
        rewa.main(["--out", "-"])


def test_the_table_of_distances() -> None:
    """Every row is another one; what is required is required at 4096 tokens, forward and with backward."""
    cases = rewa.table()
    assert len({str(case) for case in cases}) == len(cases) == 12
    assert {(case.tokens, case.peer, case.bound, case.memory) for case in cases if case.bound is not None} == {
        (4096, "sdpa", 2.5, None),
        (4096, "maps", 0.2, 0.1),
    }


def test_the_table_of_sums() -> None:
    """Every row is another one; bounds fall as sequences grow."""
    cases = linear.table()
    assert len({str(case) for case in cases}) == len(cases) >= 20
    bounded = [case for case in cases if case.bound is not None and case.peer == "sdpa"]
    assert len(bounded) == 11
    for shorter, longer in itertools.pairwise(bounded):
        assert longer.tokens < shorter.tokens or longer.bound < shorter.bound  # type: ignore[operator]


def test_the_table_of_tiles() -> None:
    """Every row is another one, and documents end where the sequence ends."""
    cases = tiled.table()
    assert len({str(case) for case in cases}) == len(cases) >= 34
    assert sum(case.bound is not None for case in cases) == 14
    assert {case.peer for case in cases} == {"sdpa", "keops", "flex"}
    assert all((case.peer, case.operator) in peers.PEERS for case in cases if case.peer != "sdpa")
    packed = next(case for case in cases if case.documents == 20)
    assert (packed.edges[0], packed.edges[-1], len(packed.edges)) == (0, packed.tokens, 21)


def test_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZONAL_TEST_A", "before")
    monkeypatch.delenv("ZONAL_TEST_B", raising=False)
    with common.environment(ZONAL_TEST_A="x", ZONAL_TEST_B="y"):
        assert (os.environ["ZONAL_TEST_A"], os.environ["ZONAL_TEST_B"]) == ("x", "y")
    assert os.environ["ZONAL_TEST_A"] == "before"
    assert "ZONAL_TEST_B" not in os.environ


def peer_or_skip(name: str, operator: str) -> peers.Peer:
    try:
        return peers.load(name, operator)
    except peers.PeerMissingError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "operator"), list(peers.PEERS))
def test_peers_compute_the_same_function(name: str, operator: str, causal: bool) -> None:
    """KeOps with a ragged block.

    Its gradients take a minute to compile: the benchmark's gate checks them before it times anything.
    """
    peer = peer_or_skip(name, operator)
    work = tiled.Work.of(tiled.Case(operator, 127, causal=causal, peer=name), CPU)
    q, k, v = work.q, work.k, work.v
    reference = zonal.attention(q.double(), k.double(), v.double(), work.operator, causal=causal, path="dense")
    torch.testing.assert_close(
        peer.attend(q, k, v, causal).double(), reference, rtol=0, atol=2e-6 * float(reference.abs().max())
    )
    if name == "flex":
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            peer.attend(q.requires_grad_(), k, v, causal)


@pytest.mark.parametrize("causal", [True, False])
def test_the_blocks_of_keops_cover_what_is_seen_once(causal: bool) -> None:
    """Both ways round: the keys of each query (forward) and the queries of each key (backward)."""
    heads, tokens = 2, 150
    place = torch.arange(heads * tokens)
    same = place[:, None] // tokens == place // tokens
    forward, backward = torch.zeros(2, heads * tokens, heads * tokens)
    for part, (rows, ends, keys, columns, column_ends, queries) in enumerate(
        peers._keops_blocks(heads, tokens, causal)
    ):
        assert ends.tolist() == column_ends.tolist() == list(range(1, len(rows) + 1))
        seen = place[:, None] >= place if part else torch.ones_like(same)  # the second part goes with step(i - j)
        for (a, b), (c, d) in zip(rows.tolist(), keys.tolist(), strict=True):
            forward[a:b, c:d] += seen[a:b, c:d]
        for (a, b), (c, d) in zip(columns.tolist(), queries.tolist(), strict=True):
            backward[c:d, a:b] += seen[c:d, a:b]
    expected = (same & (place[:, None] >= place) if causal else same).float()
    assert forward.equal(expected)
    assert backward.equal(expected)


def test_a_peer_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pykeops", None)
    monkeypatch.setattr(peers, "load", peers.load.__wrapped__)
    cases = [tiled.Case("yat", 127), tiled.Case("yat", 127, peer="keops")]
    assert tiled.present(cases, CPU) == cases[:1]
    printed = capsys.readouterr().out
    assert printed.startswith("no rows against keops: the package pykeops cannot be imported (")
    assert printed.endswith("; pip install -e '.[bench]' -c constraints.txt\n")
    assert tiled.present(cases, torch.device("meta")) == cases[:1]
    assert capsys.readouterr().out == "no rows against keops: it is set up for a CPU here, and the device is meta\n"
    monkeypatch.setattr(peers.shutil, "which", lambda name: None)
    with pytest.raises(peers.PeerMissingError, match="no compiler"):
        peers.load("flex", "yat")


def double(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return zonal.attention(q, k, v, tiled.OPERATORS["yat"](), causal=causal, path="dense")


def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return double(q, k, v, causal) * 1.001


def wrong_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return double(q, k.detach() + 0 * k, v, causal)


def refusing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    if q.requires_grad:
        raise NotImplementedError("no gradients here")
    return double(q, k, v, causal)


def test_rows_against_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong peer is not timed; one that refuses gradients has its words in the row; others get a ratio."""
    case = tiled.Case("yat", 127, gradients=True, peer="keops")

    def use(attend: peers.Attend) -> None:
        monkeypatch.setattr(peers, "load", lambda name, operator: peers.Peer(name, "1.0", "a stand-in", attend))

    for attend in (wrong, wrong_gradient):
        use(attend)
        with pytest.raises(common.GateError, match="of the peer" if attend is wrong_gradient else "the peer"):
            tiled.gate(CPU, [case])
    use(wrong)
    with pytest.raises(common.GateError, match="peer and subject"):
        tiled.measured(case, CPU, 0.05)
    use(refusing)
    assert list(tiled.gate(CPU, [case])) == [str(case), f"{case}, the peer"]
    row = tiled.measured(case, CPU, 0.05)
    assert row["refused"] == "no gradients here"
    assert "against_keops" not in row
    assert tiled.line(row, case) == f"no number  {case}: no gradients here"
    row = tiled.measured(replace(case, gradients=False), CPU, 0.05)
    assert row["against_keops"]["ratio"]["runs"] >= 1
    assert (row["peer"], row["peer_version"], row["peer_how"]) == ("keops", "1.0", "a stand-in")
    assert " of keops  yat, T=127" in tiled.line(row, replace(case, gradients=False))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "name", [name for name in linear_peers.PEERS if name != "keops yat"]
)  # it is peers.py's, checked above
def test_linear_peers_compute_what_they_say(name: str, causal: bool) -> None:
    try:
        found = linear_peers.PEERS[name]()
    except peers.PeerMissingError as error:
        pytest.skip(str(error))
    assert linear_peers.gate(name, found, causal) <= 2e-5
    other = replace(found, definition=lambda q, k, v, causal: found.definition(q, k, v, not causal))
    with pytest.raises(common.GateError):
        linear_peers.gate(name, other, causal)


def test_rows_of_linear_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dense Yat beside Yat and squared-affine attention; rows that are there are kept; a wrong operator and what does
    not fit are not timed.
    """
    out = tmp_path / "x.json"
    words = ["--only", "dense yat", "--tokens", "64", "--budget", "0.05", "--out", str(out)]
    assert linear_peers.main(words) == 0
    with pytest.raises(ArgumentError, match="exists, and a part of the rows would replace it"):
        linear_peers.main(words)
    assert linear_peers.main([*words, "--resume"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["peer"], row["tokens"], row["causal"]) for row in rows] == [
        ("dense yat", 64, True),
        ("dense yat", 64, False),
    ]
    assert set(rows[0]["zonal_against_peer"]) == {"yat", "squared_affine"}
    assert max(rows[0]["errors"].values()) <= 2e-5
    assert rows[0]["against_sdpa"]["runs"] >= 1
    monkeypatch.setattr(linear_peers.device_memory, "free", lambda device: 1 << 20)
    assert linear_peers.main([*words[:3], "64", "128", *words[4:], "--resume"]) == 0
    again = json.loads(out.read_text())["rows"]
    assert again[:2] == rows
    assert [row["refused"] for row in again[2:]] == ["takes 0 GiB, and 0 GiB are free"] * 2
    monkeypatch.undo()
    whole = linear_peers.zonal.attention
    monkeypatch.setattr(
        linear_peers.zonal,
        "attention",
        lambda q, k, v, operator, **options: whole(q, k, v, operator, **options) * (1 if "path" in options else 1.001),
    )
    out.unlink()
    with pytest.raises(common.GateError, match="yat, causal"):
        linear_peers.main(words)
    with pytest.raises(ArgumentError, match="--tokens must be multiples of 64, received 100"):
        linear_peers.main([*words[:3], "100"])


def test_linear_peers_that_are_missing_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are still checked and timed."""
    for name in (
        "performer_pytorch",
        "linear_attention_transformer",
        "linear_attention_transformer.linear_attention_transformer",
        "pykeops",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(peers, "load", peers.load.__wrapped__)
    assert linear_peers.main(["--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("no rows")] == [
        f"no rows of {name}" for name in linear_peers.PEERS if name != "dense yat"
    ]
    assert sum(line.startswith("  T=128 ") for line in lines) == 2


def test_the_table_of_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row is another one; lengths, head sizes, packed documents and decoding are there, and --list prints them
    without a device.
    """
    cases = gpu.table()
    assert len({str(case) for case in cases}) == len(cases) == 114 + 56 + 36
    plain = {
        (c.operator, c.tokens, c.dim, c.gradients)
        for c in cases
        if c.documents == 1 and not c.keys and c.path == "tiled"
    }
    assert plain == {
        (o, t, d, g) for o in ("sko", "yat", "softmax") for t in gpu.LENGTHS for d in (64, 128) for g in (False, True)
    }
    sums = {(c.operator, c.tokens, c.dim, c.gradients) for c in cases if c.operator in gpu.SUMS}
    assert sums == {
        (o, t, d, g)
        for o in ("squared_affine", "linear")
        for t in gpu.SUMS_LENGTHS
        for d in (32, 64)
        for g in (False, True)
    }
    ridge = {(c.operator, c.tokens, c.dim, c.gradients) for c in cases if c.operator in gpu.RIDGE}
    assert ridge == {
        (f"ska-{p}", t, d, g) for p in (0, 1, 2) for t in gpu.RIDGE_LENGTHS for d in (32, 64) for g in (False, True)
    }
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
    """The benchmark with the CPU in the place of the device: short rows of its kinds."""
    cases = [
        gpu.Case("sko", 130, 16, gradients=True, width=64), gpu.Case("softmax", 1, 16, keys=300, width=64),
        gpu.Case("squared_affine", 400, 8, gradients=True, width=32),
    ]  # fmt: skip
    monkeypatch.setattr(gpu, "_GATE_SUMS", 300)
    monkeypatch.setattr(gpu, "table", lambda: cases)
    monkeypatch.setattr(gpu, "required", lambda device: None)
    monkeypatch.setattr(gpu, "flash", contextlib.nullcontext)
    monkeypatch.setattr(common, "peak_bytes", lambda work, device: 5)
    monkeypatch.setattr(gpu, "peaks", lambda device: {"matmul_flops": 1e12, "copy_bytes": 1e10})
    return cases


def test_the_benchmark_of_the_gpu_measures(
    gpu_on_cpu: list[gpu.Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--budget", "0.05", "--out", str(out)]) == 0
    assert "of FlashAttention  sko, T=130, forward+backward, d=16, H=4, B=1" in capsys.readouterr().out
    value = json.loads(out.read_text())
    assert (value["benchmark"], value["summary"]["not_run"], len(value["rows"])) == ("gpu", [], 3)
    assert all(0 <= error <= gpu.TOLERANCE for error in value["summary"]["errors"].values())
    for row, case in zip(value["rows"], gpu_on_cpu, strict=True):
        seconds = row["against_flash"]["subject"]["median"]
        assert row["flops"] == pytest.approx(case.operations / seconds)
        assert row["share"] == pytest.approx(case.bytes / seconds / 1e10 if case.keys else row["flops"] / 1e12)
        assert math.isfinite(row["against_flash"]["ratio"]["median"])
    # out of time at once: what was not run is named
    assert gpu.main(["--device", "cpu", "--minutes", "-1", "--out", str(out)]) == 0
    assert len(json.loads(out.read_text())["summary"]["not_run"]) == 3


def test_the_benchmark_of_the_gpu_refuses_a_wrong_kernel(
    gpu_on_cpu: list[gpu.Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = gpu.zonal.attention

    def wrong(q, k, v, operator, *, causal, cu_seqlens, path):
        y = whole(q, k, v, operator, causal=causal, cu_seqlens=cu_seqlens, path=path)
        return y * 1.05 if path == "tiled" else y

    monkeypatch.setattr(gpu.zonal, "attention", wrong)
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--budget", "0.05", "--out", str(out)]) == 1
    value = json.loads(out.read_text())
    assert [row["operator"] for row in value["rows"]] == ["squared_affine"]  # the other kernel is right
    assert len(value["summary"]["not_run"]) == len(value["summary"]["wrong"]) == 2
    assert "T=777" in value["summary"]["wrong"][0]
    monkeypatch.setenv("ZONAL_KERNELS", "off")
    with pytest.raises(ArgumentError, match=r"the compiled kernel was required for .* ZONAL_KERNELS=off"):
        gpu.main(["--device", "cpu", "--out", "-"])


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device, and torch sees none here (`make test-gpu` where there is one)",
)
def test_the_benchmark_of_the_gpu_runs_there() -> None:
    assert gpu.main(["--quick", "--out", "-"]) == 0


def test_the_sparse_benchmark_measures() -> None:
    """Both operators pass the gate, and a row has the ratios and what was caught."""
    assert sparse.gated(CPU) < 2e-4
    rows = sparse.speed("rewa", 128, 2, CPU, 1)
    assert [row["inputs"] for row in rows] == list(sparse.NOISE)
    row = rows[0]
    assert set(row["seconds"]) == {"sparse", "tiled", "sdpa"}
    assert row["sparse_to_tiled"] == pytest.approx(
        row["seconds"]["sparse"]["median"] / row["seconds"]["tiled"]["median"]
    )
    assert 0 < row["recall"] <= 1
    assert 0 < row["mass"] <= row["exact_mass"] + 1e-6
    made = sparse.summary([{**row, "sparse_to_tiled": 0.1, "mass": 0.96} for row in rows])
    assert made["held"]
    assert not sparse.summary([{**row, "sparse_to_tiled": 0.1, "mass": 0.94} for row in rows])["held"]


def test_the_sparse_benchmark_draws_what_tables_buy() -> None:
    """More tables find more; without the kernel torch gathers the same; the page has every number."""
    rows = sparse.tables("softmax", 256, 1, CPU, 1)
    assert {(row["search"]["tables"], row["top"]) for row in rows} == set(
        itertools.product(sparse.VARIED_TABLES, sparse.VARIED_TOP)
    )
    mass = [row["mass"] for row in rows if row["top"] == 64]
    assert mass == sorted(mass)
    alone = sparse.torch_alone(128, CPU)
    assert set(alone["seconds"]) == {"sparse", "torch"}
    speed = [{**row, "part": "speed"} for row in rows[:1]]
    page = sparse_page.html(
        {**common.circumstances(CPU), "rows": [*speed, *rows, alone], "summary": sparse.summary(speed)}
    )
    assert "softmax: attention mass" in page
    assert f"{rows[-1]['mass']:.3f}"[:5] in page
