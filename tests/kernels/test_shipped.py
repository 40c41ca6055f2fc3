"""Libraries that came with the package: which are used, which are not, and who says so.

What a wheel holds is in test_wheel.py.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matrix import DECLARED

import zonal
from zonal import mechanisms as m
from zonal.algebra.anchor import TopK
from zonal.algebra.hashing import LSH
from zonal.cli import build as command
from zonal.execution.call import prepare
from zonal.execution.paths import distance, ridge, sparse, sums, tile
from zonal.execution.paths.steps.ridge import ridge_refusal
from zonal.execution.paths.steps.sums import sums_refusal
from zonal.formula import FORMULAS, Formula
from zonal.kernels import build, choice
from zonal.kernels import native as native_kernels
from zonal.kernels.features import FAMILY as FEATURES
from zonal.nn import compiled

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")


def carried(folder: Path, name: str, source: str) -> None:
    """Put the library of a link into a folder as a wheel would hold it, from the cache where it is compiled already."""
    code = FORMULAS[name]
    file = folder / build.file_name(code, source, native_kernels.candidates(code, source)[0])
    data = native_kernels.build(code, source).read_bytes()
    file.write_bytes(data)
    file.with_suffix(".json").write_text(json.dumps({"sha256": hashlib.sha256(data).hexdigest()}))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel would hold of the tiles of two links."""
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("exp", "yat"):
        carried(folder, name, "tile")
    return folder


@pytest.fixture
def as_installed(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process as if a wheel's libraries lay beside its sources, with an empty cache.

    What is compiled is copied.
    """
    folder = tmp_path / "shipped"
    shutil.copytree(libraries, folder)

    def make(compiler: str, code: Formula, source: str, isa: build.InstructionSet, library: Path) -> None:
        whole = libraries / build.file_name(code, source, isa)
        library.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".so", ".json"):
            shutil.copy(whole.with_suffix(suffix), library.with_suffix(suffix))

    monkeypatch.setattr(build, "make", make)
    monkeypatch.setattr(build, "SHIPPED", folder)
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path / "cache"))
    native_kernels.forget()
    yield folder
    native_kernels.forget()


def first(folder: Path) -> Path:
    """The library of exp in float32."""
    (found,) = folder.glob("exp-tile-*.so")
    return found


@pytest.mark.filterwarnings("ignore::zonal.errors.MissingKernelsWarning")
@pytest.mark.parametrize("damage", ["flipped", "cut", "no record"])
def test_a_damaged_library_is_not_loaded(as_installed: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler another is made, and that is said; without one torch runs, and explain says so."""
    path, code = first(as_installed), FORMULAS["exp"]
    assert native_kernels.built(code) == path
    data = path.read_bytes()
    if damage == "no record":
        path.with_suffix(".json").unlink()
    else:
        path.write_bytes(data[:1000] if damage == "cut" else data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "/nowhere/g++")
        assert [name for name in ("exp", "yat") if native_kernels.carried(FORMULAS[name])] == ["yat"]
        assert "no good library" in zonal.explain(zonal.mechanisms.softmax(), (1, 1, 8, 4), causal=True).tiles
        with (
            pytest.raises(build.BuildError, match="no C\\+\\+ compiler"),
            pytest.warns(UserWarning, match="is damaged"),
        ):
            native_kernels.build(code)
    with pytest.warns(UserWarning, match="came with the package is damaged"):
        assert native_kernels.build(code).parent != as_installed
    assert native_kernels.load(code) is not None


def test_a_library_that_does_not_load_is_compiled(as_installed: Path) -> None:
    """Whole, but not for this machine: its record is right and the loader refuses it."""
    path, code = first(as_installed), FORMULAS["exp"]
    path.write_bytes(b"no library")
    path.with_suffix(".json").write_text(json.dumps({"sha256": hashlib.sha256(b"no library").hexdigest()}))
    with pytest.warns(UserWarning, match="is not used, one is compiled here"):
        native_kernels.load(code)
    assert native_kernels.built(code) == native_kernels.target(code)  # from now on


def test_other_sources_flags_and_formulas_are_other_libraries(
    as_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = FORMULAS["yat"]
    assert native_kernels.shipped(code) is not None
    assert native_kernels.shipped(replace(code, cpp_value="x")) is None
    monkeypatch.setattr(choice, "features", frozenset)  # a processor without AVX2
    assert (native_kernels.shipped(code) is None) == build.is_x86()


def test_build_says_which_it_would_use(
    as_installed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "FORMULAS", {name: FORMULAS[name] for name in ("exp", "yat")})
    monkeypatch.setattr(build, "sources", lambda code: ("tile",))
    monkeypatch.setenv(choice.VARIABLE, native_kernels.candidates(FORMULAS["exp"])[0].name)  # the set of the libraries
    assert command.run(command.Build(), "zonal build") == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert all("came with the package" in line and str(as_installed) in line for line in lines)
    native_kernels.build(FORMULAS["exp"], again=True)
    assert command.run(command.Build(), "zonal build") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("exp, tile for ")]
    assert "was there" in line
    assert str(as_installed) not in line


FAMILIES: dict[str, tuple[str, Callable[[], str]]] = {
    **{
        name: ("identity", name)
        for name in ("tile", "sums", "features", "decode", "ridge", "ridge_decode", "mixer", "sparse")
    },
    "distance": ("exp", "distance"),
}
"""Of each family of kernels the link and the source that this processor uses."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel would hold of each family, taken from the cache where it is compiled already."""
    folder = tmp_path_factory.mktemp("families")
    for name, source in FAMILIES.values():
        carried(folder, name, source)
    return folder


def refused(family: str) -> str | None:
    """What a family says of a call that is meant for it."""
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    if family == "features":
        return FEATURES.refusal("cpu", torch.float32, lambda: None)
    if family == "mixer":
        return compiled.refusal(q)
    operator = {
        "ridge": m.ridge,
        "ridge_decode": m.ridge,
        "distance": m.rewa,
        "sparse": lambda: m.softmax().replace(anchor=TopK(2, search=LSH())),
    }.get(family, m.linear)()
    call = prepare(operator, q, k, v, causal=True)
    if family == "decode":
        return sums_refusal(call)
    if family == "ridge_decode":
        return ridge_refusal(call)
    asked = {
        "tile": tile.refusal,
        "sums": sums.refusal,
        "ridge": ridge.refusal,
        "distance": distance.refusal,
        "sparse": sparse.kernel_refusal,
    }
    return asked[family](call)


@pytest.mark.filterwarnings("ignore::zonal.errors.MissingKernelsWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shipped_family_runs_without_a_compiler(
    family: str, families: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own library is enough, and needed: without it the refusal names it."""
    name, source = FAMILIES[family]
    folder, code = tmp_path / "shipped", FORMULAS[name]
    shutil.copytree(families, folder)
    monkeypatch.setattr(build, "SHIPPED", folder)
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    native_kernels.forget()
    try:
        assert native_kernels.compiler() is None
        with torch.no_grad():
            assert refused(family) is None
        assert native_kernels.load(code, source) is not None
        native_kernels.forget()
        (folder / build.file_name(code, source, choice.usable(source)[0][0])).unlink()
        with torch.no_grad():
            assert f"no good library of source {source!r} for link {name!r} came with the package" in (
                refused(family) or ""
            )
    finally:
        native_kernels.forget()


def test_every_link_is_known() -> None:
    """FORMULAS, which stand below links and metrics, are theirs."""
    found = [tile.code_of(kind()) for kind in DECLARED.values() if kind.slot == "link"]  # type: ignore[arg-type]
    found += [
        reduction.formula
        for kind in DECLARED.values()
        if kind.slot == "metric" and (reduction := kind().dot_reduction(1.0)) is not None
    ]  # type: ignore[attr-defined]
    assert {replace(code, constants=()) for code in found if code is not None} == set(FORMULAS.values())
