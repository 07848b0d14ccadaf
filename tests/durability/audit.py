"""Looks into the files of a broker that was stopped: do rows, counters and references agree?"""

from __future__ import annotations

from pathlib import Path

from leveret.storage.check import check_folder


def audit(data: Path) -> list[str]:
    """What is wrong, in words; nothing if all is well.

    A broker that was stopped in order leaves nothing to be put right by the next start, so what
    ``leveret check`` only remarks is wrong here.
    """
    report = check_folder(data)
    return [str(finding) for finding in (*report.problems, *report.remarks)]
