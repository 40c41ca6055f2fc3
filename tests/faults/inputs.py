"""What commands are given and files are copied from: each is made once, in a child, when it is first needed."""

import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

from faults.victims import SMALL, VICTIMS, often
from small_llama import save_model_of

from zonal import ingest
from zonal.cache import cache_folder
from zonal.cli import main
from zonal.data.corpora import novel


def _texts(folder: Path) -> None:
    """A text, a folder of texts, and the archive of their earlier state."""
    (folder / "texts").mkdir()
    parts = novel()[10_000:60_000].split()
    texts = {f"{n:02}.txt": " ".join(parts[60 * n : 60 * n + 60]) for n in range(48)}
    (folder / "text.txt").write_text(novel()[:30_000], encoding="utf-8")
    for name, content in texts.items():
        (folder / "texts" / name).write_text(content + (" once" if name < "20" else ""), encoding="utf-8")
    (folder / "texts" / "gone.txt").write_text("This will be gone.", encoding="utf-8")
    often()
    ingest.ingest(folder / "texts", folder / "archive", heads=4, size=20)
    (folder / "texts" / "gone.txt").unlink()
    for name, content in texts.items():
        (folder / "texts" / name).write_text(content, encoding="utf-8")


def _command(victim: str, folder: Path, out: str) -> None:
    """The output of a victim's command, under another name."""
    root = folder / f"{out}.making"
    root.mkdir()
    VICTIMS[victim].prepare()
    assert main(VICTIMS[victim].words(folder, root)) == 0
    for path in root.glob("out*"):
        path.rename(folder / path.name.replace("out", out, 1))
    shutil.rmtree(root)


def _model(folder: Path) -> None:
    """A small Llama with a tokeniser."""
    save_model_of((folder / "text.txt").read_text(encoding="utf-8"), folder / "model")


def _sharded(folder: Path) -> None:
    """The run of a process that was started as by torchrun."""
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="one"
    )
    words = ["train", *SMALL, "--data", str(folder / "text.txt"), "--operator", "sko", "--steps", "4"]
    assert main([*words, "--checkpoint-every", "2", "--out", str(folder / "sharded")]) == 0


INPUTS: dict[str, tuple[tuple[str, ...], Callable[[Path], object]]] = {
    "texts": ((), _texts),
    "model": (("texts",), _model),
    "comparison": (("texts",), lambda folder: _command("compare", folder, "comparison")),
    "converted": (("model",), lambda folder: _command("convert", folder, "converted")),
    "sharded": (("texts",), _sharded),
}
"""What each needs, and how it is made."""


def need(base: Path, *names: str) -> None:
    """Make inputs that are not there yet."""
    folder = base / "inputs"
    if not folder.exists():
        folder.mkdir()
        kernels = cache_folder() / "kernels"  # compiled by whoever ran first
        for each in (kernels, base / "cache" / "machine"):
            each.mkdir(parents=True, exist_ok=True)
        (base / "cache" / "kernels").symlink_to(kernels)
    for name in names:
        before, make = INPUTS[name]
        need(base, *before)
        if not (folder / name).exists():
            in_a_child(lambda make=make: make(folder), base)


def in_a_child(work: Callable[[], object], base: Path) -> None:
    """Tensor operations and the threads of other libraries stay out of this process, which is forked often."""
    child, log = os.fork(), base / "inputs.log"
    if not child:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["ZONAL_CACHE"] = str(base / "cache")
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"faults: an input could not be made: {log.read_text()[-2000:]}")


__all__ = ["in_a_child", "need"]
