"""Compiling the CPU kernels: once, kept, checked, by several at once, and what is said where it cannot be done."""

import hashlib
import json
import os
import stat
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zonal
from zonal import link
from zonal import mechanisms as m
from zonal.errors import MissingKernelsWarning
from zonal.execution.paths import tile as tile_path
from zonal.formula import FORMULAS, Formula
from zonal.kernels import build
from zonal.kernels import native as native_kernels

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    native_kernels.forget()
    yield tmp_path / "kernels"
    native_kernels.forget()


def test_built_once_and_kept(empty_cache: Path) -> None:
    code = tile_path.code_of(link.Identity())
    assert code is not None
    assert not native_kernels.built(code, "ridge_decode")
    path = native_kernels.build(code, "ridge_decode")
    stamp = path.stat().st_mtime_ns
    assert native_kernels.built(code, "ridge_decode")
    assert native_kernels.build(code, "ridge_decode") == path
    assert path.stat().st_mtime_ns == stamp
    assert sorted(p.suffix for p in empty_cache.iterdir()) == [".json", ".lock", ".so"]  # nothing half written stays
    # other formulas, flags or compilers are other libraries
    assert native_kernels.target(replace(code, cpp_value="x * x"), "ridge_decode") != path


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_what_takes_so_long(
    terminal: bool, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(*_: object) -> None:
        raise build.BuildError("build: stopped")

    monkeypatch.setattr(build, "make", make)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with pytest.raises(build.BuildError, match="stopped"):
        native_kernels.load(FORMULAS["exp"], "tile")
    said = capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)  # as of a service
    native_kernels.forget()
    with pytest.raises(build.BuildError, match="stopped"):
        native_kernels.load(FORMULAS["exp"], "tile")
    assert ("compiling a CPU kernel (exp, tile" in said and "`zonal build`" in said) if terminal else not said


def test_two_that_need_a_library_at_once_compile_it_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    code = FORMULAS["exp"]

    def make(compiler: str, code: Formula, source: str, isa: build.InstructionSet, library: Path) -> None:
        made.append(library)
        time.sleep(0.2)
        library.write_bytes(b"library")
        library.with_suffix(".json").write_text(json.dumps({"sha256": hashlib.sha256(b"library").hexdigest()}))

    monkeypatch.setattr(build, "make", make)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: native_kernels.build(code), range(3)))
    assert made == [native_kernels.target(code)]
    assert found == made * 3


def test_a_damaged_library_is_compiled_again(empty_cache: Path) -> None:
    code = tile_path.code_of(link.Identity())
    assert code is not None
    path = native_kernels.build(code, "decode")  # the smallest source
    record = path.with_suffix(".json")
    data, about = path.read_bytes(), record.read_text()
    flipped = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
    for content, words in ((data[:1000], about), (data, "[1]"), (data, None), (flipped, about)):
        assert native_kernels.built(code, "decode") == path
        path.write_bytes(content)
        record.unlink() if words is None else record.write_text(words)
        assert native_kernels.built(code, "decode") is None
        if content is not flipped:
            path.write_bytes(data)
            record.write_text(about)
    left = path.with_name(f".{path.stem}.abc")  # of a compiler that was killed
    left.mkdir()
    (left / "link.cpp").touch()
    with pytest.warns(UserWarning, match="damaged and is compiled again"):
        native_kernels.build(code, "decode")
    assert not left.exists()
    assert native_kernels.built(code, "decode") == path
    native_kernels.load(code, "decode")


def test_without_a_compiler_torch_runs(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, tensors = (
        m.sko(degrees=(2.0,)),
        torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0)).unbind(),
    )
    expected = zonal.attention(*tensors, operator, causal=True, path="dense")
    monkeypatch.setenv("CXX", str(empty_cache / "nowhere"))
    native_kernels.say_once.cache_clear()
    with pytest.warns(MissingKernelsWarning, match=r"Install g\+\+ or clang\+\+") as said:
        zonal.attention(*tensors, operator, causal=True, path="tiled")
    assert len(said) == 1
    with warnings.catch_warnings():  # and not again
        warnings.simplefilter("error")
        assert torch.allclose(zonal.attention(*tensors, operator, causal=True, path="tiled"), expected, atol=1e-5)
    page = zonal.explain(operator, tensors[0].shape, causal=True)
    assert f"no C++ compiler was found (CXX='{empty_cache}/nowhere' is no program on the PATH" in page.tiles
    for chosen in ("nowhere -O2", "g++ '", " "):
        monkeypatch.setenv("CXX", chosen)
        with pytest.raises(build.BuildError, match=r"no C\+\+ compiler was found .CXX=.* is no program"):
            native_kernels.build(tile_path.code_of(operator.link))  # type: ignore[arg-type]


def test_a_compiler_may_come_with_options(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command has them, and their libraries are others. A path may have spaces."""
    folder = empty_cache.parent / "two words"
    folder.mkdir()
    fake, code = folder / "g++", FORMULAS["identity"]
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> "{folder}/said"\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done; echo 1.0\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    build.version.cache_clear()
    monkeypatch.setenv("CXX", str(fake))
    plain = native_kernels.build(code, "decode")
    monkeypatch.setenv("CXX", f"'{fake}' -DOWN='a b'")
    native_kernels.forget()
    assert native_kernels.build(code, "decode") not in (plain, None)
    lines = (folder / "said").read_text().splitlines()
    assert {line.startswith("-DOWN=a b ") for line in lines[: len(lines) // 2]} == {False}
    assert {line.startswith("-DOWN=a b ") for line in lines[len(lines) // 2 :]} == {True}


def test_another_openmp_runtime_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a library compiled here, as of clang++ beside a torch with that of g++; it runs nevertheless."""
    monkeypatch.setattr(native_kernels, "_torchs_threads", lambda library: False)
    native_kernels.forget()
    try:
        with pytest.warns(UserWarning, match="another OpenMP runtime than torch"):
            native_kernels.load(FORMULAS["identity"], "decode")
        with warnings.catch_warnings():  # and not again
            warnings.simplefilter("error")
            native_kernels.load(FORMULAS["identity"], "ridge_decode")
    finally:
        native_kernels.forget()


def test_a_broken_compiler_is_said_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, tensors = (
        m.sko(degrees=(2.0,)),
        torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0)).unbind(),
    )
    expected = zonal.attention(*tensors, operator, causal=True, path="dense")
    fake = empty_cache.parent / "g++"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo fake 1.0; exit 0; }\necho "error: out of order" >&2\nexit 3\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(fake))
    with pytest.warns(
        UserWarning, match=r"torch's tiles run in place .* failed on link 'polynomial' \(exit 3\): error: out of order"
    ):
        assert torch.allclose(zonal.attention(*tensors, operator, causal=True, path="tiled"), expected, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(zonal.attention(*tensors, operator, causal=True, path="tiled"), expected, atol=1e-5)
    assert "out of order" in zonal.explain(operator, tensors[0].shape, causal=True).tiles
    assert not list((empty_cache).glob("*.so"))


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind this user")
def test_a_cache_that_cannot_be_written(empty_cache: Path) -> None:
    empty_cache.parent.chmod(0o500)
    with pytest.raises(build.BuildError, match=r"could not be written .* Set ZONAL_CACHE"):
        native_kernels.build(tile_path.code_of(link.Identity()))  # type: ignore[arg-type]
