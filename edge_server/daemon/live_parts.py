"""What changes while the daemon runs, by the names in `live_settings.TABLE`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.api.certificates import check_certificates
from edge_server.daemon.reload import LivePart
from edge_server.errors import SettingsError
from edge_server.inference.tracing.traced_request import TraceRule
from edge_server.mqtt.broker import faults_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.api.grpc.server import GrpcServer
    from edge_server.daemon.camera_set import CameraSet
    from edge_server.inference.tracing.tracer import Tracer
    from edge_server.mqtt.publisher import Publisher
    from edge_server.process.logs import LogSwitches
    from edge_server.settings import Settings, TraceSection


def live_parts(
    cameras: CameraSet,
    publisher: Publisher,
    grpc: GrpcServer,
    tracer: Tracer,
    log_switches: LogSwitches,
    *,
    allow_to_finish: Callable[[float], None],
) -> Mapping[str, LivePart]:
    """Return the parts that a reload of the settings changes.

    Args:
        allow_to_finish: takes the seconds that requests in flight get at the next stop.
    """

    def change_grpc(_: Settings, wanted: Settings) -> str:
        grpc.change(wanted.grpc)
        return ""

    def change_trace(before: Settings, wanted: Settings) -> str:
        if trace_rule(before.trace) != trace_rule(wanted.trace):
            tracer.begin_anew(trace_rule(wanted.trace))
        return ""

    def change_log(before: Settings, wanted: Settings) -> str:
        # What clients have set stays until the file says something else.
        if before.log != wanted.log:
            log_switches.apply(wanted.log)
        return ""

    def change_stop(_: Settings, wanted: Settings) -> str:
        allow_to_finish(wanted.serving.exit_timeout_s)
        return ""

    return {
        "cameras": LivePart(lambda _, wanted: cameras.change(wanted.cameras)),
        "broker": LivePart(lambda _, wanted: publisher.change(wanted.mqtt), check_broker),
        "grpc": LivePart(change_grpc, _check_certificates),
        "trace": LivePart(change_trace),
        "log": LivePart(change_log),
        "stop": LivePart(change_stop),
    }


def trace_rule(trace: TraceSection) -> TraceRule:
    return TraceRule("TIMESTAMPS" in trace.level, trace.rate, trace.count, trace.log_frequency)


def check_broker(settings: Settings) -> None:
    """Raises: SettingsError: the broker's settings contradict each other, or lack a file."""
    if settings.mqtt is not None and (faults := faults_of(settings.mqtt)):
        raise SettingsError("\n".join(faults))


def _check_certificates(settings: Settings) -> None:
    if settings.grpc.enabled and settings.grpc.tls.on:
        check_certificates(settings.grpc.tls)
