"""The command ``leveret``: one file per group of commands."""
