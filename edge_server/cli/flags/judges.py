"""Verdicts on the flags of tritonserver whose meaning depends on their value."""

from __future__ import annotations

from edge_server.cli.flags.flag import NoEffect, RefusedFlag, Sets, Verdict
from edge_server.cli.flags.texts import named_setting, one_of, whole

_TRACE_LEVELS = {
    "off": "OFF",
    "false": "OFF",
    "true": "TIMESTAMPS",
    "on": "TIMESTAMPS",
    "min": "TIMESTAMPS",
    "max": "TIMESTAMPS",
    "timestamps": "TIMESTAMPS",
}


def cache_config(given: str) -> Verdict:
    cache, setting, value = named_setting(given)
    if cache != "local":
        return RefusedFlag("the only cache is 'local': give --cache-config=local,size=<bytes>")
    if setting != "size":
        return RefusedFlag("the cache 'local' has no setting but size")
    return Sets("serving.cache_bytes", whole(value))


def trace_level(given: str) -> Verdict:
    if given.lower() == "tensors":
        return RefusedFlag("no tensors are written to traces; give TIMESTAMPS alone")
    try:
        return Sets("trace.level", _TRACE_LEVELS[given.lower()], gathers=True)
    except KeyError:
        raise ValueError("give it as OFF or TIMESTAMPS") from None


def trace_config(given: str) -> Verdict:
    mode, setting, value = named_setting(given)
    if "opentelemetry" in (mode.lower(), value.lower()):
        return RefusedFlag("traces are not sent to OpenTelemetry; the only mode is triton")
    if mode.lower() not in ("", "triton"):
        raise ValueError("give it as <setting>=<value> or triton,<setting>=<value>")
    match setting:
        case "level":
            return trace_level(value)
        case "rate" | "count":
            return Sets(f"trace.{setting}", whole(value))
        case "file":
            return Sets("trace.file", value)
        case "log-frequency":
            return Sets("trace.log_frequency", whole(value))
        case "mode":
            one_of("triton")(value)
            return NoEffect("triton is the only mode")
        case _:
            raise ValueError("its settings are level, rate, count, mode, file and log-frequency")


def backend_config(given: str) -> Verdict:
    _, setting, value = named_setting(given)
    if setting == "default-max-batch-size":
        return Sets("repository.default_max_batch_size", whole(value))
    return NoEffect("of backends only default-max-batch-size is set here; the rest per model")


def compression_level(given: str) -> Verdict:
    if one_of("none", "low", "medium", "high")(given) == "none":
        return NoEffect("answers are not compressed in any case")
    return NoEffect("answers are not compressed: tensors gain little and cost much")
