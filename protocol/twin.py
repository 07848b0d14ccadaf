"""One of the two hot codecs: the compiled one where it was built, else the pure one.

Everything outside this folder takes the hot shapes and ``Message`` from here. Setting
LEVERET_PURE_CODEC=1 asks for the pure one in any case.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__all__ = [
    "COMPILED",
    "AckRun",
    "Held",
    "Item",
    "LineBuffer",
    "Message",
    "PublishRun",
    "RawFrame",
    "Template",
    "cut",
    "encode_acks",
    "encode_deliveries",
    "format_lines",
    "is_told",
    "logged",
    "now_us",
    "stamp",
]

from leveret.protocol.items import Item

if TYPE_CHECKING:
    # The twins are alike, and mypy cannot look into the compiled one.
    from leveret.protocol.hot import cut, encode_acks, encode_deliveries
    from leveret.protocol.items import AckRun, PublishRun, RawFrame
    from leveret.protocol.lines import (
        Held,
        LineBuffer,
        Template,
        format_lines,
        is_told,
        logged,
        now_us,
        stamp,
    )
    from leveret.protocol.message import Message

    COMPILED: bool
else:
    try:
        if os.environ.get("LEVERET_PURE_CODEC") == "1":
            raise ImportError("the pure codec was asked for")
        from leveret.protocol._hot import (
            AckRun,
            Held,
            LineBuffer,
            Message,
            PublishRun,
            RawFrame,
            Template,
            cut,
            encode_acks,
            encode_deliveries,
            format_lines,
            is_told,
            logged,
            now_us,
            stamp,
        )

        COMPILED = True
    except ImportError:
        from leveret.protocol.hot import cut, encode_acks, encode_deliveries
        from leveret.protocol.items import AckRun, PublishRun, RawFrame
        from leveret.protocol.lines import (
            Held,
            LineBuffer,
            Template,
            format_lines,
            is_told,
            logged,
            now_us,
            stamp,
        )
        from leveret.protocol.message import Message

        COMPILED = False
