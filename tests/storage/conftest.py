from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.storage.bench import IMPLEMENTATIONS, Bench


@pytest.fixture(params=IMPLEMENTATIONS)
def make_bench(request: pytest.FixtureRequest) -> Iterator[Callable[[], Bench]]:
    """Makes a new queue of one implementation; a test that asks for it runs once for each."""
    make = IMPLEMENTATIONS[request.param]
    made: list[Bench] = []

    def make_one() -> Bench:
        # One at a time: a search for examples makes many.
        while made:
            made.pop().close()
        made.append(Bench(make))
        return made[-1]

    yield make_one
    while made:
        made.pop().close()


@pytest.fixture
def bench(make_bench: Callable[[], Bench]) -> Bench:
    return make_bench()
