"""Every test of the hot codec runs over both twins."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.protocol.streams import COMPILED, PURE, Twin

# Examples are cheap here, but a busy machine must not fail a test by the clock.
settings.register_profile("protocol", deadline=None)
settings.load_profile("protocol")


@pytest.fixture(scope="session", params=["pure", "compiled"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "pure":
        return PURE
    if COMPILED is None:
        pytest.skip("the compiled codec was not built")
    return COMPILED


@pytest.fixture(scope="session")
def both_twins() -> tuple[Twin, Twin]:
    if COMPILED is None:
        pytest.skip("the compiled codec was not built")
    return PURE, COMPILED
