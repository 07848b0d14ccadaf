"""``python -m leveret``: the same as the command ``leveret``."""

from __future__ import annotations

import sys

from leveret.broker.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
