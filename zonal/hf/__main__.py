"""Run another program with this library's models in transformers.

    python -m zonal.hf lm_eval --model hf --model_args pretrained=smol-memory --tasks lambada_openai

The first argument is a module that ``python -m`` can run; the others are its arguments. Programs that load models by
the Auto classes find the models of this library only after ``import zonal.hf``, which this does first. No code is read
from the model's folder.
"""

import importlib.util
import runpy
import sys

import zonal.hf as _  # noqa: F401 (registers the models)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(f"{(__doc__ or '').strip()}")
    program = sys.argv[1]
    if importlib.util.find_spec(program.partition(".")[0]) is None:
        sys.exit(f"python -m zonal.hf: the module {program} is required and not installed. Install it with pip.")
    sys.argv = sys.argv[1:]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
