"""Checks of the daemon's environment: its settings, port, broker and unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.board.doctor.evidence import fault, ok, warning

if TYPE_CHECKING:
    from edge_server.board.doctor.evidence import Evidence, Finding

_LATER = "unknown until the settings can be read"
# The daemon's exit code for a configuration error.
_CONFIGURATION = "78"


def settings(evidence: Evidence) -> Finding:
    """The daemon can read its settings."""
    configuration = evidence.configuration
    if configuration.settings is None:
        return fault(configuration.error, f"mend it; then edge-server check{_config(evidence)}")
    notes = configuration.settings.without_effect()
    if notes:
        return warning("; ".join(notes), f"edge-server check{_config(evidence)}")
    if configuration.path is None:
        return ok("no file: the defaults count")
    return ok(f"{configuration.path} can be read")


def grpc_port(evidence: Evidence) -> Finding:
    """The port is free, or held by the daemon itself."""
    if evidence.configuration.settings is None:
        return warning(_LATER, "mend those first")
    wanted = evidence.configuration.settings.grpc
    if not wanted.enabled or wanted.port == 0:
        return ok("any that is free" if wanted.enabled else "gRPC is off")
    result = evidence.result("grpc_port")
    facts = result.facts
    where = f"{wanted.host}:{wanted.port}"
    if facts.get("free"):
        return ok(f"{where} is free")
    stop = "stop what holds it (sudo ss -ltnp), or choose another with --grpc-port"
    if result.failure or "free" not in facts:
        return fault(f"{where}: {result.problem}", stop)
    if "name" in facts:
        them = f"{facts['name']} {facts['version']}"
        ours = f"{evidence.configuration.settings.serving.name} {evidence.version}"
        if them == ours:
            return ok(f"{where} responds as {them}: the daemon runs")
        return fault(f"{where} is taken by {them}, and this is {ours}", stop)
    if evidence.result("unit").facts.get("ActiveState") == "active":
        return ok(f"{where} is taken, likely by the daemon, which runs")
    if wanted.tls.on or wanted.restricted:
        return warning(
            f"{where} is taken, by a daemon or something else: it identifies itself to nobody", stop
        )
    return fault(f"{where} is taken by something that does not speak Triton's protocol", stop)


def broker(evidence: Evidence) -> Finding:
    """The configured MQTT broker accepts connections."""
    if evidence.configuration.settings is None:
        return warning(_LATER, "mend those first")
    wanted = evidence.configuration.settings.mqtt
    if wanted is None:
        return ok("none is configured: nothing is published")
    result = evidence.result("broker")
    where = f"{wanted.host}:{wanted.port}"
    if result.problem:
        return warning(
            f"{where}: {result.problem}; the daemon goes on, and tries again",
            f"start it, or give its address: [mqtt] in the settings{_config(evidence)}",
        )
    return ok(f"{where} takes connections")


def unit(evidence: Evidence) -> Finding:
    """systemd restarts the daemon after a crash and a reboot."""
    board = evidence.board
    if not board.systemd:
        return ok("systemd does not run here")
    if board.unit is None:
        return warning(
            "not installed: after a restart of the machine no daemon runs",
            "put edge-server.service into /etc/systemd/system; "
            "sudo systemctl enable --now edge-server",
        )
    result = evidence.result("unit")
    state = result.facts.get("ActiveState")
    if state is None:
        problem = result.problem or "systemd does not report its state"
        return warning(f"{board.unit.path}: {problem}", "systemctl status edge-server")
    restarts = result.facts.get("NRestarts", "0")
    found = f"{state} ({result.facts.get('SubState', '?')})"
    if restarts not in ("0", ""):
        found += f", restarted {restarts} times"
    if state == "failed":
        wrong = result.facts.get("ExecMainStatus") == _CONFIGURATION
        return fault(
            f"{found}: {result.facts.get('Result', '?')}",
            f"edge-server check{_config(evidence)}" if wrong else "journalctl -u edge-server -n 50",
        )
    if result.facts.get("SubState") == "auto-restart":
        return fault(f"{found}: it ends and is tried again", "journalctl -u edge-server -n 50")
    if state not in ("active", "activating", "reloading"):
        return warning(found, "sudo systemctl enable --now edge-server")
    if result.facts.get("UnitFileState") == "disabled":
        return warning(
            f"{found}, but not after a restart of the machine", "sudo systemctl enable edge-server"
        )
    return ok(found)


def _config(evidence: Evidence) -> str:
    path = evidence.configuration.path
    return "" if path is None else f" --config {path}"
