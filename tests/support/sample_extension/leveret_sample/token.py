"""An auth mechanism: a shared token and a name instead of a password."""

from __future__ import annotations

import hmac
import os
from typing import TYPE_CHECKING

from leveret.broker.auth.access import Access, FullAccess
from leveret.broker.auth.mechanisms import AuthMechanism, MalformedResponse

if TYPE_CHECKING:
    from leveret.broker.auth.users import Users


class Token(AuthMechanism):
    """``user NUL token``; the token is the one in SAMPLE_TOKEN."""

    def handle_response(self, response: bytes, users: Users) -> Access | None:
        user, separator, token = response.partition(b"\0")
        if not separator:
            raise MalformedResponse
        if not hmac.compare_digest(token, os.environb[b"SAMPLE_TOKEN"]):
            return None
        return FullAccess(user.decode("utf-8", "surrogateescape"))
