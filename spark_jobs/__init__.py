"""Analytics over the broker's event log, on Spark.

``leveret analytics`` is the door (``cli.py``). From the log to an answer: segments of JSON lines
-> ``ingest.py`` -> Parquet by date, the lake -> one module per question in ``jobs/`` -> tables and
``report.py``. The broker never imports any of this; the definition of an event is shared.
"""
