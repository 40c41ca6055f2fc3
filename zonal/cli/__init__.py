"""The command line: ``zonal compare``, ``train``, ``generate``, ``convert``, ``ingest``, ``ask``, ``tokenizer``,
``tasks``, ``report``, ``search``, ``explain``, ``influence``, ``build``, ``bench`` and ``demo``.

Exit codes: 0 done; 1 some runs failed, or nothing in memory fits a question; 2 a mistake in the call or the data, told
in one line; 130 stopped by Ctrl-C, with a line on how to go on; 141 when the reader of the output has gone.
"""

from zonal.cli.app import main

__all__ = ["main"]
