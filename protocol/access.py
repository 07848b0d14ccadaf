"""access.request and access.request-ok: class 30, which AMQP 0-9-1 no longer has.

Clients of 0-8 and 0-9 ask for an access ticket before they do anything. RabbitMQ still answers,
with the same ticket each time, and looks at none that it is shown; pamqp does not know the class.
"""

from __future__ import annotations

from typing import ClassVar

from pamqp.base import Frame


class Request(Frame):
    # In wire order.
    __slots__: ClassVar[list[str]] = [  # noqa: RUF023
        "realm",
        "exclusive",
        "passive",
        "active",
        "write",
        "read",
    ]

    frame_id = 10
    index = 0x001E000A
    name = "Access.Request"
    synchronous = True

    _realm = "shortstr"
    _exclusive = _passive = _active = _write = _read = "bit"


class RequestOk(Frame):
    __slots__: ClassVar[list[str]] = ["ticket"]

    frame_id = 11
    index = 0x001E000B
    name = "Access.RequestOk"

    _ticket = "short"


METHODS: dict[int, type[Frame]] = {Request.index: Request, RequestOk.index: RequestOk}
