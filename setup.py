"""Wheels carry the CPU kernels of the library's own links, compiled if a C++ compiler is available.

pyproject.toml holds all other settings. torch is not needed: zonal/formula.py and zonal/kernels/build.py do not import
it, and are loaded here without their package.
"""

import functools
import os
import shutil
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# the package by its folder alone: its __init__ would import torch
sys.modules["zonal"] = types.ModuleType("zonal")
sys.modules["zonal"].__path__ = [str(ROOT / "zonal")]

from zonal.formula import FORMULAS  # noqa: E402
from zonal.kernels import build  # noqa: E402


@functools.cache
def compiled() -> Path | None:
    """A folder with the library of every link, or None, with a note, when they cannot be compiled."""
    compiler = build.find(os.environ.get("CXX") or None)
    folder = Path(tempfile.mkdtemp(prefix="zonal-kernels-"))
    try:
        if compiler is None:
            looked_for = os.environ.get("CXX") or "g++, clang++, c++"
            raise build.BuildError(f"no C++ compiler was found (looked for {looked_for}).")
        build.version(compiler)
        jobs = [
            (formula, source, isa)
            for formula in FORMULAS.values()
            for source in build.sources(formula)
            for isa in build.carried(source)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: build.make(compiler, *job, folder / build.file_name(*job)), jobs))
    except (build.BuildError, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.write(f"zonal: the wheel carries no compiled kernels, they are compiled when first used. {error}\n")
        return None
    return folder


class WithKernels(Distribution):
    """Of this platform when kernels are in; an editable install compiles when a kernel is first used."""

    def libraries_folder(self) -> Path | None:
        return compiled() if "bdist_wheel" in self.commands else None

    def has_ext_modules(self) -> bool:
        return self.libraries_folder() is not None


class BuildWithKernels(build_py):
    """Puts the libraries beside the sources."""

    def run(self) -> None:
        super().run()
        folder = self.distribution.libraries_folder()
        place = Path(self.build_lib, *build.SHIPPED.relative_to(ROOT).parts)
        shutil.rmtree(place, ignore_errors=True)  # of an earlier build
        if folder is not None:
            shutil.copytree(folder, place)
            shutil.rmtree(folder)


class PlatformWheel(bdist_wheel):
    """The libraries have a C interface: one wheel for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, interface, platform = super().get_tag()
        return (python, interface, platform) if self.root_is_pure else ("py3", "none", platform)


setup(distclass=WithKernels, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
