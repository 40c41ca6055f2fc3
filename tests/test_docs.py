"""The pages are true: their code runs, their links lead somewhere, their commands exist, every mechanism has its
page.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from matrix import DECLARED, OPERATORS

from benchmarks import fidelity_picture, koopman_picture, machines, recall_picture
from tools import pages
from zonal import mechanisms, nn
from zonal.cli import presets
from zonal.cli.app import COMMANDS, read
from zonal.errors import ArgumentError
from zonal.models import preset
from zonal.models.layers import check, layer_list, split

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LANGUAGES = {"python", "bash", "text", "json"}  # python runs; text is for what is only shown
SECTIONS = ("Arguments", "When to use it", "Cost", "Example", "Source")


class Block(NamedTuple):
    """A fenced block: what its fence says, the line its text begins on, its text."""

    language: str
    line: int
    text: str


def identifier(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page. Raises AssertionError for a fence without an end."""
    found: list[Block] = []
    opened: tuple[str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```") and opened is None:
            opened, lines = (line[3:].strip(), number + 1), []
        elif line.startswith("```") and opened is not None:
            found.append(Block(*opened, "\n".join(lines)))
            opened = None
        else:
            lines.append(line)
    assert opened is None, f"{identifier(page)}: the fence before line {opened[1]} is never closed"
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages write files where nothing is lost."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.language == "python" for block in blocks(page))], ids=identifier
)
def test_code_runs(page: Path, tmp_path: Path) -> None:
    """Every python block of a page, one after another in one namespace."""
    torch.manual_seed(0)
    # the page as the file that the code says it is from: triton reads the source of its functions
    copied = tmp_path / identifier(page)
    copied.parent.mkdir(parents=True, exist_ok=True)
    copied.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            # blank lines first, so that an error names the line of the page
            exec(compile("\n" * (block.line - 1) + block.text, identifier(page), "exec"), namespace)


def test_fences_say_what_they_hold() -> None:
    every = [(page, block) for page in PAGES for block in blocks(page)]
    wrong = [f"{identifier(p)}:{b.line}: {b.language!r}" for p, b in every if b.language not in LANGUAGES]
    assert not wrong, f"a fence must be one of {', '.join(sorted(LANGUAGES))}: {wrong}"


def test_code_is_parsed_as_python_only_where_it_is() -> None:
    """Python that hides as text does not run, so it may not be there."""
    texts = [(identifier(page), block) for page in PAGES for block in blocks(page) if block.language == "text"]
    assert texts
    hidden = [f"{page}:{block.line}" for page, block in texts if re.search(r"^(import|from) \w+", block.text, re.M)]
    assert not hidden, f"these blocks are Python and should say so: {hidden}"


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    titles = re.findall(r"^#+ +(.*?) *$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"`|\*", "", title).lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def test_links_lead_somewhere() -> None:
    broken = []
    for page, link in ((each, link) for each in PAGES for link in links(each)):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or ROOT not in (target, *target.parents):
            broken.append(f"{identifier(page)}: {link}")
        elif anchor and anchor not in headings(target):
            broken.append(f"{identifier(page)}: {link} (no such heading)")
    assert not broken, ", ".join(broken)


def test_every_page_is_linked() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += [
                target
                for link in links(page)
                if (target := (page.parent / link.partition("#")[0]).resolve()).suffix == ".md" and target.exists()
            ]
    assert {page for page in PAGES if page not in reached} == set()


@pytest.mark.parametrize("name", mechanisms.names())
def test_every_mechanism_has_a_page_and_a_row(name: str) -> None:
    page = ROOT / "docs" / "mechanisms" / f"{name}.md"
    assert page.is_file()
    titles = re.findall(r"^## +(.*?) *$", prose(page), flags=re.MULTILINE)
    assert [title for title in titles if title in SECTIONS] == list(SECTIONS)
    assert "$$" in page.read_text(encoding="utf-8")
    assert any(block.language == "python" and f"m.{name}(" in block.text for block in blocks(page))
    # ska-0, ska-1 … are rows of ska
    assert any(row == name or row.startswith(f"{name}-") for row in OPERATORS)


@pytest.mark.parametrize("name", [*mechanisms.names(), "layer"])
def test_pages_name_every_argument(name: str) -> None:
    """The table of arguments is the signature, with the same default values."""
    layer = name == "layer"
    page = (ROOT / "docs" / ("" if layer else "mechanisms") / f"{name}.md").read_text(encoding="utf-8")
    section = page.partition("## Arguments")[2].partition("\n## ")[0]
    found = dict(re.findall(r"^\| `(\w+)` \| (`.*?`|required) \|", section, flags=re.MULTILINE))
    parameters = inspect.signature(nn.Attention if layer else getattr(mechanisms, name)).parameters
    assert list(found) == list(parameters)
    for argument, value in found.items():
        default = inspect.Parameter.empty if value == "required" else ast.literal_eval(value.strip("`"))
        assert default == parameters[argument].default, argument


def test_no_page_without_a_mechanism() -> None:
    assert {page.stem for page in (ROOT / "docs" / "mechanisms").glob("*.md")} == set(mechanisms.names())


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command that a page shows, in a block of bash or in the line."""
    shown = [
        line
        for block in blocks(page)
        if block.language == "bash"
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    shown += re.findall(r"`((?:zonal|make) [^`]+)`", prose(page))
    for line in shown:
        words = shlex.split(line, comments=True)
        if words:
            yield words


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for page, words in ((each, words) for each in PAGES for words in commands(each)):
        said = f"{identifier(page)}: {shlex.join(words)}"
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, said
        elif words[0] == "zonal" and not words[1].startswith("-") and words[1].islower():
            assert words[1] in COMMANDS, said


def test_make_finds_the_files_it_looks_for() -> None:
    """``make results`` with a pattern of no file would draw nothing, without an error."""
    patterns = re.findall(r"\$\(wildcard ([^)]+)\)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert patterns
    assert all(any(ROOT.glob(pattern)) for pattern in patterns)


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=identifier)
def test_commands_are_read(page: Path) -> None:
    """Every command of a page through the parser of the command line, presets and values included; recipes are files
    that another command writes.
    """
    for words in commands(page):
        if (
            words[0] != "zonal"
            or words[1] not in COMMANDS
            or "--help" in words
            or any(word.endswith("recipe.json") for word in words)
        ):
            continue
        given = [word for word in words[2:] if word != "…"]
        missing_value = given and given[-1].startswith("--") and given[-1] not in _switches(words[1])
        try:
            options, _ = read(words[1], given[:-1] if missing_value else given)  # prose may name an option alone
        except ArgumentError as error:
            pytest.fail(f"{identifier(page)}: {shlex.join(words)}: {error}")
        if getattr(options, "model_preset", None) is not None:
            preset(options.model_preset, vocab_size=64)


def _switches(command: str) -> set[str]:
    """Options that stand without a value."""
    options = getattr(importlib.import_module(f"zonal.cli.{COMMANDS[command].module}"), COMMANDS[command].options)()
    parts = [
        options,
        *(
            getattr(options, field.name)
            for field in dataclasses.fields(options)
            if dataclasses.is_dataclass(getattr(options, field.name))
        ),
    ]
    switches = {
        field.name
        for part in parts
        for field in dataclasses.fields(part)
        if isinstance(getattr(part, field.name), bool)
    }
    return {f"--{form}{name.replace('_', '-')}" for name in switches for form in ("", "no-")}


def test_operators_in_commands_exist() -> None:
    seen = 0
    for page in PAGES:
        for words in commands(page):
            name = presets.given(words, "--preset")
            named = presets.find(name, "compare") if name in presets.names() else None
            for option in ("--operators", "--operator"):
                if option in words:
                    for entry in split(words[words.index(option) + 1], option):
                        for spec in layer_list(named.layers_of(entry) if named else entry):
                            check(spec, 128)
                            seen += 1
    assert seen


def test_readme_is_one_look() -> None:
    """Under 100 lines; on the first screen a picture, about ten lines of use and the two commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    first = next(block for block in blocks(ROOT / "README.md") if block.language == "python")
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 14
    assert text.index("(docs/speed.svg)") < text.index("make demo") < text.index("make test")


def fidelity_rows() -> Any:
    return json.loads((ROOT / "results" / "benchmarks" / "fidelity.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize(
    ("picture", "drawn", "command"),
    [
        ("speed", koopman_picture.from_record, "python -m benchmarks.koopman_picture"),
        ("recall_based", recall_picture.from_records, "python -m benchmarks.recall_picture"),
        ("fidelity", lambda: fidelity_picture.svg(fidelity_rows()), "make bench-fidelity"),
    ],
)
def test_pictures_are_those_of_their_records(picture: str, drawn: Callable[[], str], command: str) -> None:
    assert (ROOT / "docs" / f"{picture}.svg").read_text(encoding="utf-8") == drawn(), (
        f"docs/{picture}.svg is not the picture of its record: run {command}"
    )


def test_the_page_of_machines_is_that_of_the_records() -> None:
    """results/benchmarks/machines.md is what ``python -m benchmarks.machines`` writes."""
    folder = ROOT / "results" / "benchmarks"
    assert (folder / "machines.md").read_text(encoding="utf-8") == machines.page(folder), (
        "results/benchmarks/machines.md is not of its records: run python -m benchmarks.machines results/benchmarks"
    )


def test_the_tree_of_folders_is_whole() -> None:
    """CONTRIBUTING.md names every package of the library, and nothing that is not there."""
    tree = next(block for block in blocks(ROOT / "CONTRIBUTING.md") if block.text.startswith("zonal/"))
    parts = re.findall(r"^[├└]── ([\w/.]+)", tree.text, flags=re.MULTILINE)
    for part in parts:
        assert (ROOT / "zonal" / part).exists(), f"the tree names zonal/{part}, which is not there"
    packages = {path.parent.name + "/" for path in (ROOT / "zonal").glob("*/__init__.py")}
    assert packages <= set(parts), f"the tree lacks {packages - set(parts)}"


def test_hooks_have_the_pinned_ruff() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (version,) = re.findall(r"ruff-pre-commit\n    rev: v(\S+)", hooks)
    assert f"ruff=={version}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_examples_are_named() -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert EXAMPLES
    for path in EXAMPLES:
        assert f"(../examples/{path.name})" in page
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", EXAMPLES, ids=identifier)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    """As a user runs them: a process of its own, warnings are errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


def test_declarations_in_the_pages_of_slots() -> None:
    """docs/algebra.md lists everything that can fill a slot."""
    page = (ROOT / "docs" / "algebra.md").read_text(encoding="utf-8")
    missing = [name for name, kind in DECLARED.items() if dataclasses.is_dataclass(kind) and f"`{name}`" not in page]
    assert not missing, f"docs/algebra.md does not name {', '.join(missing)}"


@pytest.mark.parametrize("name", pages.PAGES)
def test_pages_repeat_what_code_and_records_say(name: str) -> None:
    """Tables of operators, lists of links and the tree are those of the code, and tables of errors those of records."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == pages.PAGES[name](page), (
        f"docs/{name} is not what the code or a record says: run python -m tools.pages"
    )


def test_theorems_name_their_tests() -> None:
    """Each row of the pages of theorems ends with a verdict, and names tests that are there."""
    rows = [
        line.strip("| ").split(" | ")
        for name in ("theorems", "osets", "carriers")
        for line in prose(ROOT / "docs" / f"{name}.md").splitlines()
        if line.startswith("|") and not line.startswith(("| paper", "|---"))
    ]
    assert len(rows) > 20
    for row in rows:
        assert row[-1] in ("holds", "corrected", "false"), row
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[-2])
        assert named, row
        for path, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE), (
                f"{path}::{name}"
            )
