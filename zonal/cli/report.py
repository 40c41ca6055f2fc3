"""``zonal report``: the pages of folders where runs have ended, and their packed form."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zonal import report
from zonal.cli.options import shown
from zonal.errors import ArgumentError
from zonal.report import packing
from zonal.training import join

DESCRIPTION = """\
Write report.html, report.md and summary.json from the files of a comparison, or the two pages of a search. The runs
may be packed. With --pack, write a small copy of one folder into a new folder instead: its settings, report.md and
runs.tar.xz, which holds the runs that have ended: their records, all evaluations, 50 points of each training curve, and
the diagnostics of the runs that the page draws. Weights, report.html and runs that have not ended are left out. With
--join, write the runs of several comparisons with the same settings into a new folder as one.

Examples:
  zonal report runs/text-1a2b3c4d
  zonal report results/echo-table2 results/echo-table3
  zonal report runs/echo-table3 --pack results/echo-table3
  zonal report runs/seed-0 runs/seed-1 --join runs/both"""


@dataclass(frozen=True)
class Report:
    """Write the pages of folders where runs have ended."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders that zonal compare or zonal search wrote, packed or not."""
    pack: Annotated[Path | None, shown("DIR", "optional")] = None
    """The new folder for the packed form. The original folder is unchanged, and no pages are written there."""
    join: Annotated[Path | None, shown("DIR", "optional")] = None
    """The new folder for the runs of all folders, as one comparison. The original folders are unchanged."""


def run(options: Report, command: str) -> int:
    """Run the command; returns the exit code."""
    if not options.folders:
        raise ArgumentError("report: name a folder that `zonal compare` or `zonal search` wrote.")
    if options.join is not None:
        if options.pack is not None:
            raise ArgumentError("report: --join and --pack each write a new folder. Join first, then pack that folder.")
        page, _ = packing.write_pages(join(options.folders, options.join))
        print(f"Report: {page}")
        return 0
    if options.pack is not None and len(options.folders) > 1:
        raise ArgumentError(f"report: --pack takes one folder, got {len(options.folders)}. Pack them one at a time.")
    for folder in options.folders:
        if options.pack is None:
            page, _ = packing.write_pages(folder)
            print(f"Report: {page}")
        else:
            packed = packing.pack(folder, options.pack)
            print(f"Packed: {packed}")
            if (packed / "comparison.json").is_file():
                left_out = len(report.load(folder).runs) - len(report.load(packed).runs)
                if left_out:
                    runs = "1 run that has" if left_out == 1 else f"{left_out} runs that have"
                    again = f"zonal compare --resume {shlex.quote(str(folder))}"
                    print(f"Left out: {runs} not ended. `{again}` finishes them.")
    return 0
