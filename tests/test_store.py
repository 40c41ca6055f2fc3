"""Files are whole or absent, and only our own are read."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch

from zonal import store
from zonal.errors import FileFormatError, InsufficientSpaceError, unknown_name

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor(3, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "slice": torch.arange(4.0)[::4],
}


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    store.save_tensors(path, TENSORS, {"kind": "test", "note": "ä"})
    tensors, header = store.load_tensors(path, "test")
    assert header["note"] == "ä"
    assert all(
        torch.equal(tensors[name], TENSORS[name]) and tensors[name].dtype == TENSORS[name].dtype for name in TENSORS
    )


def test_truncated_corrupt_foreign_and_other_kind(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    store.save_tensors(path, TENSORS, {"kind": "test", "note": "first"})
    whole = path.read_bytes()
    for cut in (0, 4, 20, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(FileFormatError, match="truncated"):
            store.load_tensors(path, "test")
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FileFormatError, match="checksum"):
        store.load_tensors(path, "test")
    path.write_bytes(whole.replace(b"first", b"other"))
    with pytest.raises(FileFormatError, match="checksum"):
        store.load_tensors(path, "test")
    path.write_bytes(whole)
    with pytest.raises(FileFormatError, match="'memory' was required"):
        store.load_tensors(path, "memory")
    safetensors.torch.save_file({"a": torch.ones(1)}, path)
    with pytest.raises(FileFormatError, match="another program"):
        store.load_tensors(path, "test")
    with pytest.raises(FileFormatError, match="does not exist"):
        store.load_tensors(tmp_path / "absent", "test")


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "x.safetensors", safetensors.safe_open
    store.save_tensors(path, {"a": torch.zeros(3)}, {"kind": "test", "note": "first"})

    class Replaced:
        """Another process writes the file anew whenever this one has closed it."""

        def __init__(self, target: Path, framework: str) -> None:
            self.file = opened(target, framework=framework)

        def __enter__(self) -> object:
            return self.file.__enter__()

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)
            store.save_tensors(path, {"a": torch.ones(3)}, {"kind": "test", "note": "second"})

    monkeypatch.setattr(safetensors, "safe_open", Replaced)
    for note, value in (("first", 0), ("second", 1)):
        tensors, header = store.load_tensors(path, "test")
        assert (header["note"], tensors["a"].tolist()) == (note, [value] * 3)


@pytest.mark.parametrize("fails_in", ["fsync", "replace"])
def test_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str) -> None:
    path = tmp_path / "x.json"
    store.write_json(path, {"v": 1})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, fails_in, full)
    with pytest.raises(InsufficientSpaceError, match="nothing was half written"):
        store.write_json(path, {"v": 2})
    monkeypatch.undo()
    assert store.read_json(path) == {"v": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_really_full_device() -> None:
    """/dev/full answers every write with ENOSPC."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with (
        pytest.raises(InsufficientSpaceError),
        store.writing("store", Path("x")),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"x")


def test_json_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(FileFormatError, match="not valid JSON"):
        store.read_json(tmp_path / "bad.json")
    with pytest.raises(FileFormatError, match="does not exist"):
        store.read_json(tmp_path / "none.json")
    with pytest.raises(FileFormatError, match="folder"):
        store.read_json(tmp_path)
    with pytest.raises(ValueError, match="JSON compliant"):
        store.write_json(tmp_path / "nan.json", float("nan"))
    assert not (tmp_path / "nan.json").exists()


def test_json_on_lines(tmp_path: Path) -> None:
    """What fits on a line stands on one; the rest is indented, and it is read as what was written."""
    path, name = tmp_path / "x.json", "é" * 100
    value = {"empty": {}, name: [1.5, [], None], "rows": [{"a": index, "b": [True]} for index in range(9)], "t": (1, 2)}
    store.write_json(path, value)
    text = path.read_text(encoding="utf-8")
    assert store.read_json(path) == {**value, "t": [1, 2]}
    assert text.splitlines()[:4] == ["{", ' "empty": {},', f' "{name}": [1.5, [], null],', ' "rows": [']
    assert '  {"a": 0, "b": [true]},\n  {"a": 1, "b": [true]},\n' in text
    assert text.endswith(' "t": [1, 2]\n}\n')
    assert max(map(len, text.splitlines())) <= store.LINE + 1  # a comma may follow
    store.write_json(path, {1: "x" * store.LINE})
    assert store.read_json(path) == {"1": "x" * store.LINE}


def test_written_files_are_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask belongs to all threads: one that reads it by changing it takes away the others' for good."""
    umask = os.umask(0o026)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")
            store.write_json(tmp_path / "x.json", {"ü": [1, 2]})
            store.save_tensors(tmp_path / "x.safetensors", {"x": torch.ones(2)}, {"kind": "x"})
            with store.staged_folder(tmp_path / "folder") as staging:
                (staging / "y").touch()
    finally:
        os.umask(umask)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("x.json", "x.safetensors", "folder")] == [
        0o640, 0o640, 0o751,
    ]  # fmt: skip
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"ü": [1, 2]}


def test_unknown_name_suggests() -> None:
    assert "Did you mean 'softmax'?" in str(unknown_name("call", "operator", "sofmax", ("softmax", "sko")))
    assert "Did you mean" not in str(unknown_name("call", "operator", "zzz", ("softmax", "sko")))


def test_parts_of_killed_processes_go_and_those_of_others_stay(tmp_path: Path) -> None:
    """The next write of a file or folder removes what a killed process was writing there; a process that writes holds
    its part.
    """
    for target in (tmp_path / "x.json", tmp_path / "folder"):
        left, other = tmp_path / f".{target.name}.abc_0123.part", tmp_path / f".{target.name}y.abc_0123.part"
        left.mkdir()
        (left / target.name).write_text("half")
        other.mkdir()
        (other / "half").write_text("half")
        if target.suffix:
            store.write_json(target, {"x": 1})
        else:
            with store.staged_folder(target) as staging:
                (staging / "file").touch()
                with store.staged_folder(tmp_path / "folder") as second:
                    (second / "file").touch()
                assert staging.exists()
                (target / "file").unlink()
        assert not left.exists()
        assert other.exists()
        assert sorted(each.name for each in tmp_path.glob(".*.part")) == [other.name]
        (other / "half").unlink()
        other.rmdir()


def test_only_own_parts_are_removed(tmp_path: Path) -> None:
    for name in (".x.json.abc_0123.part", ".thesis.part", ".x.json.abc.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".film.mkv_0123.part").touch()
    store.remove_parts(tmp_path)
    kept = {".film.mkv_0123.part", ".thesis.part", ".x.json.abc.part"}
    assert {each.name for each in tmp_path.iterdir()} == kept


def test_temporary_files_of_safetensors_go_with_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes to a file with a name of its own beside the one it was given, which a kill leaves there."""

    def killed(tensors: object, path: Path, metadata: object) -> None:
        (path.parent / ".tmpABC").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", killed)
        patch.setattr(store, "_remove", lambda path: None)  # by a kill
        with pytest.raises(KeyboardInterrupt):
            store.save_tensors(tmp_path / "x.safetensors", TENSORS, {"kind": "test"})
    assert list(tmp_path.rglob(".tmpABC"))
    store.save_tensors(tmp_path / "x.safetensors", TENSORS, {"kind": "test"})
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]


def test_an_object_has_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    store.write_checked(path, {"schema": 1, "steps": (100, 2.5), "label": "ä"})
    assert store.read_record(path, 1, "read", "Write it again.") == {"schema": 1, "steps": [100, 2.5], "label": "ä"}
    whole = path.read_text(encoding="utf-8")
    for damaged in (whole.replace("100", "300"), whole.replace('"checksum"', '"chdcksum"')):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(FileFormatError, match=r"read: the checksum of .*x\.json does not match .* Write it again"):
            store.read_record(path, 1, "read", "Write it again.")
    path.write_text('{"schema": 1, "steps": 300}')  # from before there were checksums
    assert store.read_record(path, 1, "read", "Write it again.")["steps"] == 300
    store.write_checked(path, {"schema": 1, "steps": 5}, over=False)
    assert store.read_json(path)["steps"] == 300
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_a_line_has_a_checksum() -> None:
    line = json.dumps(store.summed({"kind": "train", "loss": 0.1 + 0.2, "name": "ä"}))
    assert store.unharmed(json.loads(line))
    assert not store.unharmed(json.loads(line.replace("0.3", "0.2")))
    assert store.unharmed({"loss": 1.0})
