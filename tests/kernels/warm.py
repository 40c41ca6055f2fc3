"""Programs in forks of one process: `python warm.py` has loaded torch, Triton and the library, which takes seconds.

A line of its input is JSON: the arguments of a Python process, and the files of its output and errors. A line of its
output is the exit status.
"""

import json
import os
import runpy
import sys
import traceback

import kernels.called  # noqa: F401
import torch._dynamo  # noqa: F401  what the first call of an operator imports


def run(arguments: list[str], files: list[str]) -> int:
    """What `python` does with these arguments: -c and a text, or a file and its own arguments."""
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    try:
        if arguments[0] == "-c":
            exec(arguments[1], {"__name__": "__main__"})
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


for line in sys.stdin:
    child = os.fork()
    if not child:
        status = run(*json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    sys.stdout.flush()
