"""From the protocol header to an open connection, as straight-line code [15-18].

What is wrong before the connection is open is mostly answered by silence: RabbitMQ writes the
reason to its log, waits three seconds, and closes the socket.
"""

from __future__ import annotations

import logging
import platform
from typing import TYPE_CHECKING, NamedTuple, cast

from pamqp import commands
from pamqp.base import Frame

from leveret import __version__
from leveret.broker.auth.mechanisms import AuthMechanism, MalformedResponse
from leveret.broker.connection.errors import SilentClose
from leveret.protocol.codec import make
from leveret.protocol.errors import (
    ConnectionException,
    channel_error,
    internal_error,
    not_allowed,
)
from leveret.protocol.field_table import Table, table_from_python

if TYPE_CHECKING:
    from leveret.broker.auth.access import Access
    from leveret.broker.connection.reader import Reader
    from leveret.broker.limits import Tenancy
    from leveret.broker.live_vhost import LiveVhost

log = logging.getLogger(__name__)

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
# Headers that are understood, with the version they are answered with. Clients of 0-8 and 0-9
# send what their specifications, confusingly, say.
VERSIONS = {
    PROTOCOL_HEADER: (0, 9),
    b"AMQP\x01\x01\x00\x09": (0, 9),
    b"AMQP\x01\x01\x08\x00": (8, 0),
    b"AMQP\x01\x01\x09\x01": (8, 0),
}
CAPABILITIES = (
    "publisher_confirms",
    "exchange_exchange_bindings",
    "basic.nack",
    "consumer_cancel_notify",
    "connection.blocked",
    "consumer_priorities",
    "authentication_failure_close",
    "per_consumer_qos",
    "direct_reply_to",
)
# Clients choose by product and version how to use basic.qos and more: we behave as this one does.
SPOKEN_PRODUCT = "RabbitMQ"
SPOKEN_VERSION = "3.10.8"
FRAME_MIN = 4096


class Opened(NamedTuple):
    """What the handshake has settled."""

    access: Access
    vhost: LiveVhost
    tenancy: Tenancy
    channel_max: int
    capabilities: frozenset[str]


def server_properties(*, with_capabilities: bool) -> Table:
    properties: dict[str, object] = {
        "cluster_name": f"leveret@{platform.node()}",
        "copyright": "The Leveret authors",
        "information": f"Leveret {__version__}: speaks as {SPOKEN_PRODUCT} {SPOKEN_VERSION} does",
        "platform": f"Python {platform.python_version()}",
        "product": SPOKEN_PRODUCT,
        "version": SPOKEN_VERSION,
    }
    if with_capabilities:
        properties = {"capabilities": dict.fromkeys(CAPABILITIES, True), **properties}
    return table_from_python(properties)


async def shake_hands(reader: Reader) -> Opened:
    """Raises SilentClose or ConnectionException where it comes to nothing."""
    header = await reader.read_header()
    version = VERSIONS.get(header)
    if version is None:
        reader.writer.write(PROTOCOL_HEADER)
        raise SilentClose(f"unknown protocol header {header!r}", delay_s=0)
    registry = reader.broker.registries.auth_mechanisms
    reader.send(
        make(
            commands.Connection.Start,
            version_major=version[0],
            version_minor=version[1],
            server_properties=server_properties(with_capabilities=version == (0, 9)),
            mechanisms=" ".join(registry.names()),
            locales="en_US",
        )
    )
    start_ok = await _read_silently(reader)
    if not isinstance(start_ok, commands.Connection.StartOk):
        raise _out_of_place(start_ok)
    facts = reader.facts
    facts.client_properties = cast(Table, start_ok.client_properties or {})
    facts.auth_mechanism = start_ok.mechanism or ""
    if version != (0, 9):
        facts.protocol = "{8,0,0}"
    capabilities = _client_capabilities(start_ok)
    access = _log_in(reader, start_ok, capabilities)
    channel_max = await _tune(reader)
    vhost, tenancy = await _open(reader, access.user)
    return Opened(access, vhost, tenancy, channel_max, capabilities)


def _client_capabilities(start_ok: commands.Connection.StartOk) -> frozenset[str]:
    properties = cast(Table, start_ok.client_properties or {})
    table = properties.get("capabilities")
    if table is None or not isinstance(table.value, dict):
        return frozenset()
    return frozenset(name for name, field in table.value.items() if field.value is True)


def _log_in(
    reader: Reader, start_ok: commands.Connection.StartOk, capabilities: frozenset[str]
) -> Access:
    mechanism = start_ok.mechanism or ""
    factory = reader.broker.registries.auth_mechanisms.get(mechanism)
    if factory is None:
        raise SilentClose(f"unknown authentication mechanism {mechanism!r}")
    chosen: AuthMechanism = factory()
    response = start_ok.response or b""
    if isinstance(response, str):
        response = response.encode("utf-8", "surrogateescape")
    try:
        access = chosen.handle_response(response, reader.broker.users)
    except MalformedResponse:
        _tell_login(reader, "", "malformed response")
        raise SilentClose(f"malformed {mechanism} response") from None
    if access is not None:
        _tell_login(reader, access.user, None)
        return access
    # A mechanism of an installed package need not tell who tried.
    tried = getattr(chosen, "user", "")
    _tell_login(reader, tried, f"user '{tried}' - invalid credentials")
    log.warning("%s: login refused (mechanism %s)", reader.name, mechanism)
    if "authentication_failure_close" not in capabilities:
        raise SilentClose("login refused")
    raise ConnectionException(
        403,
        f"Login was refused using authentication mechanism {mechanism}."
        " For details see the broker logfile.",
    )


def _tell_login(reader: Reader, user: str, refusal: str | None) -> None:
    events = reader.broker.events
    if events.is_heard:
        reader.facts.authenticated(events, user, refusal)


async def _tune(reader: Reader) -> int:
    settings = reader.broker.settings
    reader.send(
        make(
            commands.Connection.Tune,
            channel_max=settings.channel_max,
            frame_max=settings.frame_max,
            heartbeat=settings.heartbeat,
        )
    )
    tune_ok = await _read_silently(reader)
    if not isinstance(tune_ok, commands.Connection.TuneOk):
        raise _out_of_place(tune_ok)
    frame_max, channel_max = tune_ok.frame_max or 0, tune_ok.channel_max or 0
    _check_tuned("frame_max", frame_max, settings.frame_max)
    _check_tuned("channel_max", channel_max, settings.channel_max)
    if 0 < frame_max < FRAME_MIN:
        raise SilentClose(f"frame_max {frame_max} is below {FRAME_MIN}")
    reader.tuned(frame_max, tune_ok.heartbeat or 0)
    return channel_max


def _check_tuned(what: str, asked: int, offered: int) -> None:
    """A client may only lower a limit; 0 stands for none."""
    if offered and (asked == 0 or asked > offered):
        raise SilentClose(f"{what} {asked} where {offered} was offered")


async def _open(reader: Reader, user: str) -> tuple[LiveVhost, Tenancy]:
    """From here on the connection counts: whoever gets the tenancy must see that it ends."""
    opening = await reader.read_method()
    if not isinstance(opening, commands.Connection.Open):
        early = channel_error("unexpected method in connection state opening")
        early.method = divmod(opening.index, 1 << 16)
        raise early
    name = opening.virtual_host or ""
    vhost = reader.broker.vhosts.get(name)
    if vhost is None:
        error = not_allowed(f"vhost {name} not found")
        if name in reader.broker.vhosts.down:
            error = internal_error(
                f"access to vhost '{name}' refused for user '{user}': vhost '{name}' is down"
            )
        error.method = (10, 40)
        raise error
    try:
        tenancy = reader.broker.limits.admit(user, vhost)
    except ConnectionException as error:
        error.method = (10, 40)
        raise
    reader.send(make(commands.Connection.OpenOk, known_hosts=""))
    return vhost, tenancy


async def _read_silently(reader: Reader) -> Frame:
    """Before tune-ok even a malformed frame gets no answer."""
    try:
        return await reader.read_method()
    except ConnectionException as error:
        raise SilentClose(error.reply_text) from error


def _out_of_place(method: Frame) -> SilentClose:
    return SilentClose(f"{method.name} came where it was not due")
