"""The pattern of a policy: a regular expression as RabbitMQ reads it, over the bytes of a name.

RabbitMQ's expressions are Perl's (PCRE), Python's nearly so. What is spelled differently and
found in real policies is rewritten: ``\\z`` and ``\\Z``, ``(?<name>...)``, ``\\Q...\\E``, ``\\h``
and classes like ``[[:alpha:]]``. Other spellings Python does not know are refused by ``compile``,
never read as something else. A pattern is searched for anywhere in the name unless it is anchored.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import lru_cache

_POSIX = {
    b"alpha": b"a-zA-Z",
    b"digit": b"0-9",
    b"alnum": b"a-zA-Z0-9",
    b"upper": b"A-Z",
    b"lower": b"a-z",
    b"word": rb"\w",
    b"space": rb"\s",
    b"blank": rb" \t",
    b"xdigit": b"0-9A-Fa-f",
    b"punct": rb"!-/:-@\[-`{-~",
}
# Everything that is not a single byte which stands for itself.
_TOKEN = re.compile(
    rb"\\Q(?P<literal>.*?)(?:\\E|\Z)"
    rb"|(?P<escape>\\.)"
    rb"|\[:(?P<posix>\^?[a-z]+):\]"
    rb"|(?P<class_start>\[\^?\]?)"
    rb"|(?P<class_end>\])"
    rb"|(?P<group>\(\?<(?=[A-Za-z_]))",
    re.DOTALL,
)
_ESCAPES = {rb"\z": rb"\Z", rb"\Z": rb"(?=\n?\Z)", rb"\h": rb"[ \t]", rb"\E": b""}


class BadPattern(ValueError):
    """Not a regular expression, or not one that is understood here."""


def _rewritten(pattern: bytes) -> Iterator[bytes]:
    at = 0
    in_class = False
    for token in _TOKEN.finditer(pattern):
        between = pattern[at : token.start()]
        # Within a class Python keeps these for meanings that PCRE does not have.
        yield re.sub(rb"[&|~]", rb"\\\g<0>", between) if in_class else between
        at = token.end()
        if token["literal"] is not None:
            yield re.escape(token["literal"])
        elif token["escape"] is not None:
            if in_class:
                yield rb" \t" if token["escape"] == rb"\h" else token["escape"]
            else:
                yield _ESCAPES.get(token["escape"], token["escape"])
        elif token["posix"] is not None:
            if not in_class or token["posix"] not in _POSIX:
                raise BadPattern(f'{{"unknown or misplaced POSIX class",{token.start()}}}')
            yield _POSIX[token["posix"]]
        elif token["class_start"] is not None:
            if in_class:
                yield token[0].replace(b"[", rb"\[")
                in_class = not token[0].endswith(b"]")
            else:
                yield token[0]
                in_class = True
        elif token["class_end"] is not None:
            yield token[0]
            in_class = False
        else:
            yield token[0] if in_class else b"(?P<"
    yield pattern[at:]


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> re.Pattern[bytes]:
    """Raises BadPattern, with the reason as RabbitMQ would print it."""
    rewritten = b"".join(_rewritten(_bytes(pattern)))
    try:
        with warnings.catch_warnings():
            # What may mean something else one day means something else to PCRE already.
            warnings.simplefilter("error")
            return re.compile(rewritten)
    except re.error as error:
        raise BadPattern(f'{{"{error.msg}",{error.pos or 0}}}') from error
    except (Warning, RecursionError, OverflowError) as error:
        raise BadPattern(f'{{"{error}",0}}') from error


def is_match(pattern: str, name: str) -> bool:
    return compile_pattern(pattern).search(_bytes(name)) is not None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
