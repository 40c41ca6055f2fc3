"""Dead workers, little memory, lost and slow ranks, and two processes in one folder."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from faults.child import Child, Fault
from faults.kills import Place, different, sentence_of
from faults.victims import SMALL, VICTIMS, leftovers, run_result

TESTS = Path(__file__).resolve().parents[1]


def little_memory(name: str, base: Path, count: int, draw: random.Random) -> dict[str, Any]:
    """Give a victim 64 KiB to 256 MiB more than is in use. It ends, or says that memory is short, and goes on where
    there is more.
    """
    place = Place(VICTIMS[name], base)
    whole = place.whole()
    outcomes = {"finished": 0, "said": 0, "ended by the operating system or another library": 0}
    failures: list[str] = []
    for _ in range(count):
        fault = Fault(memory=int(2 ** draw.uniform(16, 28)))
        try:
            with place.fresh():
                facts = place.victim.told(place.root)
                ended = place.run(fault)
                if ended.code == 0:
                    outcomes["finished"] += 1
                elif ended.code < 0:  # such as an abort of C++ or Rust, which Python cannot catch
                    outcomes["ended by the operating system or another library"] += 1
                else:
                    sentence_of(ended, "memory")
                    outcomes["said"] += 1
                place.finish(place.told(facts, ended), whole)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error} after {fault}")
    return {"limits": count, "outcomes": outcomes, "failures": [each[:600] for each in failures[:5]]}


def two_processes(name: str, base: Path, count: int, draw: random.Random) -> dict[str, Any]:
    """Start a victim a second time in its folder while it runs. Each ends well, or says that the other is there."""
    place = Place(VICTIMS[name], base)
    whole = place.whole()
    outcomes = {"both finished": 0, "one was refused": 0}
    failures: list[str] = []
    for _ in range(count):
        delay = draw.uniform(0, whole.ended.seconds)
        try:
            with place.fresh():
                facts = place.victim.told(place.root)
                first = Child(place.words, place.root, prepare=place.victim.prepare)
                time.sleep(delay)
                second = Child(place.words, place.root, prepare=place.victim.prepare, log="second")
                ends = [first.ended(), second.ended()]
                refused = [each for each in ends if each.code != 0]
                for each in refused:
                    sentence_of(each, "in use by another process", place.victim.again or "in use")
                assert len(refused) < len(ends), [each.said[-300:] for each in ends]
                outcomes["one was refused" if refused else "both finished"] += 1
                place.finish(place.victim.told(place.root) | facts, whole)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error} after {delay:.2f} s")
    return {"pairs": count, "outcomes": outcomes, "failures": [each[:600] for each in failures[:5]]}


def dead_workers(base: Path, count: int, draw: random.Random) -> dict[str, Any]:
    """Kill a worker of `zonal ingest --workers 2`, several times while it runs: the same bits."""
    place = Place(VICTIMS["ingest"], base)
    whole = place.whole()
    killed, failures = 0, list[str]()
    for _ in range(count):
        try:
            with place.fresh():
                running = Child([*place.words, "--workers", "2"], place.root, prepare=place.victim.prepare)
                until = time.monotonic() + 60
                while not workers_of(running.pid) and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(draw.uniform(0, 0.5))
                for worker in workers_of(running.pid)[:1]:
                    os.kill(worker, signal.SIGKILL)
                    killed += 1
                ended = running.ended()
                if ended.code != 0:
                    sentence_of(ended, "processes died")
                place.finish(place.told(frozenset(), ended), whole)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
    return {"runs": count, "workers_killed": killed, "failures": [each[:600] for each in failures[:5]]}


def workers_of(pid: int) -> list[int]:
    """The processes that a server of ``multiprocessing`` below a process has forked."""
    return [grand for child in children(pid) for grand in children(child)]


def children(pid: int) -> list[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return []
    return [int(word) for word in words]


def ranks(base: Path, count: int, draw: random.Random) -> dict[str, Any]:
    """Two ranks of torchrun, of which one is killed, or stopped for some seconds: the same command then ends with the
    bits of a run that nothing happened to.
    """
    place = Place(VICTIMS["train"], base)
    outcomes = {"killed": 0, "slow": 0}
    failures: list[str] = []
    with place.fresh():
        assert torchrun(place).wait() == 0, (place.base / "torchrun.log").read_text(encoding="utf-8")[-2000:]
        whole = run_result(place.root / "out")
    for number in range(count):
        lost = number % 2 == 0
        try:
            with place.fresh():
                running = torchrun(place)
                while not (place.root / "out" / "checkpoints").exists() and running.poll() is None:
                    time.sleep(0.02)
                time.sleep(draw.uniform(0, 0.3))
                found = children(running.pid)
                if found:
                    victim = draw.choice(found)
                    os.kill(victim, signal.SIGKILL if lost else signal.SIGSTOP)
                    outcomes["killed" if lost else "slow"] += 1
                    if not lost:
                        time.sleep(3)
                        os.kill(victim, signal.SIGCONT)
                code = running.wait()
                assert (code != 0) == (lost and bool(found)), f"torchrun ended with {code}"
                if code:
                    code = torchrun(place).wait()
                assert code == 0, (place.base / "torchrun.log").read_text(encoding="utf-8")[-600:]
                wrong = different(run_result(place.root / "out"), whole)
                assert wrong is None, wrong
                assert not leftovers(place.root / "out"), leftovers(place.root / "out")
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
    return {"runs": count, **outcomes, "failures": [each[:600] for each in failures[:5]]}


def torchrun(place: Place) -> subprocess.Popen[bytes]:
    """Training on two processes, in the background."""
    words = [
        *("train", *SMALL, "--data", str(place.base / "inputs" / "text.txt"), "--operator", "sko", "--steps", "40"),
        *("--checkpoint-every", "5", "--out", str(place.root / "out")),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "zonal"]
    where = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(where), "ZONAL_CACHE": str(place.root / "cache")}
    with open(place.base / "torchrun.log", "wb") as log:
        return subprocess.Popen([*command, *words], env=environment, stdout=log, stderr=log)
