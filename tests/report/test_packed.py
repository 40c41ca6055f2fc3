"""Runs packed into one archive: the same pages, the same bytes each time, damage refused by name, whole or absent."""

import errno
import json
import lzma
import os
import signal
import tarfile
from pathlib import Path

import pytest
from report.comparison_folder import drawn, edited, summary_of, write_comparison
from report.test_report_diagnostics import measured
from report.test_report_key_embeddings import placed

from zonal import report, store
from zonal.cli.app import main
from zonal.errors import ArgumentError, FileFormatError, FileWriteError, InsufficientSpaceError
from zonal.report import archive, packing

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ("softmax", "sko")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = write_comparison(tmp_path_factory.mktemp("made") / "x", operators=OPERATORS, rates=(0.001,), steps=300)
    run = next(made.glob("runs/sko/*"))
    (run / "checkpoint.safetensors").write_bytes(b"weights")
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"kind": "train", "st')  # a line that a killed process left
    return made


@pytest.fixture(scope="module")
def packed(folder, tmp_path_factory):
    return packing.pack(folder, tmp_path_factory.mktemp("packed") / "x")


def test_what_is_kept(folder, packed):
    assert sorted(path.name for path in packed.iterdir()) == [
        "comparison.json",
        "report.md",
        "runs.tar.xz",
        "summary.json",
    ]
    with tarfile.open(packed / "runs.tar.xz") as plain:  # what tar makes of it
        assert all(entry.isfile() and entry.mode == 0o644 and entry.mtime == 0 for entry in plain)
        assert sorted(plain.getnames()) == sorted(archive.read(packed / "runs.tar.xz"))
    found = archive.read(packed / "runs.tar.xz")
    assert len(found) == 2 * len(list(folder.glob("runs/*/*")))
    for name, after in found.items():
        before = (folder / name).read_bytes()
        if name.endswith("run.json"):
            assert after == before
            continue
        lines = [line for line in before.splitlines() if line.endswith(b"}")]
        kinds = [json.loads(line)["kind"] for line in after.splitlines()]
        assert kinds.count("train") == archive.POINTS
        assert [line for line in after.splitlines() if b'"eval"' in line] == [
            line for line in lines if b'"eval"' in line
        ]
        training = {line["step"]: line for line in map(json.loads, lines) if line["kind"] == "train"}
        kept = [line for line in map(json.loads, after.splitlines()) if line["kind"] == "train"]
        assert (kept[0]["step"], kept[-1]["step"]) == (min(training), max(training))
        for line in kept:
            assert {"crc32", *line} == {"crc32", *training[line["step"]]}
            assert line["loss"] == pytest.approx(training[line["step"]]["loss"], rel=1e-6)
            assert len(repr(line["loss"])) <= archive.DIGITS + len("0.0")


def test_a_damaged_line_is_not_packed(tmp_path):
    made = write_comparison(tmp_path / "x", operators=OPERATORS, rates=(0.001,), steps=300)
    log = next(made.glob("runs/sko/*/metrics.jsonl"))
    lines = [json.dumps(store.summed(json.loads(line))) for line in log.read_text().splitlines()]
    log.write_text("\n".join(lines) + "\n")
    packing.pack(made, tmp_path / "whole")
    log.write_text("\n".join([lines[0].replace('"step": ', '"step": 1', 1), *lines[1:]]) + "\n")
    with pytest.raises(FileFormatError, match=r"metrics\.jsonl has a line that cannot be read .*CRC-32"):
        packing.pack(made, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


def test_insides_are_kept_of_the_runs_that_the_page_draws(tmp_path):
    made = write_comparison(tmp_path / "x", operators=OPERATORS, rates=(0.001, 0.003), steps=300)
    for run in made.glob("runs/*/*"):
        (run / "diagnostics.json").write_text(json.dumps(measured(0)))
        (run / "witnesses.json").write_text(json.dumps(placed()))
    small = packing.pack(made, tmp_path / "y")
    names = [Path(name) for name in archive.read(small / "runs.tar.xz")]
    assert sum(name.name == "run.json" for name in names) == len(list(made.glob("runs/*/*"))) > 4
    best = {
        row.operator: (f"lr-{row.learning_rate}", min(run.seed for run in row.runs)) for row in summary_of(made).rows
    }
    for kind in ("diagnostics.json", "witnesses.json"):
        kept = [name.parent for name in names if name.name == kind]
        assert sorted(place.parent.name for place in kept) == sorted(OPERATORS)
        for place in kept:
            rate, seed = best[place.parent.name]
            assert place.name == f"seed-{seed}-{rate}"
    before, after = (
        [(operator["diagnostics"], operator["embeddings"]) for operator in drawn(page)[0]["operators"]]
        for page, _ in map(packing.write_pages, (made, small))
    )
    assert before == after
    assert all(memory and keys for memory, keys in before)


def test_the_same_runs_are_the_same_bytes(folder, packed, tmp_path):
    again = packing.pack(folder, tmp_path / "y")
    assert (again / "runs.tar.xz").read_bytes() == (packed / "runs.tar.xz").read_bytes()


def test_pages_are_those_of_the_unpacked_folder(folder, packed, tmp_path):
    report.write_many([folder], tmp_path)
    for name in ("report.md", "summary.json"):
        assert (tmp_path / name).read_bytes() == (packed / name).read_bytes()
    page, _ = packing.write_pages(packed)
    assert page.stat().st_size > 100_000
    page.unlink()


def copy(packed, place):
    place.mkdir()
    for path in packed.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return place


def test_unpacking_gives_the_runs_back(packed, tmp_path):
    there = copy(packed, tmp_path / "z")
    before = report.load(packed).runs
    archive.unpack(there)
    assert not (there / "runs.tar.xz").exists()
    assert report.load(there).runs == before
    archive.unpack(there)  # nothing is left to do
    assert (
        packing.pack(there, tmp_path / "again").joinpath("runs.tar.xz").read_bytes()
        == (packed / "runs.tar.xz").read_bytes()
    )


def test_unpacking_that_was_killed_goes_on(packed, tmp_path):
    there = copy(packed, tmp_path / "z")
    whole = (there / "runs.tar.xz").read_bytes()
    archive.unpack(there)
    (there / "runs.tar.xz").write_bytes(whole)  # killed between the folders and the end of the archive
    assert report.load(there).runs == report.load(packed).runs
    archive.unpack(there)
    assert not (there / "runs.tar.xz").exists()


def test_other_runs_beside_an_archive_are_refused(packed, tmp_path):
    there = copy(packed, tmp_path / "z")
    whole = (there / "runs.tar.xz").read_bytes()
    archive.unpack(there)
    (there / "runs.tar.xz").write_bytes(whole)
    next(there.glob("runs/sko/*/run.json")).write_text("{}")
    for act in (report.load, archive.unpack):
        with pytest.raises(
            FileFormatError, match=r"runs\.tar\.xz and other runs beside it \(runs/sko/.*run.json differs\)"
        ):
            act(there)
    assert (there / "runs.tar.xz").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:2000] + b"?" * 40 + data[2040:],
        lambda data: data + b"?",
        lambda data: lzma.compress(lzma.decompress(data)[:3000]),
        lambda data: lzma.compress(b"no archive"),
    ],
)
def test_a_damaged_archive_is_refused_by_name(packed, tmp_path, damage):
    there = copy(packed, tmp_path / "z")
    (there / "runs.tar.xz").write_bytes(damage((there / "runs.tar.xz").read_bytes()))
    for act in (report.load, archive.unpack):
        with pytest.raises(FileFormatError, match=r"z/runs\.tar\.xz"):
            act(there)
    assert not (there / "runs").exists()


def entry(name="runs/sko/x/run.json", kind=tarfile.REGTYPE):
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, "/etc/hostname"
    return made


@pytest.mark.parametrize(
    "entries",
    [
        [entry("runs/../x/run.json")],
        [entry("../runs/x/run.json")],
        [entry("/runs/x/run.json")],
        [entry("runs/sko/x/run.pickle")],
        [entry("runs/run.json")],
        [entry("other/sko/x/run.json")],
        [entry(), entry()],
        [entry(kind=tarfile.SYMTYPE)],
        [entry(kind=tarfile.LNKTYPE)],
        [entry(kind=tarfile.DIRTYPE)],
        [entry(kind=tarfile.FIFOTYPE)],
    ],
    ids=lambda entries: f"{len(entries)}-{entries[0].name}-{entries[0].type!r}",
)
def test_an_archive_of_other_things_is_refused(packed, tmp_path, entries):
    there = copy(packed, tmp_path / "z")
    with tarfile.open(there / "runs.tar.xz", "w:xz") as made:
        for each in entries:
            made.addfile(each)
    for act in (report.load, archive.unpack):
        with pytest.raises(FileFormatError, match=r"z/runs\.tar\.xz holds '.*', which is no file of a run"):
            act(there)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["z"]
    assert not (there / "runs").exists()


def test_runs_that_have_not_ended_are_left_out(tmp_path, capsys):
    made = write_comparison(tmp_path / "x", operators=OPERATORS, rates=(0.001,), steps=30)
    for number, path in enumerate(made.glob("runs/*/*/run.json")):
        with edited(path) as record:
            record["status"] = "stopped"
        if number == 0:
            assert main(["report", str(made), "--pack", str(tmp_path / "y")]) == 0
            assert f"1 run that has not ended. `zonal compare --resume {made}`" in capsys.readouterr().out
            runs = report.load(tmp_path / "y").runs
            assert sum(1 for _ in made.glob("runs/*/*")) == len(runs) + 1
            assert all(run.status == "done" for run in runs)
    with pytest.raises(ArgumentError, match=r"6 runs of .*x have not ended. Finish them with --resume"):
        packing.pack(made, tmp_path / "z")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_record_is_not_packed(tmp_path, text):
    made = write_comparison(tmp_path / "x", operators=OPERATORS, rates=(0.001,), steps=30)
    next(made.glob("runs/sko/*/run.json")).write_text(text)
    with pytest.raises(FileFormatError, match=r"run\.json"):
        packing.pack(made, tmp_path / "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]


def test_what_is_there_is_not_replaced(folder, packed, tmp_path):
    with pytest.raises(ArgumentError, match=r"there already\. Choose a new folder\.$"):
        packing.pack(folder, packed)
    with pytest.raises(ArgumentError, match="packed already"):
        packing.pack(packed, tmp_path / "y")


def test_the_first_of_two_processes_stays(folder, tmp_path, monkeypatch):
    def other(path, contents):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()

    monkeypatch.setattr("zonal.report.archive.write", other)
    monkeypatch.setattr("zonal.report.packing.write_pages", lambda staging: (staging / "comparison.json", None))
    with pytest.raises(ArgumentError, match="out is there already: another process has written it"):
        packing.pack(folder, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["theirs"]


def killed_at(function, place, act):
    """Run ``act`` in a child process that is killed when it comes to ``function`` of the module ``place``."""
    child = os.fork()
    if child == 0:
        try:
            setattr(place, function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            act()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize(
    ("function", "place"), [("write", archive), ("write_pages", packing), ("replace", packing.os)], ids=str
)
def test_a_killed_process_leaves_what_was_there(folder, tmp_path, function, place):
    killed_at(function, place, lambda: packing.pack(folder, tmp_path / "y"))
    assert not (tmp_path / "y").exists()
    assert len(report.load(folder).runs) == 6
    packing.pack(folder, tmp_path / "y")
    assert len(report.load(tmp_path / "y").runs) == 6


def test_unpacking_is_whole_or_absent(packed, tmp_path):
    there = copy(packed, tmp_path / "z")
    killed_at("replace", packing.os, lambda: archive.unpack(there))
    assert not (there / "runs").exists()
    assert report.load(there).runs == report.load(packed).runs
    archive.unpack(there)
    assert len(list(there.glob("runs/*/*/run.json"))) == 6


def test_a_disk_that_refuses_is_told_by_the_folder_that_was_named(folder, packed, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    there = copy(packed, tmp_path / "z")
    with monkeypatch.context() as patched:
        patched.setattr(archive, "_put", full)
        with pytest.raises(InsufficientSpaceError, match="report: no space left while writing "):
            report.load(there)
        with pytest.raises(InsufficientSpaceError, match=r"unpack: no space left while writing .*z\."):
            archive.unpack(there)
        patched.setattr(archive, "write", full)
        with pytest.raises(InsufficientSpaceError, match=r"pack: no space left while writing .*y\."):
            packing.pack(folder, tmp_path / "y")
        patched.setattr(archive.tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(errno.EROFS, "read")))
        with pytest.raises(FileWriteError, match=r"pack: .*y cannot be written"):
            packing.pack(folder, tmp_path / "y")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["z"]
    archive.unpack(there)
    assert len(report.load(there).runs) == 6


def test_on_the_command_line(folder, packed, tmp_path, capsys):
    assert main(["report", str(folder), "--pack", str(tmp_path / "y")]) == 0
    assert (tmp_path / "y/runs.tar.xz").read_bytes() == (packed / "runs.tar.xz").read_bytes()
    assert main(["report", str(tmp_path / "y")]) == 0
    said = capsys.readouterr().out
    assert f"Report: {tmp_path / 'y/report.html'}" in said
    assert "Left out" not in said
    assert main(["report", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path), "--pack", str(tmp_path / "v")]) == 2
    assert main(["report"]) == 2
    assert main(["report", str(folder), str(packed), "--pack", str(tmp_path / "w")]) == 2
    said = capsys.readouterr().err
    assert said.count(f"{tmp_path} has no comparison.json and no search.json") == 2
    assert "takes one folder" in said


def test_paths_stand_as_the_command_named_them(tmp_path):
    command = "zonal compare --task text --data 'texts/**/*.rst' --tokenizer bpe.json --out /runs/x"
    task = {"name": "text", "source": "/home/me/texts/**/*.rst", "tokenizer": "/home/me/bpe.json", "other": "/a/b.txt"}
    made = write_comparison(tmp_path / "x", rates=(0.001,), steps=30, changes={"command": command, "task": task})
    small = packing.pack(made, tmp_path / "y")
    kept = json.loads((small / "comparison.json").read_text())
    assert kept["task"] == task | {"source": "texts/**/*.rst", "tokenizer": "bpe.json"}
    assert json.loads((made / "comparison.json").read_text())["task"] == task
    assert "/home/me" not in (small / "report.md").read_text()
    store.checked(small / "comparison.json", kept)
    assert report.load(small).command == command


@pytest.mark.parametrize("command", ["zonal compare --out 'x", 3])
def test_a_command_that_is_none_is_not_packed(tmp_path, command):
    made = write_comparison(tmp_path / "x", rates=(0.001,), steps=30, changes={"command": command})
    with pytest.raises(FileFormatError, match=r"comparison\.json"):
        packing.pack(made, tmp_path / "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]


def test_a_search_is_packed_with_its_regimes(tmp_path):
    made = write_comparison(
        tmp_path / "s/regimes/softmax-lr-0.01/steps-80", operators=OPERATORS, rates=(0.001,), steps=30
    )
    for name in ("search.json", "findings.json", "recipe.json"):
        (tmp_path / "s" / name).write_bytes((ROOT / "results/search-mqar-demo" / name).read_bytes())
    found = packing.pack(tmp_path / "s", tmp_path / "t")
    assert sorted(path.name for path in found.iterdir()) == [
        "findings.json",
        "recipe.json",
        "report.md",
        "runs.tar.xz",
        "search.json",
    ]
    archive.unpack(found)
    assert len(report.load(found / made.relative_to(tmp_path / "s")).runs) == 6


def test_a_search_that_has_not_ended_has_no_page(tmp_path):
    (tmp_path / "search.json").write_text("{}")
    for make in (lambda: packing.write_pages(tmp_path), lambda: packing.pack(tmp_path, tmp_path / "packed")):
        with pytest.raises(FileFormatError, match=r"has not ended .*zonal search --resume"):
            make()
