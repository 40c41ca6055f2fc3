"""``python -m zonal`` is ``zonal``."""

import sys

from zonal.cli import main

if __name__ == "__main__":
    sys.exit(main())
