"""`make sanitize`: the tests of the compiled CPU kernels with kernels that watch their memory and their arithmetic.

    python tests/kernels/sanitize.py [arguments of pytest]

AddressSanitizer and UndefinedBehaviorSanitizer of g++ end the process at the place of a fault, with a report. Threads
are not watched: the one trial with ThreadSanitizer ended before a test ran. Kernels are compiled by a wrapper of the
compiler into a cache of their own; the library is not changed.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
RUNTIMES = ("libasan.so", "libubsan.so")
TESTS = (
    *(f"tests/kernels/test_{name}.py" for name in ("cpp", "sums", "ridge", "distance", "decode", "mixer")),
    "tests/execution/test_sparse.py",
)
# what runs processes of its own, or compiles by torch, says nothing about the kernels
CHOSEN = "not compiles and not compiler and not export and not opcheck and not broken and not cache"


def main(arguments: list[str]) -> int:
    """Run pytest with sanitized kernels; the exit status is pytest's."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        sys.exit("sanitize: g++ is required, none was found. Install it, or name it in CXX.")
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in RUNTIMES
    ]
    missing = [name for name in found if not Path(name).is_absolute()]
    if missing:
        sys.exit(
            f"sanitize: {compiler} has no {', '.join(missing)}. Install the sanitizers of this compiler (Debian: "
            "libgcc-dev)."
        )
    with tempfile.TemporaryDirectory(prefix="zonal-sanitize-") as folder:
        wrapper = Path(folder) / "g++"
        # another compiler by its own words, so that a cache keeps its libraries apart; the compiler itself runs without
        # the sanitizers
        words = (
            f'unset LD_PRELOAD\n[ "$1" = --version ] && {{ echo sanitized; exec {compiler} --version; '
            f'}}\nexec {compiler} "$@" {FLAGS}\n'
        )
        wrapper.write_text(f"#!/bin/sh\n{words}", encoding="utf-8")
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IEXEC)
        options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **options, "CXX": str(wrapper), "LD_PRELOAD": " ".join(found)}
        command = [sys.executable, "-m", "pytest", "-q", "--timeout", "0", *(arguments or [*TESTS, "-k", CHOSEN])]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
