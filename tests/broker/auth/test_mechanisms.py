"""PLAIN and AMQPLAIN: which responses are understood, and who gets in [145]."""

from __future__ import annotations

import pytest

from leveret.broker.auth.mechanisms import AmqPlain, AuthMechanism, MalformedResponse, Plain
from leveret.broker.auth.users import Users, make_user
from leveret.protocol.field_table import encode_table, table_from_python


@pytest.fixture(scope="module")
def users() -> Users:
    users = Users()
    users.load([make_user("guest", "secret", ()), make_user("jürgen", "pässword", ())])
    return users


def amqplain(**fields: object) -> bytes:
    """A table without its length."""
    return encode_table(table_from_python(dict(fields)))[4:]


@pytest.mark.parametrize(
    ("mechanism", "response"),
    [
        pytest.param(Plain, b"\0guest\0secret", id="plain"),
        pytest.param(AmqPlain, amqplain(LOGIN="guest", PASSWORD="secret"), id="amqplain"),
        pytest.param(
            AmqPlain, amqplain(PASSWORD="secret", x=1, LOGIN="guest"), id="amqplain-other-fields"
        ),
    ],
)
def test_accepted(users: Users, mechanism: type[AuthMechanism], response: bytes) -> None:
    access = mechanism().handle_response(response, users)
    assert access is not None
    assert access.user == "guest"


def test_names_and_passwords_are_utf8(users: Users) -> None:
    access = Plain().handle_response("\0jürgen\0pässword".encode(), users)
    assert access is not None
    assert access.user == "jürgen"
    response = amqplain(LOGIN="jürgen", PASSWORD="pässword")
    assert AmqPlain().handle_response(response, users) is not None


@pytest.mark.parametrize(
    ("mechanism", "response"),
    [
        pytest.param(Plain, b"\0guest\0wrong", id="plain-password"),
        pytest.param(Plain, b"\0guest\0", id="plain-no-password"),
        pytest.param(Plain, b"\0nobody\0secret", id="plain-user"),
        pytest.param(Plain, b"\0gu\xffest\0secret", id="plain-not-utf8"),
        pytest.param(AmqPlain, amqplain(LOGIN="guest", PASSWORD=""), id="amqplain-password"),
    ],
)
def test_refused(users: Users, mechanism: type[AuthMechanism], response: bytes) -> None:
    assert mechanism().handle_response(response, users) is None


@pytest.mark.parametrize(
    ("mechanism", "response"),
    [
        pytest.param(Plain, b"", id="plain-empty"),
        pytest.param(Plain, b"guest\0secret", id="plain-two-parts"),
        pytest.param(Plain, b"somebody\0guest\0secret", id="plain-for-somebody-else"),
        pytest.param(Plain, b"\0guest\0sec\0ret", id="plain-four-parts"),
        pytest.param(AmqPlain, b"", id="amqplain-empty"),
        pytest.param(AmqPlain, b"\0guest\0secret", id="amqplain-no-table"),
        pytest.param(AmqPlain, amqplain(LOGIN="guest"), id="amqplain-no-password"),
        pytest.param(AmqPlain, amqplain(LOGIN="guest", PASSWORD=1), id="amqplain-a-number"),
        pytest.param(AmqPlain, amqplain(LOGIN="guest", PASSWORD="secret")[:-1], id="amqplain-cut"),
    ],
)
def test_malformed(users: Users, mechanism: type[AuthMechanism], response: bytes) -> None:
    with pytest.raises(MalformedResponse):
        mechanism().handle_response(response, users)
