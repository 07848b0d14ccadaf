"""Settings: where they come from, what is refused and in which words."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from leveret.broker.config import SETTINGS, Settings, SettingsError, load_settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def write(folder: Path, text: str) -> Path:
    file = folder / "leveret.toml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(
    config_file: Path | None = None,
    env: dict[str, str] | None = None,
    flags: dict[str, object] | None = None,
) -> str:
    with pytest.raises(SettingsError) as refused:
        load_settings(config_file, env or {}, flags or {})
    return str(refused.value)


def test_defaults_are_rabbitmqs() -> None:
    settings = load_settings(None, {}, {})
    assert (settings.host, settings.port) == ("127.0.0.1", 5672)
    assert (settings.default_user, settings.default_pass, settings.default_vhost) == (
        "guest",
        "guest",
        "/",
    )
    assert (settings.channel_max, settings.frame_max, settings.heartbeat) == (2047, 131072, 60)


def test_later_sources_win(tmp_path: Path) -> None:
    """Defaults, then file, then environment, then flags."""
    file = write(tmp_path, "port = 1\nheartbeat = 1\nframe_max = 5000\n")
    env = {"LEVERET_PORT": "2", "LEVERET_HEARTBEAT": "2"}
    settings = load_settings(file, env, {"port": "3"})
    assert (settings.port, settings.heartbeat, settings.frame_max) == (3, 2, 5000)
    assert settings.channel_max == 2047


def test_flag_that_was_not_given_changes_nothing() -> None:
    assert load_settings(None, {"LEVERET_PORT": "2"}, {"port": None}).port == 2


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        pytest.param("1024", 1024, id="plain"),
        pytest.param("16MiB", 16 * 1024**2, id="binary"),
        pytest.param("16 mib", 16 * 1024**2, id="spaced-and-lower-case"),
        pytest.param("2kB", 2000, id="decimal"),
    ],
)
def test_sizes_may_have_units(written: str, size_bytes: int) -> None:
    settings = load_settings(None, {"LEVERET_MAX_MESSAGE_SIZE": written}, {})
    assert settings.max_message_size == size_bytes


@pytest.mark.parametrize("written", ["2.5", "2.5s", " 2.5 "])
def test_durations_are_seconds(written: str) -> None:
    assert load_settings(None, {}, {"handshake_timeout_s": written}).handshake_timeout_s == 2.5


def test_home_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/hare")
    assert load_settings(None, {}, {"data": "~/mq"}).data == Path("/home/hare/mq")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        pytest.param("port", "65536", id="port-too-large"),
        pytest.param("port", "-1", id="port-negative"),
        pytest.param("port", "http", id="port-a-word"),
        pytest.param("port", "", id="port-empty"),
        pytest.param("frame_max", "4095", id="frame-below-the-specification's-least"),
        pytest.param("max_message_size", "513MiB", id="above-the-hard-cap"),
        pytest.param("max_message_size", "0", id="zero-where-it-means-nothing"),
        pytest.param("max_message_size", "16MiX", id="no-such-unit"),
        pytest.param("handshake_timeout_s", "nan", id="not-a-number"),
        pytest.param("event_log_sample", "1.5", id="more-than-all"),
        pytest.param("event_log_sample", "nan", id="no-share"),
        pytest.param("handshake_timeout_s", "soon", id="no-duration"),
        pytest.param("default_user", "", id="empty-text"),
        pytest.param("default_vhost", "v" * 256, id="longer-than-a-short-string"),
        pytest.param("log_level", "loud", id="not-a-choice"),
        pytest.param("data", "a\0b", id="no-path"),
    ],
)
def test_wrong_value_is_refused_with_name_source_and_what_is_allowed(
    name: str, written: str
) -> None:
    allowed = {setting.name: setting.kind.allowed for setting in SETTINGS}[name]
    variable = f"LEVERET_{name.upper()}"
    text = refusal(env={variable: written})
    assert text == f"{name} = {written!r} (from {variable}): must be {allowed}"


@pytest.mark.parametrize(
    "line",
    ["port = true", "port = 1.5", "port = [1]", "host = 7", "event_log_sample = true"],
)
def test_wrong_type_in_the_file_is_refused(tmp_path: Path, line: str) -> None:
    file = write(tmp_path, line)
    text = refusal(file)
    assert text.startswith(line.split()[0])
    assert str(file) in text


@pytest.mark.parametrize("name", ["frame_max", "channel_max", "heartbeat"])
def test_zero_lifts_a_negotiated_limit(name: str) -> None:
    assert getattr(load_settings(None, {}, {name: "0"}), name) == 0


def test_unknown_setting_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = write(tmp_path, "hearbeat = 5\n")
    assert refusal(file) == (f"unknown setting hearbeat (from {file}): did you mean heartbeat?")


def test_unknown_setting_like_no_other_lists_them_all() -> None:
    text = refusal(env={"LEVERET_QQQ": "1"})
    assert "LEVERET_QQQ" in text
    assert all(setting.name in text for setting in SETTINGS)


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "port = 99999\nprot = 1\n")
    text = refusal(file, {"LEVERET_HEARTBEAT": "x"}, {"log_level": "loud"})
    assert [line.split(" ")[0] for line in text.splitlines()] == [
        "port",
        "unknown",
        "heartbeat",
        "log_level",
    ]
    assert "(from --log-level)" in text


def test_password_is_never_shown() -> None:
    text = refusal(env={"LEVERET_DEFAULT_PASS": "hush" * 100})
    assert "hush" not in text
    assert "hush" not in repr(Settings(default_pass="hush"))


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"LEVERET_PURE_CODEC": "1"}, id="codec-switch"),
        pytest.param({"LEVERET_CONFIG": "leveret.toml"}, id="config-file"),
        pytest.param({"LEVERET_TEST_AMQP_PORT": "5672"}, id="test-suite"),
        pytest.param(
            {
                "LEVERET_PORT": "tcp://10.0.0.1:5672",
                "LEVERET_PORT_5672_TCP_ADDR": "10.0.0.1",
                "LEVERET_SERVICE_HOST": "10.0.0.1",
            },
            id="kubernetes-service-links",
        ),
        pytest.param({"PORT": "1", "MYLEVERET_PORT": "1"}, id="somebody-elses"),
    ],
)
def test_variables_that_are_no_settings_are_let_be(env: dict[str, str]) -> None:
    assert load_settings(None, env, {}) == Settings()


def test_missing_file_is_named(tmp_path: Path) -> None:
    text = refusal(tmp_path / "none.toml")
    assert text == f"cannot read {tmp_path / 'none.toml'}: No such file or directory"


@pytest.mark.parametrize("content", [b"port =", b"host = '\xff'"])
def test_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "leveret.toml"
    file.write_bytes(content)
    assert refusal(file).startswith(f"{file} is not TOML: ")


def test_credit_that_would_stand_still_is_refused() -> None:
    text = refusal(flags={"credit_flow_initial": "10", "credit_flow_more_after": "11"})
    assert "credit_flow_more_after = 11" in text
    assert "credit_flow_initial = 10" in text


def test_settings_made_by_hand_are_checked_too() -> None:
    with pytest.raises(SettingsError, match="port = 70000"):
        Settings(port=70000)


def test_settings_do_not_change() -> None:
    settings = Settings()
    with pytest.raises(FrozenInstanceError):
        settings.port = 1  # type: ignore[misc]


def test_document_lists_every_setting_as_it_is() -> None:
    """docs/configuration.md has one row per field of Settings, in its order."""
    rows = [
        f"| `{setting.name}` | `{setting.kind.write(setting.default)}` | {setting.kind.allowed} |"
        f" {setting.about} |"
        for setting in SETTINGS
    ]
    written = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert written == rows
    assert [setting.name for setting in SETTINGS] == [field.name for field in fields(Settings)]
