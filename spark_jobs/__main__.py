"""``python -m leveret.spark_jobs``, and the file to give to ``spark-submit``."""

from __future__ import annotations

import sys

from leveret.spark_jobs.cli import main

if __name__ == "__main__":
    sys.exit(main())
