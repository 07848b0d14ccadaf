"""Plays every scenario frame by frame and compares it with what RabbitMQ 3.10 answered.

One broker process serves all scenarios of a worker. LEVERET_TEST_AMQP_PORT names a broker that
runs already instead (RabbitMQ, to check the recordings themselves), LEVERET_TEST_LIMITED the
``user:password`` that the topic ``permissions`` needs. See README.md here.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
from wiredrive import cli

from tests.wire.pending import PENDING

LIMITED = os.environ.get("LEVERET_TEST_LIMITED")
SCENARIOS = cli.load(["open"])


def label(scenario: cli.driver.Scenario) -> str:
    return f"{scenario.topic}/{scenario.name}"


def as_case(scenario: cli.driver.Scenario) -> object:
    marks: list[pytest.MarkDecorator] = []
    if "limited_user" in scenario.needs and not LIMITED:
        reason = "needs a user with few permissions: LEVERET_TEST_LIMITED=user:password"
        marks.append(pytest.mark.skip(reason=reason))
    elif label(scenario) in PENDING:
        marks.append(pytest.mark.xfail(reason=PENDING[label(scenario)], strict=True))
    return pytest.param(scenario, id=label(scenario), marks=marks)


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> argparse.Namespace:
    """The broker under test, as the driver wants to be told."""
    given = os.environ.get("LEVERET_TEST_AMQP_PORT")
    # Asked for only here, so that no process is started when another broker was named.
    port = int(given) if given else request.getfixturevalue("broker_process").port
    return argparse.Namespace(
        host="127.0.0.1",
        port=port,
        user="guest",
        password="guest",
        vhost="/",
        timeout=5.0,
        limited=LIMITED,
    )


@pytest.mark.parametrize("scenario", [as_case(scenario) for scenario in SCENARIOS])
def test_scenario(scenario: cli.driver.Scenario, target: argparse.Namespace) -> None:
    if label(scenario) in PENDING:
        # It waits for what does not come: not for long.
        target = argparse.Namespace(**{**vars(target), "timeout": 1.0})
    recorded = json.loads(Path(cli.default_golden(scenario)).read_text(encoding="utf-8"))
    want, got = recorded["transcript"], cli.play(scenario, target)
    if scenario.any_ending:
        want, got = cli.blunt(want), cli.blunt(got)
    differences = cli.differences(want, got, strict_text=False)
    assert not differences, f"{scenario.doc} (- RabbitMQ, + here)\n" + "\n".join(differences)


def test_every_recording_is_played() -> None:
    recorded = {
        f"{file.parent.name}/{file.stem}" for file in Path(cli.golden_root("open")).rglob("*.json")
    }
    assert recorded == {label(scenario) for scenario in SCENARIOS}


def test_pending_names_scenarios_that_exist() -> None:
    assert set(PENDING) <= {label(scenario) for scenario in SCENARIOS}
