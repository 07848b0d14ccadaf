"""What a logged-in user may do: the hook through which every permission check goes [44, 151]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from leveret.broker.resource import Resource

Permission = Literal["configure", "write", "read"]


class Access(Protocol):
    """One user on one connection; asked once per run or method."""

    @property
    def user(self) -> str: ...

    @property
    def may_impersonate(self) -> bool:
        """May publish under another user-id (tag ``impersonator``) [46]."""

    def check(self, resource: Resource, permission: str) -> None:
        """Raises access_refused (403) if the user must not."""


@dataclass(frozen=True, slots=True)
class FullAccess:
    """A user who may do everything, as the default user may."""

    user: str
    may_impersonate: bool = False

    def check(self, resource: Resource, permission: str) -> None:
        pass
