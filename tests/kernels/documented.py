"""The link that docs/declare.md shows, as a module of its own."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "declare.md"


def student_t() -> str:
    """The block that declares it, to the letter."""
    (found,) = [
        block
        for block in re.findall(
            r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
        )
        if "class StudentT(" in block
    ]
    return found
