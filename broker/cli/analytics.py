"""``leveret analytics …``: hands over to the analytics on Spark.

The one place where the broker's side names the other. Only its flags are loaded here; Spark itself
is imported when one of its commands runs.
"""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from leveret.spark_jobs import cli

    parser = commands.add_parser(
        "analytics",
        help="answer questions from the event log, on Spark",
        description=cli.DESCRIPTION,
        allow_abbrev=False,
    )
    cli.add_commands(parser)
