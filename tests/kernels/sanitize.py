"""`make sanitize`: the tests of the compiled CPU kernels with kernels that watch their memory and their arithmetic.

    python tests/kernels/sanitize.py [--threads] [arguments of pytest]

AddressSanitizer and UndefinedBehaviorSanitizer of g++ end the process at the place of a fault, with a report. With
--threads it is ThreadSanitizer, in the tests that run kernels on several threads. Kernels are compiled by a wrapper of
the compiler into a cache of their own; the library is not changed.
"""

import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
MEMORY = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
THREADS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=thread"
FAMILIES = (
    "cpp",
    "sums",
    "sums_carried",
    "ridge",
    "fading_ridge",
    "distance",
    "decode",
    "mixer",
    "features",
    "window_decode",
)
TESTS = (
    *(f"tests/kernels/test_{name}.py" for name in FAMILIES),
    *(f"tests/execution/test_{name}.py" for name in ("sparse", "decoder", "short_vectors")),
)
# what runs processes of its own, or compiles by torch, says nothing about the kernels
CHOSEN = "not compiles and not compiler and not export and not opcheck and not broken and not cache"
# calls that are long enough for several threads
LONG = "same_bits_again or partial or five_threads or (test_sparse and same)"


def compiler_of() -> str:
    """The compiler that is wrapped."""
    found = os.environ.get("CXX") or shutil.which("g++")
    if found is None:
        sys.exit("sanitize: g++ is required, none was found. Install it, or name it in CXX.")
    return found


def runtimes(compiler: str, *names: str) -> list[str]:
    """The paths of a compiler's sanitizers."""
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names
    ]
    missing = [name for name in found if not Path(name).is_absolute()]
    if missing:
        sys.exit(
            f"sanitize: {compiler} has no {', '.join(missing)}. Install the sanitizers of this compiler (Debian: "
            "libgcc-dev)."
        )
    return found


def wrapped(compiler: str, flags: str, folder: Path) -> Path:
    """The compiler with more flags.

    It is another compiler by its own words, so that a cache keeps its libraries apart. The compiler itself runs without
    the sanitizers.
    """
    wrapper = folder / "g++"
    words = (
        f'unset LD_PRELOAD\n[ "$1" = --version ] && {{ echo {shlex.quote(flags)}; exec {compiler} --version; '
        f'}}\nexec {compiler} "$@" {flags}\n'
    )
    wrapper.write_text(f"#!/bin/sh\n{words}", encoding="utf-8")
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IEXEC)
    return wrapper


def announced(compiler: str, folder: Path) -> list[str]:
    """A library that tells ThreadSanitizer when teams begin and end, and the OpenMP runtime of torch behind it.

    The runtime is compiled without the sanitizer, which would take each hand-over between its threads for a race.
    """
    library = folder / "teams.so"
    source = Path(__file__).with_name("teams.cpp")
    subprocess.run([compiler, "-O1", "-g", "-fPIC", "-shared", str(source), "-o", str(library), "-ldl"], check=True)
    return [str(library), *map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*"))]


def main(arguments: list[str]) -> int:
    """Run pytest with sanitized kernels; the exit status is pytest's."""
    threads = "--threads" in arguments
    arguments = [word for word in arguments if word != "--threads"]
    compiler = compiler_of()
    with tempfile.TemporaryDirectory(prefix="zonal-sanitize-") as name:
        folder = Path(name)
        if threads:
            preloaded = [*runtimes(compiler, "libtsan.so"), *announced(compiler, folder)]
            options = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66", "OMP_NUM_THREADS": "2"}
        else:
            preloaded = runtimes(compiler, "libasan.so", "libubsan.so")
            options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "OMP_NUM_THREADS": "1"}
        wrapper = wrapped(compiler, THREADS if threads else MEMORY, folder)
        environment = {**os.environ, **options, "CXX": str(wrapper), "LD_PRELOAD": " ".join(preloaded)}
        chosen = arguments or [*TESTS, "-k", LONG if threads else CHOSEN]
        command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", "--timeout", "0", *chosen]
        if threads:  # ThreadSanitizer needs addresses where it expects them
            command = ["setarch", "-R", *command]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
