"""A process that runs runs of a comparison for its parent: ``python -m zonal.training.worker DIRECTORY THREADS``.

Lines of JSON on standard input: {"run": the fields of a PlannedRun}; "stop" or the end of input (the parent is gone)
stops the current run after its update, with a checkpoint. Lines of JSON on standard output: events, {"event": "Idle"}
when ready for a run, and {"event": "Fatal", "kind": …, "message": …} before the process ends for an error that concerns
all runs.
"""

import json
import os
import queue
import signal
import sys
import threading

import torch

from zonal.errors import ZonalError
from zonal.training import events
from zonal.training.compare import Comparison
from zonal.training.spec import PlannedRun


def main(directory: str, threads: int) -> int:
    """Serve until the input ends; 0 when that was orderly."""
    # a terminal sends Ctrl-C to parent and child alike; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # the pipe is for events only: whatever else prints goes to standard error
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    stop = threading.Event()
    orders: queue.Queue[PlannedRun | None] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if order == "stop":
                break
            orders.put(PlannedRun(**order["run"]))
        stop.set()
        orders.put(None)

    def send(values: dict) -> None:
        # a vanished parent is noticed by the end of input; until the run has stopped its events go nowhere
        try:
            pipe.write(json.dumps(values) + "\n")
        except BrokenPipeError:
            stop.set()

    threading.Thread(target=listen, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        comparison = Comparison.open(directory)
        while True:
            send({"event": "Idle"})
            run = orders.get()
            if run is None:
                return 0
            comparison.execute(run, lambda event: send(events.to_json(event)), stop.is_set)
    except ZonalError as error:
        send({"event": "Fatal", "kind": type(error).__name__, "message": str(error)})
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
