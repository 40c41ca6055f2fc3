"""Where the kernels of sums and of ridge read-outs cannot be had: torch runs, and that is said once."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zonal
from zonal import Operator
from zonal import mechanisms as m
from zonal.errors import MissingKernelsWarning
from zonal.execution.call import prepare
from zonal.execution.paths import ridge, sums
from zonal.formula import FORMULAS
from zonal.kernels import native as native_kernels
from zonal.kernels.build import BuildError

KERNELS = {"sums": (m.squared_affine, sums), "ridge": (m.ska, ridge)}


def sample() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 200, 8, generator=generator) for heads in (4, 2, 2)]


def chunked(operator: Operator, tensors: list[Tensor]) -> Tensor:
    return zonal.attention(*tensors, operator, causal=True, path="chunked")  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("kind", KERNELS)
def test_without_a_compiler_torch_runs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, tensors = KERNELS[kind][0](), sample()
    expected = zonal.attention(*(x.double() for x in tensors), operator, causal=True, path="dense")  # type: ignore[arg-type]
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    native_kernels.say_once.cache_clear()
    with pytest.warns(MissingKernelsWarning, match=r"Install g\+\+ or clang\+\+") as said:
        chunked(operator, tensors)
    assert len(said) == 1
    with warnings.catch_warnings():  # and not again
        warnings.simplefilter("error")
        y = chunked(operator, tensors)
    assert (y - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does that
@torch.no_grad()
def test_without_a_compiler_a_call_is_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    monkeypatch.setattr(native_kernels, "say_once", lambda: None)
    operator, (q, k, v) = m.yat(), sample()

    def attended(q: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path="tiled")  # type: ignore[return-value]

    torch.testing.assert_close(torch.compile(attended, fullgraph=True, backend="eager")(q), attended(q))


@torch.no_grad()
@pytest.mark.parametrize("kind", KERNELS)
def test_a_compiler_that_fails_is_said_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 1 && exit 0\necho 'error: no' >&2\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(fails))
    native_kernels.forget()
    make, kernel = KERNELS[kind]
    operator, tensors = make(), sample()
    try:
        with pytest.warns(UserWarning, match="in place of the compiled kernel"):
            y = chunked(operator, tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(chunked(operator, tensors), y)
        assert "could not be had" in str(kernel.refusal(prepare(operator, *tensors, causal=True)))  # type: ignore[arg-type]
        # also one that was not tried
        assert "a source with nothing but" in zonal.explain("softmax", (1, 1, 64, 8), causal=True, path="tiled").tiles
    finally:
        native_kernels.forget()


def test_one_library_that_fails_says_nothing_about_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that makes other libraries is still named."""
    code = FORMULAS["exp"]
    compiler = shutil.which(native_kernels.compiler() or "")
    fails = tmp_path / "fails"
    fails.write_text(f'#!/bin/sh\ncase "$*" in *link.cpp*) echo "error: no" >&2; exit 1;; esac\nexec {compiler} "$@"\n')
    fails.chmod(0o755)
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(fails))
    native_kernels.forget()
    try:
        with pytest.raises(BuildError, match="failed on link 'exp'"):
            native_kernels.load(code)
        assert "failed on link 'exp'" in str(native_kernels.missing(code, "tile"))
        assert native_kernels.missing(code, "distance") is None
    finally:
        native_kernels.forget()
