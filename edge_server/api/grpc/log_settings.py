"""LogSettings: maps the protocol's names to the process's log switches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2 as pb

from edge_server.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from edge_server.process.logs import LogSwitches

_BOOLEANS = {"log_info": "info", "log_warning": "warning", "log_error": "error"}
_FORMATS = ("default", "ISO8601")
_NAMES = ("log_file", *_BOOLEANS, "log_verbose_level", "log_format")


def update_log_settings(switches: LogSwitches, request: Any) -> Any:
    """Apply a `LogSettingsRequest`, all of it or nothing; return the settings then in force.

    Raises:
        InvalidRequest: an unknown setting, or an invalid value (Triton's texts).
        Unsupported: a request cannot change the log's destination.
    """
    changes: dict[str, Any] = {}
    for name, value in request.settings.items():
        kind = value.WhichOneof("parameter_choice")
        if name not in _NAMES:
            raise InvalidRequest(f"unknown log setting '{name}'; known: {', '.join(_NAMES)}")
        if name == "log_file":
            raise Unsupported("log file location can not be updated through network protocol")
        if name == "log_verbose_level":
            if kind != "uint32_param":
                raise InvalidRequest("expect int32 for 'log_verbose_level'")
            changes["verbose_level"] = value.uint32_param
        elif name == "log_format":
            if value.string_param not in _FORMATS:
                raise InvalidRequest(f"invalid argument for log_format, got: {value.string_param}")
            changes["iso8601"] = value.string_param == "ISO8601"
        else:
            if kind != "bool_param":
                raise InvalidRequest(f"expect boolean for '{name}'")
            changes[_BOOLEANS[name]] = value.bool_param
    settings = switches.change(**changes) if changes else switches.settings
    response = pb.LogSettingsResponse()
    response.settings["log_file"].string_param = switches.file
    for name, attribute in _BOOLEANS.items():
        response.settings[name].bool_param = getattr(settings, attribute)
    response.settings["log_verbose_level"].uint32_param = settings.verbose_level
    response.settings["log_format"].string_param = _FORMATS[settings.iso8601]
    return response
