from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.storage.bench import IMPLEMENTATIONS, Bench


@pytest.fixture(params=IMPLEMENTATIONS)
def make_bench(request: pytest.FixtureRequest) -> Callable[[], Bench]:
    """Makes a new queue of one implementation; a test that asks for it runs once for each."""
    make = IMPLEMENTATIONS[request.param]
    return lambda: Bench(make)


@pytest.fixture
def bench(make_bench: Callable[[], Bench]) -> Bench:
    return make_bench()
