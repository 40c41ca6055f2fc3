"""Instruction sets: every family with each, how one is chosen, and that none runs where the processor lacks it."""

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.sets import TEST_SETS

import zonal
from zonal import Operator, anchor, hashing
from zonal import mechanisms as m
from zonal.execution.machine import typical_rates
from zonal.execution.routes import ROUTES
from zonal.formula import FORMULAS
from zonal.kernels import build, choice, distance, ridge, sums, tile
from zonal.kernels import native as native_kernels

ROOT = Path(__file__).resolve().parents[2]
EXP = FORMULAS["exp"]
FAMILIES = (tile.FAMILY, sums.FAMILY, ridge.FAMILY, distance.FAMILY)

pytestmark = [
    pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine"),
    pytest.mark.skipif(not build.is_x86(), reason="this kind of processor has one set"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    native_kernels.forget()
    yield
    native_kernels.forget()


def reports(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the processor report what a set needs, and nothing else."""
    needs = next(isa.needs for isa in build.SETS if isa.name == name)
    monkeypatch.setattr(choice, "features", lambda: needs)


# -- numbers ---------------------------------------------------------------------------------------------------------

SUITES = {
    "tile": ("kernels/test_cpp.py", "equals_definition and (softmax or sko or yat)"),
    "sums": ("kernels/test_sums.py", "equals_definition"),
    "carried sums": ("kernels/test_sums_carried.py", "decays or cancel"),
    "ridge": ("kernels/test_ridge.py", "kernel_equals_definition or steps_equal or no_digits"),
    "fading ridge": ("kernels/test_fading_ridge.py", "equals_definition and odd or pieces or gap or steps_equal"),
    "decode": ("kernels/test_decode.py", "steps_equal or chunked_and_the_verbs"),
    "decode with a window": (
        "kernels/test_window_decode.py",
        "(steps_equal and (grouped or one)) or any_size or transformer",
    ),
    "mixer": ("kernels/test_mixer.py", "of_float64 or borders or packed"),
    "distance": ("kernels/test_distance.py", "equals_definition or five_digits or clustered"),
    "features": ("kernels/test_features.py", "(as_good_as_those and 37) or range or lanes or (plain and slay)"),
    "sparse": ("execution/test_sparse.py", "equals_the_definition or candidates or same_places or smooth"),
}


def passes(file: str, words: str, **variables: str) -> None:
    """Run tests in a process of their own with other kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{file}", "-k", words]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


@pytest.mark.timeout(1800)  # some suites compile for minutes
@pytest.mark.parametrize(
    ("family", "name"),
    # the tile kernel alone multiplies in pairs
    [
        (family, name)
        for family in SUITES
        for name in ("portable", *TEST_SETS)
        if family == "tile" or not TEST_SETS.get(name, build.SETS)[0].pairs or name == "portable"
    ],
)
def test_every_family_equals_its_definition_with_every_set(family: str, name: str) -> None:
    """The same tests, within the same error, with sets that this processor would not choose, and with wide vectors."""
    passes(*SUITES[family], **({"ZONAL_TEST_SET": name} if name in TEST_SETS else {choice.VARIABLE: name}))


@pytest.mark.parametrize("name", [None, "tiles", pytest.param("pairs", marks=pytest.mark.full)])
def test_products_of_whole_numbers_are_exact(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, forward and backward, in whole tiles and in their rests: every sum has all of its terms, once."""
    if name is not None:
        monkeypatch.setattr(choice, "SETS", TEST_SETS[name])
    operator = Operator(score=zonal.score.Dot(scale=1.0), link=zonal.link.Identity(), anchor=anchor.Raw())
    generator = torch.Generator().manual_seed(0)
    heads = ((4, 80), (2, 80), (2, 50), (4, 50))  # of q, k, v and the gradient of y
    q, k, v, dy = (torch.randint(-1, 2, (1, *head, 150), generator=generator).mT.double() for head in heads)
    padding = torch.rand(1, 150, generator=generator) < 0.9
    padding[:, :80] = True
    for mask in (None, padding):

        def run(dtype: torch.dtype, path: str, mask: torch.Tensor | None = mask) -> tuple[torch.Tensor, ...]:
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            y = zonal.attention(*leaves, operator, causal=True, key_padding_mask=mask, path=path)
            return (y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype)))

        expected, found = run(torch.float64, "dense"), run(torch.bfloat16, "tiled")
        assert all(torch.equal(x.bfloat16(), y) for x, y in zip(expected, found, strict=True))


def test_the_portable_set_runs_in_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder's step with four lanes, and what the file is called."""
    monkeypatch.setenv(choice.VARIABLE, "portable")
    operator, (q, k, v) = m.squared_affine(), torch.randn(3, 1, 2, 6, 5).unbind(0)
    expected = zonal.attention(q, k, v, operator, causal=True, path="dense")
    first, last = ([x[:, :, part] for x in (q, k, v)] for part in (slice(5), slice(5, 6)))
    _, memory = zonal.attention(first[0], first[1], first[2], operator, causal=True, return_memory=True)
    y, _ = zonal.attention(last[0], last[1], last[2], operator, causal=True, memory=memory, path="streaming")
    assert torch.allclose(y, expected[:, :, 5:], atol=1e-5)
    built = native_kernels.built(FORMULAS["identity"], "decode")
    assert built is not None
    assert built.name.startswith("identity-decode-portable-")


# -- which one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processor", "source", "dtype", "expected"),
    [
        ("portable", "tile", torch.float32, ["portable"]),
        ("avx2", "tile", torch.bfloat16, ["avx2"]),
        ("avx512", "sums", torch.float32, ["avx512", "avx2"]),
        ("avx512", "tile", torch.bfloat16, ["avx512", "avx2"]),
        ("avx512_bf16", "tile", torch.float32, ["avx512", "avx2"]),
        ("avx512_bf16", "tile", torch.bfloat16, ["avx512_bf16", "avx512", "avx2"]),
        ("avx512_bf16", "decode", torch.bfloat16, ["avx512", "avx2"]),
        ("amx_bf16", "tile", torch.bfloat16, ["amx_bf16", "avx512_bf16", "avx512", "avx2"]),
        ("amx_bf16", "sums", torch.bfloat16, ["avx512", "avx2"]),
    ],
)
def test_candidates_are_what_the_processor_reports(
    processor: str, source: str, dtype: torch.dtype, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports(monkeypatch, processor)
    assert [isa.name for isa in native_kernels.candidates(EXP, source, dtype)] == expected


@pytest.mark.parametrize(
    ("processor", "asked", "expected", "words"),
    [
        ("avx512_bf16", "avx2", "avx2", None),
        ("avx512_bf16", "avx512_bf16", "avx512", None),  # no products of pairs in float32
        ("avx512", "portable", "portable", None),
        ("avx2", "avx512", "avx2", "asks for what this processor does not report .*avx512f.*; avx2 is used"),
        ("avx2", "avx512_bf16", "avx2", "does not report .*; avx2 is used"),
        ("avx2", "sse9", "avx2", "ZONAL_ISA=sse9 names no instruction set; avx2 is used. Known are .*portable"),
    ],
)
def test_a_set_is_forced(
    processor: str, asked: str, expected: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone; one that is unknown or missing is said once, and the next lower one is used."""
    reports(monkeypatch, processor)
    monkeypatch.setenv(choice.VARIABLE, asked)
    if words is not None:
        with pytest.warns(UserWarning, match=words):
            choice.usable("tile")
    assert tile.FAMILY.isa(EXP).name == expected
    if words is None:
        assert len(native_kernels.candidates(EXP)) == 1


def test_a_compiler_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next lower set that it knows, and a sentence; a compiler that knows nothing fails when it compiles."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *x86-64-v4*) exit 1;; *--version*) echo old 1.0;; esac\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    reports(monkeypatch, "avx512_bf16")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="does not know AVX-512") as said:
        assert tile.FAMILY.isa(EXP, torch.bfloat16).name == "avx2"
    words = [str(each.message) for each in said]
    assert len(words) == 2
    assert "does not know AVX-512 BF16 (-march=x86-64-v4 -mavx512bf16)" in words[0]
    assert "C++ AVX2 " in str(zonal.explain(m.softmax(), (1, 2, 512, 16), causal=True))
    compiler.write_text("#!/bin/sh\nexit 1\n")
    assert build.understands(str(compiler), build.SETS[-2])


def test_a_library_of_another_processor_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for it; it is not even compiled."""
    reports(monkeypatch, "avx2")
    monkeypatch.setattr(build, "make", lambda *_: pytest.fail("compiled"))
    with pytest.raises(build.BuildError, match=r"a kernel for AVX-512 is not loaded: .*does not report .*avx512f"):
        native_kernels.load(EXP, "tile", next(isa for isa in build.SETS if isa.name == "avx512"))


def test_a_library_of_another_kind_of_processor_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the cache, such as a cache that was copied: a sentence, and torch runs. One that came with the package is
    compiled anew (test_shipped.py).
    """
    library = native_kernels.target(EXP)
    data = bytearray(native_kernels.build(EXP).read_bytes())
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    there = native_kernels.target(EXP)
    assert (there.name, there.parent) == (library.name, tmp_path / "kernels")
    data[18] = {62: 183}[data[18]]  # of an ELF file: x86-64 becomes aarch64
    there.parent.mkdir()
    there.write_bytes(data)
    there.with_suffix(".json").write_text(json.dumps({"sha256": hashlib.sha256(data).hexdigest()}))
    native_kernels.forget()
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind(0)
    expected = zonal.attention(q, k, v, m.softmax(), causal=True, path="dense")
    with pytest.warns(UserWarning, match="torch's tiles run in place of the compiled kernel.* does not load"):
        y = zonal.attention(q, k, v, m.softmax(), causal=True, path="tiled")
    assert torch.allclose(y, expected, atol=1e-6)
    assert "does not load" in zonal.explain(m.softmax(), q.shape, causal=True).tiles


def test_features_are_those_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere torch tells AVX-512 and AVX2 from the rest."""
    choice.features.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    found = []
    for capability in ("AVX512", "AVX2", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda value=capability: value)
        found.append(next(isa.name for isa in build.SETS if isa.needs <= choice.features()))
        choice.features.cache_clear()
    assert found == ["avx512", "avx2", "portable"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process whether it may use tile registers")
def test_tiles_that_linux_does_not_grant_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their instructions would end the process."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags\t\t: avx2 amx_bf16 amx_tile\n")
    for granted in (True, False):
        choice.features.cache_clear()
        monkeypatch.setattr(choice, "_tiles_granted", lambda answer=granted: answer)
        assert ("amx_tile" in choice.features()) is granted
    monkeypatch.undo()
    choice.features.cache_clear()
    assert choice._tiles_granted() is ("amx_tile" in choice.features())


# -- the fastest -----------------------------------------------------------------------------------------------------

FASTEST = choice.fastest


def clock(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[str]:
    """A clock that only runs of sets move. Returns which ran."""
    now, ran = [0.0], list[str]()

    def trial(code: object, dtype: torch.dtype) -> None:
        isa = choice.trying.get()
        assert isa is not None
        ran.append(isa.name)
        now[0] += seconds[isa.name]

    monkeypatch.setattr(choice.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(choice, "fastest", FASTEST)
    monkeypatch.setattr(native_kernels, "FAMILY", native_kernels.Family("tile", trial=trial), raising=False)
    return ran


def test_the_fastest_is_timed_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports(monkeypatch, "avx512")
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    ran = clock(monkeypatch, avx512=2.0, avx2=1.0)
    family = native_kernels.FAMILY  # type: ignore[attr-defined]
    assert family.isa(EXP).name == "avx2"
    assert set(ran) == {"avx512", "avx2"}
    assert native_kernels.shown("tile", torch.float32).label == "AVX2"
    assert native_kernels.shown("tile", torch.bfloat16).label == "AVX-512"  # not timed yet
    kept = tmp_path / "machine" / "instruction-sets.json"
    assert json.loads(kept.read_text())["sets"] == {"tile float32 avx512 avx2": "avx2"}
    ran.clear()
    for _ in range(2):  # another process reads the file
        native_kernels.forget()
        assert family.isa(EXP).name == "avx2"
    assert not ran
    for words in ("{", json.dumps({**json.loads(kept.read_text()), "processor": "another"})):
        kept.write_text(words)
        native_kernels.forget()
        assert family.isa(EXP).name == "avx2"
        assert ran
        ran.clear()


def test_runs_that_repeat_elsewhere_time_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a processor with one set, or a set that is asked for."""
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    ran = clock(monkeypatch, avx512=2.0, avx2=1.0)
    family = native_kernels.FAMILY  # type: ignore[attr-defined]
    reports(monkeypatch, "avx2")
    assert family.isa(EXP).name == "avx2"
    native_kernels.forget()
    reports(monkeypatch, "avx512")
    with typical_rates():
        assert family.isa(EXP).name == "avx512"
    monkeypatch.setenv(choice.VARIABLE, "avx2")
    assert family.isa(EXP).name == "avx2"
    assert not ran


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.source)
def test_trials_run(family: native_kernels.Family) -> None:
    """What is timed is a call of the family that its kernel takes."""
    isa = native_kernels.candidates(family.code or EXP, family.source)[0]
    code = family.code or FORMULAS["identity"]
    for dtype in (torch.float32, torch.bfloat16):
        times = choice.seconds([isa], lambda dtype=dtype: family.trial(code, dtype))  # type: ignore[misc]
        assert list(times) == [isa]


EXPLAINED: dict[str, tuple[Operator, dict[str, Any]]] = {
    "tiled, C++": (m.softmax(), {}),
    "tiled, C++ distances": (m.rewa(), {}),
    "tiled, C++ plan": (m.sinkhorn(), {"causal": False}),
    "chunked, C++ sums": (m.squared_affine(), {}),
    "chunked, C++ window and sums": (m.local_global(), {}),
    "chunked, C++ ridge": (m.ridge(), {}),
    "streaming, C++ sums": (m.linear(), {"memory": 100}),
    "streaming, C++ window and sums": (m.local_global(), {"memory": 100}),
    "streaming, C++ ridge": (m.ridge(), {"memory": 100}),
    "sparse, C++": (m.softmax().replace(anchor=anchor.TopK(4, search=hashing.LSH())), {}),
}


@pytest.mark.parametrize("asked", [None, "portable"])
@pytest.mark.parametrize("route", EXPLAINED)
def test_explain_names_the_set_of_every_route(route: str, asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    highest = choice.usable("tile")[0][0]
    monkeypatch.setattr(choice, "timed", lambda source, dtype: frozenset({highest.name}))
    if asked is not None:
        monkeypatch.setenv(choice.VARIABLE, asked)
    path, name = route.split(", ")
    operator, more = EXPLAINED[route]
    tokens = 4 if "memory" in more else 512
    page = str(zonal.explain(operator, (1, 2, tokens, 16), **{"causal": True, **more}))
    label = asked or highest.label
    assert re.search(rf"{path} +{re.escape(name.replace('C++', f'C++ {label}'))}  ", page), page


def test_every_compiled_route_is_explained() -> None:
    assert set(EXPLAINED) == {f"{route.path}, {route.name}" for route in ROUTES if route.name.startswith("C++")}
