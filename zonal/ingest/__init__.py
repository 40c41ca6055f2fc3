"""Folders of texts in one memory of constant size, and an index of the spans that were read.

A span of text is a key and a value: the key marks the words of the span among hashed buckets, the value is a code of
random signs that stands for the span. The memory is their sum, S = sum_s k_s v_s^T, of whole numbers, which float32
holds without rounding: it does not depend on the order or the number of workers, and what is subtracted leaves nothing
behind. A question reads the rows of its words; the spans whose codes fit best are looked up in the index and read.
"""

from zonal.ingest.archive import Archive
from zonal.ingest.asking import Answer, ask
from zonal.ingest.folder import Skipped
from zonal.ingest.update import Update, ingest, merge

__all__ = ["Answer", "Archive", "Skipped", "Update", "ask", "ingest", "merge"]
