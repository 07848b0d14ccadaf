"""``leveret policy`` and ``leveret limits``: what they do, what they print and how they end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from leveret.broker.admin.client import ControlError, ask
from leveret.broker.cli.main import main
from leveret.broker.config import Settings
from leveret.broker.server import Broker


async def run(*arguments: object) -> int:
    """A command, beside the broker in this loop."""
    return await asyncio.to_thread(main, [str(argument) for argument in arguments])


def output(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    printed, errors = capsys.readouterr()
    assert errors == ""
    answer: dict[str, Any] = json.loads(printed)
    return answer


async def test_set_list_and_clear_a_policy(
    broker: Broker, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    definition = '{"max-length": 10, "overflow": "reject-publish"}'
    data = ("--data", settings.data)
    command = ("policy", "set", "short", "^jobs\\.", definition, "--priority", 3)
    assert await run(*command, "--apply-to", "queues", *data) == 0
    assert capsys.readouterr().out == "policy 'short' is set in vhost '/'\n"
    assert await run("policy", "list", *data) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name   pattern  apply-to  priority  definition",
        f"short  ^jobs\\.  queues    3         {definition}",
    ]
    assert await run("policy", "clear", "short", *data) == 0
    assert capsys.readouterr().out == "policy 'short' is cleared in vhost '/'\n"
    assert broker.policies.list() == []


async def test_operator_policies_and_other_vhosts(
    broker: Broker, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    await broker.add_vhost("other")
    flags = ("--operator", "-p", "other", "--data", settings.data, "--json")
    assert await run("policy", "set", "cap", ".*", '{"max-length": 5}', *flags) == 0
    assert output(capsys) == {"ok": True}
    assert await run("policy", "list", *flags) == 0
    assert output(capsys) == {
        "ok": True,
        "policies": [
            {
                "vhost": "other",
                "name": "cap",
                "pattern": ".*",
                "apply-to": "all",
                "definition": {"max-length": 5},
                "priority": 0,
            }
        ],
    }
    assert broker.policies.list() == []
    assert await run("policy", "clear", "cap", *flags) == 0
    assert broker.operator_policies.list() == []


async def test_a_policy_that_is_refused(
    broker: Broker, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", settings.data)
    assert await run("policy", "set", "p", ".*", '{"max-lenght": 1}', *data) == 1
    assert capsys.readouterr().err.splitlines() == [
        'leveret: [{<<"max-lenght">>,1}] are not recognised policy settings',
        "leveret: did you mean max-length?",
    ]
    assert await run("policy", "set", "p", ".*", "max-length=1", *data) == 2
    assert capsys.readouterr().err.startswith("leveret: the definition is not JSON: ")
    assert await run("policy", "set", "p", ".*", "[1]", *data) == 1
    assert capsys.readouterr().err == (
        "leveret: a policy needs a definition: a JSON object of settings\n"
    )
    assert await run("policy", "clear", "p", *data) == 1
    assert capsys.readouterr().err == "leveret: there is no policy 'p' in vhost '/'\n"
    assert await run("policy", "list", "-p", "nowhere", *data) == 1
    assert capsys.readouterr().err == "leveret: there is no vhost 'nowhere', or it is down\n"


async def test_set_list_and_clear_limits(
    broker: Broker, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", settings.data)
    assert await run("limits", "set", '{"max-queues": 9, "max-connections": 5}', *data) == 0
    assert await run("limits", "set", '{"max-channels": 7}', "--user", "guest", *data) == 0
    assert capsys.readouterr().out.splitlines() == [
        "limits of vhost '/' are set",
        "limits of user 'guest' are set",
    ]
    assert await run("limits", "list", *data) == 0
    assert capsys.readouterr().out.splitlines() == [
        "of     name   limit            number",
        "vhost  /      max-queues       9",
        "vhost  /      max-connections  5",
        "user   guest  max-channels     7",
    ]
    assert await run("limits", "clear", "max-queues", *data) == 0
    assert await run("limits", "clear", "--user", "guest", *data) == 0
    assert capsys.readouterr().out.splitlines() == [
        "max-queues of vhost '/' cleared",
        "limits of user 'guest' cleared",
    ]
    assert await run("limits", "list", "--json", *data) == 0
    assert output(capsys) == {"ok": True, "vhosts": {"/": {"max-connections": 5}}, "users": {}}
    assert await run("limits", "list", "--json", "--user", "guest", *data) == 0
    assert output(capsys) == {"ok": True, "vhosts": {}, "users": {"guest": {}}}
    assert await run("limits", "list", "--json", "-p", "/", *data) == 0
    assert output(capsys) == {"ok": True, "vhosts": {"/": {"max-connections": 5}}, "users": {}}


async def test_limits_that_are_refused(
    broker: Broker, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", settings.data)
    assert await run("limits", "set", "{}", *data) == 1
    assert "give limits as a JSON object of numbers" in capsys.readouterr().err
    assert await run("limits", "set", "5,", *data) == 2
    assert "the limits are not JSON" in capsys.readouterr().err
    assert await run("limits", "set", '{"max-channels": 1}', "--user", "x", *data) == 1
    assert capsys.readouterr().err == "leveret: there is no user 'x'\n"


@pytest.mark.parametrize(
    "request_",
    [
        {"command": "set_policy"},
        {"command": "set_policy", "definition": {}, "vhost": "/", "name": "p", "pattern": 5},
        {
            "command": "set_policy",
            "definition": {"max-length": 1},
            "vhost": "/",
            "name": "p",
            "pattern": "",
            "priority": [],
        },
        {"command": "clear_policy", "vhost": 5, "name": "p"},
        {"command": "list_policies", "vhost": 5},
        {"command": "set_limits", "limits": [], "vhost": "/"},
        {"command": "set_limits", "limits": {"max-queues": None}, "vhost": "/"},
        {"command": "clear_limits"},
        {"command": "clear_limits", "vhost": "/", "limit": 5},
        {"command": "list_limits", "user": None},
    ],
)
async def test_a_request_of_the_wrong_shape_is_refused_not_a_bug(
    broker: Broker, settings: Settings, request_: dict[str, object]
) -> None:
    with pytest.raises(ControlError) as refused:
        await asyncio.to_thread(ask, settings.data, request_)
    assert "its log tells more" not in str(refused.value)


@pytest.mark.parametrize("command", ["policy", "limits"])
def test_without_a_broker(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "list", "--data", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("leveret: no broker runs on")


@pytest.mark.parametrize("command", [("policy", "list"), ("limits", "list")])
def test_wrong_settings_are_refused(
    command: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEVERET_HEARTBEAT", "x")
    assert main([*command]) == 2
    assert "heartbeat" in capsys.readouterr().err
