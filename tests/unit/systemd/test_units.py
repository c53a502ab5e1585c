"""The files of systemd/: every systemd since JetPack 6's knows their words, and copies agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edge_server.settings import read_settings

SYSTEMD = Path(__file__).parents[3] / "systemd"
UNITS = sorted([*SYSTEMD.glob("*.service"), *SYSTEMD.glob("*.path")])
DEVICES = sorted(SYSTEMD.glob("*.devices"))

# JetPack 6 (Ubuntu 22.04).
OLDEST = 249
# The version of systemd that brought each directive, by its manual pages and its NEWS; 0 is older
# than what any of them says.
SINCE = {
    **dict.fromkeys(
        (
            *("Description", "After", "Before", "ConditionPathExists", "WantedBy", "Type"),
            *("NotifyAccess", "RemainAfterExit", "ExecStart", "ExecReload", "Environment"),
            *("WatchdogSec", "Restart", "RestartSec", "User", "UMask", "Nice"),
            *("StandardOutput", "StandardError", "IOSchedulingClass", "OOMScoreAdjust"),
            *("CapabilityBoundingSet", "PrivateNetwork", "PrivateTmp", "PathExists"),
        ),
        0,
    ),
    "NoNewPrivileges": 187,
    "SystemCallFilter": 187,
    "TimeoutStartSec": 188,
    "TimeoutStopSec": 188,
    "RestartPreventExitStatus": 189,
    "SuccessExitStatus": 189,
    "DeviceAllow": 208,
    "DevicePolicy": 208,
    "PrivateDevices": 209,
    "SystemCallArchitectures": 209,
    "SystemCallErrorNumber": 209,
    "RestrictAddressFamilies": 211,
    "RuntimeDirectory": 211,
    "RuntimeDirectoryMode": 211,
    "ProtectHome": 214,
    "ProtectSystem": 214,
    "RestartForceExitStatus": 215,
    "StartLimitBurst": 230,
    "StartLimitIntervalSec": 230,
    "MemoryDenyWriteExecute": 231,
    "ReadWritePaths": 231,
    "RestrictRealtime": 231,
    "CPUWeight": 232,
    "ProtectControlGroups": 232,
    "ProtectKernelModules": 232,
    "ProtectKernelTunables": 232,
    "RemoveIPC": 232,
    "RestrictNamespaces": 233,
    "CacheDirectory": 235,
    "CacheDirectoryMode": 235,
    "IPAddressDeny": 235,
    "LockPersonality": 235,
    "RuntimeDirectoryPreserve": 235,
    "StateDirectory": 235,
    "StateDirectoryMode": 235,
    "PrivateMounts": 239,
    "ProtectHostname": 242,
    "RestrictSUIDSGID": 242,
    "OOMPolicy": 243,
    "ProtectKernelLogs": 244,
    "ProtectClock": 245,
    "ProtectProc": 247,
    # Not used below; here for who thinks of them.
    "LoadCredential": 247,
    "LoadCredentialEncrypted": 250,
    "ExitType": 250,
    "OpenFile": 253,
    "ReloadSignal": 253,
    "ImportCredential": 254,
    "MemoryPressureWatch": 254,
    "RestartMaxDelaySec": 254,
    "RestartMode": 254,
    "RestartSteps": 254,
}
# Values that came later than their directive.
VALUES_SINCE = {"Type=notify-reload": 253, "ProtectSystem=strict": 232, "OOMPolicy=continue": 243}
DIRECTIVE = re.compile(r"^([A-Z][A-Za-z]+)=(.*)$", re.MULTILINE)


def directives(path: Path) -> list[tuple[str, str]]:
    return DIRECTIVE.findall(path.read_text())


@pytest.mark.parametrize("path", [*UNITS, *DEVICES], ids=lambda path: path.name)
def test_no_directive_is_newer_than_the_oldest_systemd(path: Path) -> None:
    for name, value in directives(path):
        assert SINCE[name] <= OLDEST, f"{name}= is of systemd {SINCE[name]}"
        assert VALUES_SINCE.get(f"{name}={value}", 0) <= OLDEST, f"{name}={value}"
        # %d, the directory of credentials, is of 250.
        assert "%d" not in value


def test_an_instance_differs_from_the_service_in_its_names_alone() -> None:
    def rules(path: Path) -> list[str]:
        text = path.read_text()
        return [line for line in text.splitlines() if line and not line.startswith("#")]

    instance = [
        line.replace(", instance %i", "") for line in rules(SYSTEMD / "edge-server@.service")
    ]
    plain = rules(SYSTEMD / "edge-server.service")
    assert [re.sub(r"edge_server(-%i|/%i)", r"edge_server", line) for line in instance] == [
        line.replace("edge_server/config.toml", "edge_server.toml") for line in plain
    ]
    # What two daemons must not share.
    for name in ("RuntimeDirectory", "StateDirectory", "CacheDirectory"):
        assert f"{name}=edge_server-%i" in instance


def test_plans_are_built_in_the_sandbox_of_the_daemon() -> None:
    def sandbox(name: str) -> set[tuple[str, str]]:
        found = directives(SYSTEMD / name)
        return set(found[[key for key, _ in found].index("NoNewPrivileges") :])

    models = {
        ("SystemCallFilter", value)
        for key, value in sandbox("edge-server.service")
        if "landlock" in value
    }
    assert len(models) == 1
    assert sandbox("edge-server.service") - models == sandbox("edge-server-plans.service")


def test_every_unit_that_can_be_is_enabled_by_the_preset() -> None:
    enabled = re.findall(
        r"^enable (\S+)$", (SYSTEMD / "edge-server.preset").read_text(), re.MULTILINE
    )
    can_be = [path for path in UNITS if "WantedBy" in dict(directives(path))]
    assert sorted(enabled) == [path.name for path in can_be if "@" not in path.name]


def test_units_run_verbs_that_exist_with_the_shipped_settings() -> None:
    others = {"edge-server-argus.service", "edge-server-drivers.service"}
    services = [path for path in UNITS if path.suffix == ".service" and path.name not in others]
    commands = {path.name: dict(directives(path))["ExecStart"] for path in services}
    for command in commands.values():
        assert command.startswith("/usr/bin/edge-server ")
        assert "--config /etc/edge_server/" in command
    assert read_settings(SYSTEMD / "edge-server.toml", {}).power.mode is None
