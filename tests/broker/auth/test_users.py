"""Passwords are kept as salted hashes, in RabbitMQ's form [150]."""

from __future__ import annotations

import hashlib

import pytest

from leveret.broker.auth.access import FullAccess
from leveret.broker.auth.users import Users, hash_password
from leveret.broker.resource import Resource


@pytest.fixture
def users() -> Users:
    users = Users()
    users.add("guest", "secret")
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


def test_a_user_added_again_has_the_new_password(users: Users) -> None:
    users.add("guest", "other")
    assert users.authenticate("guest", b"secret") is None
    assert users.authenticate("guest", b"other") == FullAccess("guest")


def test_the_default_user_may_do_everything_but_be_somebody_else() -> None:
    """[46]"""
    access = FullAccess("guest")
    for permission in ("configure", "write", "read"):
        access.check(Resource("/", "queue", "q"), permission)
    assert not access.may_impersonate
