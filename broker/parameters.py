"""Runtime parameters: what administrators set while the broker runs.

Policies (``policies/``) and limits (``limits.py``) are such: RabbitMQ keeps them by component and
name, with a JSON value, and so does ``storage/``. Here is what they have in common.
"""

from __future__ import annotations

from typing import cast

from leveret.broker.queues.erlang_terms import notation
from leveret.protocol.field_table import Field


class ParameterError(ValueError):
    """Something that cannot be set as asked; the text is for the person who asked."""


class NoSuchParameter(ParameterError):
    """It is not there to be cleared."""


def term(value: object) -> str:
    """A value that came as JSON, as RabbitMQ's texts show it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, str):
        return notation(Field("S", value))
    if isinstance(value, float):
        return notation(Field("d", value))
    if isinstance(value, list | tuple):
        return f"[{','.join(map(term, value))}]"
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value).items()
        return "#{" + ",".join(f"{term(key)} => {term(item)}" for key, item in entries) + "}"
    return str(value)


def pairs(values: dict[str, object]) -> str:
    """Entries of a JSON object as a list of Erlang's pairs."""
    return "[" + ",".join(f"{{{term(key)},{term(value)}}}" for key, value in values.items()) + "]"
