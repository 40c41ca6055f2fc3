"""The house keeps its shape: arrows of import, lengths of files, what never appears in the library, docstrings of
public names.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "zonal"

# a package may import from lower floors and from itself
FLOORS = {
    "__main__": 13,
    "cli": 12,
    "hf": 11,
    "ingest": 11,
    "training": 10,
    "distributed": 9,
    "theory": 9,
    "models": 9,
    "nn": 8,
    "report": 8,
    "attention": 7,
    "evaluation": 7,
    "execution": 6,
    "tasks": 5,
    "memory": 5,
    "mechanisms": 5,
    "features": 4,
    "kernels": 3,
    "algebra": 2,
    "data": 2,
    "names": 1,
    "typed": 1,
    "formula": 1,
    "tracing": 1,
    "device_memory": 1,
    "store": 1,
    "stretch": 1,
    "verdict": 1,
    "cache": 1,
    "limits": 1,
    "workers": 1,
    "subnormals": 0,
    "errors": 0,
    "torch_func": 0,
}
# who may import the public face, `zonal` itself: it loads everything up to attention
ABOVE_THE_FACE = {"cli", "__main__"}
OPTIONAL = ("zonal.kernels.triton",)
"""Parts that need a package which need not be installed: imported by the function that runs them."""

LIMIT = 600
LIMITS = {"zonal/mechanisms": 230, "zonal/kernels": 800}


def name_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in FILES.items()}


def imports(name: str) -> Iterator[tuple[str, int]]:
    """(module of this project, line) for each import in a module, at the top or inside functions."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] == "zonal")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            if base.split(".")[0] == "zonal":
                for alias in node.names:
                    whole = f"{base}.{alias.name}"
                    yield (whole if whole in FILES else base), node.lineno


def floor_of(module: str) -> str:
    """The package on a floor that a module belongs to; "" for the public face itself."""
    return module.split(".")[1] if "." in module else ""


def test_every_package_has_a_floor() -> None:
    assert {floor_of(name) for name in FILES} - {""} <= set(FLOORS)


def test_arrows_run_downwards() -> None:
    wrong = []
    for name in FILES:
        here = floor_of(name)
        if not here:
            continue
        for target, line in imports(name):
            there = floor_of(target)
            if not there and here in ABOVE_THE_FACE:
                continue
            if not there:
                wrong.append(f"{name}:{line} imports the public face, zonal; import the module that defines the name")
            elif here != there and FLOORS[there] >= FLOORS[here]:
                wrong.append(
                    f"{name}:{line} imports {target}, which stands on floor {FLOORS[there]}, not below {FLOORS[here]}"
                )
    assert not wrong, "\n".join(wrong)


def test_no_circles() -> None:
    arrows = {name: {target for target, _ in imports(name) if target in FILES and target != name} for name in FILES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, "a circle of imports: " + " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for target in sorted(arrows[name]):
                visit(target, (*above, name))
            done.add(name)

    for name in FILES:
        visit(name, ())


def late(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (part for part in ast.walk(node) if isinstance(part, ast.Import | ast.ImportFrom))


def test_imports_stand_at_the_top() -> None:
    found = []
    for name in FILES:
        lines = {node.lineno for node in late(TREES[name])}
        found += [
            f"{name}:{line} {target}"
            for target, line in imports(name)
            if line in lines and not target.startswith(OPTIONAL)
        ]
    assert not found, f"imports of zonal inside functions: {', '.join(found)}"


def test_a_late_import_is_seen() -> None:
    assert len(list(late(ast.parse("import a\ndef f():\n  if x:\n    from zonal import b")))) == 1


def test_paths_and_memories_know_slots_not_mechanisms() -> None:
    wrong = [
        f"{name}:{line}"
        for name in FILES
        if floor_of(name) in ("execution", "memory")
        for target, line in imports(name)
        if floor_of(target) == "mechanisms"
    ]
    assert not wrong, f"a path or a memory imports a mechanism: {', '.join(wrong)}"


def test_the_planner_reads_tags() -> None:
    """execution/plan.py never asks what a slot's type is, by isinstance or by name."""
    slots = importlib.import_module("zonal.algebra.declaration").REGISTRY
    wrong = []
    for node in ast.walk(TREES["zonal.execution.plan"]):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            named = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)} | {
                part.attr for part in ast.walk(node.args[1]) if isinstance(part, ast.Attribute)
            }
            if named & set(slots):
                wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Attribute) and node.attr == "__name__":
            wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Constant) and node.value in importlib.import_module("zonal.mechanisms").names():
            wrong.append(f"line {node.lineno}: the name of a mechanism, {node.value!r}")
    assert not wrong, "\n".join(wrong)


WRITTEN = [
    path for folder in ("zonal", "tests", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_files_are_short() -> None:
    long = []
    for path in (*WRITTEN, *sorted(PACKAGE.rglob("*.[ch]pp"))):
        relative = path.relative_to(ROOT).as_posix()
        limit = next((lines for start, lines in LIMITS.items() if relative.startswith(start + "/")), LIMIT)
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > limit:
            long.append(f"{relative} has {count} lines, {limit} are allowed: it holds a second concept")
    assert not long, "\n".join(long)


def forbidden(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) for everything that may not stand in the library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            roots = {(name if isinstance(node, ast.Import) else node.module or "").split(".")[0] for name in names}
            for root in roots & {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}:
                yield node.lineno, f"import of {root}: it can run code from a file"
            if isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in names:
                yield node.lineno, "torch.load: it unpickles"
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "load"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            yield node.lineno, "torch.load: it unpickles"
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        ):
            yield node.value.lineno, "allow_pickle: it can run code from a file"
        if isinstance(node, ast.keyword | ast.arg) and node.arg == "trust_remote_code":
            yield node.lineno, "trust_remote_code: it runs code from a hub"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.args.kwarg is not None:
            yield node.lineno, f"**{node.args.kwarg.arg}: signatures name their arguments"
        if isinstance(node, ast.ExceptHandler):
            caught = (
                [] if node.type is None else [part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)]
            )
            last = node.body[-1]
            raised_again = isinstance(last, ast.Raise) and last.exc is None
            if (node.type is None or {"Exception", "BaseException"} & set(caught)) and not raised_again:
                yield node.lineno, "an except that catches everything"
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}: no mutable globals"


BY_DEFAULT = frozenset(
    {
        "empty",
        "empty_strided",
        "zeros",
        "ones",
        "full",
        "eye",
        "linspace",
        "logspace",
        "rand",
        "randn",
        "normal",
        "tensor",
        "scalar_tensor",
        "complex",
        "hann_window",
    }
)
"""Functions of torch whose result has the process's default dtype unless they are told one, ``tensor`` and ``full``
where they are given floats.

``*_like`` and ``new_*`` take it from a tensor. ``arange``, ``randint`` and ``randperm`` of whole numbers are int64
everywhere; ``arange`` of a fraction is not.
"""


def by_default(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, call) of tensors whose dtype is left to torch.set_default_dtype: a kernel that writes to one may write
    past its end.

    The first value of an nn.Parameter is left to it on purpose, as in torch's own layers.
    """
    first = {
        id(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute)
        if node.func.attr == "Parameter" and ast.unparse(node.func) in ("nn.Parameter", "torch.nn.Parameter")
    }
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
        ):
            continue
        parts = [part for argument in node.args for part in ast.walk(argument)]
        fraction = any(
            (isinstance(part, ast.Constant) and isinstance(part.value, float)) or isinstance(part, ast.Div)
            for part in parts
        )
        leaves = node.func.attr in BY_DEFAULT or (node.func.attr == "arange" and fraction)
        if leaves and id(node) not in first and not any(keyword.arg == "dtype" for keyword in node.keywords):
            yield node.lineno, ast.unparse(node)


def test_every_tensor_names_its_dtype() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {call}: pass dtype="
        for name, path in FILES.items()
        for line, call in by_default(TREES[name])
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "torch.empty(3)",
        "torch.zeros(2, device=x.device)",
        "torch.full((2,), 0.5)",
        "torch.arange(0, 1, 0.5)",
        "torch.tensor(numbers)",
        "torch.randn(3, generator=g)",
    ],
)
def test_a_tensor_without_a_dtype_is_seen(code: str) -> None:
    assert [call for _, call in by_default(ast.parse(code))] == [code]


def test_tensors_with_a_dtype_pass() -> None:
    calls = (
        "torch.empty(3, dtype=torch.float32)",
        "torch.zeros_like(x)",
        "x.new_empty(3)",
        "torch.arange(n)",
        "nn.Parameter(torch.empty(dim))",
        "torch.randperm(n)",
    )
    assert not list(by_default(ast.parse("\n".join(calls))))


def test_buffers_of_compiled_kernels_name_their_device() -> None:
    """torch.set_default_device must not move what a kernel of the CPU is given the address of."""
    made = {*BY_DEFAULT, "arange"}
    wrong = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name in FILES
        if name.startswith("zonal.kernels.") and not name.startswith("zonal.kernels.triton")
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).removeprefix("torch.") in made
        and ast.unparse(node.func).startswith("torch.")
        if not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert not wrong, "\n".join(wrong)


FOREIGN = {
    ("zonal.hf.cache", "**others"),
    ("zonal.hf.configuration", "**others"),
    ("zonal.hf.context", "**options"),
    ("zonal.hf.distil", "**others"),
    ("zonal.hf.modeling", "**others"),
    ("zonal.hf.pretrained", "an except that catches everything"),
    ("zonal.hf.attending", "**others"),
    ("zonal.hf.swap", "**model_kwargs"),
    ("zonal.hf.swap", "**others"),
    ("zonal.mechanisms.registry", "**given"),
    ("zonal.names", "**given"),
}
"""transformers calls what is there with names that change from version to version; decorators of any function pass on
what it is given. Of a damaged model it raises anything, a bare Exception included.
"""


def test_nothing_forbidden() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for name, path in FILES.items()
        for line, what in forbidden(TREES[name])
        if (name, what.partition(":")[0]) not in FOREIGN
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\nx = torch.load('f')",
        "from torch import load",
        "import numpy as np\nnp.load('f', allow_pickle=True)",
        "f(trust_remote_code=True)",
        "def f(trust_remote_code=False): ...",
        "def f(**kwargs): ...",
        "try:\n  f()\nexcept Exception:\n  pass",
        "try:\n  f()\nexcept:\n  pass",
        "try:\n  f()\nexcept (ValueError, BaseException):\n  pass",
        "def f():\n  global x\n  x = 1",
    ],
)
def test_forbidden_things_are_seen(code: str) -> None:
    assert len(list(forbidden(ast.parse(code)))) == 1


def test_allowed_things_pass() -> None:
    code = (
        "from json import load\nimport numpy as np\nnp.load('f', allow_pickle=False)\nf(**x)\ndef g(*a): "
        "...\ntry:\n  f()\nexcept ValueError:\n  pass"
    )
    code += "\ntry:\n  f()\nexcept BaseException:\n  g()\n  raise"
    assert not list(forbidden(ast.parse(code)))


def described(module: str, name: str) -> bool:
    """Whether the class or function has a docstring of its own in the source (a dataclass makes one up at run time;
    overloads have none).
    """
    found = [
        node for node in TREES[module].body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
    ]
    assert found, f"{module} defines no {name} at its top level"
    return any(ast.get_docstring(node) is not None for node in found)


def test_public_names_exist_and_are_described() -> None:
    wrong = []
    for module in FILES:
        loaded = importlib.import_module(module)
        for name in getattr(loaded, "__all__", ()):
            if not hasattr(loaded, name):
                wrong.append(f"{module}.{name} is in __all__ and does not exist")
                continue
            value = getattr(loaded, name)
            home = getattr(value, "__module__", "")
            if (
                (inspect.isclass(value) or inspect.isfunction(value))
                and home in FILES
                and not described(home, value.__name__)
            ):
                wrong.append(f"{home}.{value.__name__} has no docstring")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_modules_say_what_they_are() -> None:
    assert not [
        path.relative_to(ROOT).as_posix()
        for name, path in FILES.items()
        if TREES[name].body and ast.get_docstring(TREES[name]) is None
    ]
