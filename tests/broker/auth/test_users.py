"""Passwords are kept as salted hashes, in RabbitMQ's form [150]."""

from __future__ import annotations

import hashlib

import pytest

from leveret.broker.auth.access import FullAccess
from leveret.broker.auth.users import UserError, Users, hash_password, make_user
from leveret.broker.resource import Resource


@pytest.fixture
def users() -> Users:
    users = Users()
    users.load([make_user("guest", "secret", ["administrator"])])
    return users


def test_a_hash_is_salt_and_sha256_of_salt_and_password() -> None:
    salt = b"\x90\x8d\xc6\x0a"
    assert hash_password(b"test12", salt) == salt + hashlib.sha256(salt + b"test12").digest()
    assert len(hash_password(b"test12")) == 4 + 32


def test_equal_passwords_have_different_hashes() -> None:
    assert hash_password(b"same") != hash_password(b"same")


@pytest.mark.parametrize(
    ("name", "password", "enters"),
    [
        pytest.param("guest", b"secret", True, id="right"),
        pytest.param("guest", b"Secret", False, id="wrong-password"),
        pytest.param("guest", b"", False, id="no-password"),
        pytest.param("Guest", b"secret", False, id="names-have-case"),
        pytest.param("nobody", b"secret", False, id="unknown"),
        pytest.param("", b"", False, id="nothing-at-all"),
    ],
)
def test_login(users: Users, name: str, password: bytes, enters: bool) -> None:
    access = users.authenticate(name, password)
    assert (access is not None) is enters


async def test_a_new_password_holds_from_now_on(users: Users) -> None:
    await users.change_password("guest", "other")
    assert users.authenticate("guest", b"secret") is None
    assert users.authenticate("guest", b"other") == FullAccess("guest")
    assert users.list()[0].tags == ("administrator",)


async def test_an_empty_password_opens_nothing_even_where_it_was_set(users: Users) -> None:
    await users.change_password("guest", "")
    assert users.authenticate("guest", b"") is None


async def test_users_come_and_go(users: Users) -> None:
    await users.add("ann", "pw", ["monitoring"])
    assert [(user.name, user.tags) for user in users.list()] == [
        ("ann", ("monitoring",)),
        ("guest", ("administrator",)),
    ]
    await users.delete("guest")
    assert users.authenticate("guest", b"secret") is None
    assert [user.name for user in users.list()] == ["ann"]


async def test_tags_are_replaced_and_one_of_them_counts(users: Users) -> None:
    """[46]"""
    await users.set_tags("guest", ["impersonator", "x"])
    assert users.authenticate("guest", b"secret") == FullAccess("guest", may_impersonate=True)
    await users.set_tags("guest", ["administrator"])
    assert users.authenticate("guest", b"secret") == FullAccess("guest", may_impersonate=False)


async def test_what_cannot_be_is_refused(users: Users) -> None:
    with pytest.raises(UserError, match="user 'guest' exists already"):
        await users.add("guest", "other")
    for change in (
        users.change_password("nobody", "x"),
        users.set_tags("nobody", []),
        users.delete("nobody"),
    ):
        with pytest.raises(UserError, match="user 'nobody' does not exist"):
            await change
    for name in ("", "x" * 256):
        with pytest.raises(UserError, match="1 to 255 bytes"):
            await users.add(name, "x")
    with pytest.raises(UserError, match="UTF-8"):
        await users.add("\ud800", "x")
    assert users.authenticate("guest", b"secret") is not None


def test_the_default_user_may_do_everything_but_be_somebody_else() -> None:
    """[46]"""
    access = FullAccess("guest")
    for permission in ("configure", "write", "read"):
        access.check(Resource("/", "queue", "q"), permission)
    assert not access.may_impersonate
