"""Parses the values of flags. Every parser raises ValueError, whose text gives the right form."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

# The effect of a flag: the path (`table.key`) and the value of a setting, or why it has none.
Effect = tuple[str, Any] | str

_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


def text(given: str) -> str:
    if not given:
        raise ValueError("must not be empty")
    return given


def boolean(given: str) -> bool:
    """Triton's spellings: true, on, 1 and false, off, 0, in any case."""
    try:
        return _BOOLEANS[given.lower()]
    except KeyError:
        raise ValueError("give it as true or false") from None


def opposite(given: str) -> bool:
    return not boolean(given)


def whole(given: str) -> int:
    try:
        return int(given)
    except ValueError:
        raise ValueError("give it as a whole number") from None


def number(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise ValueError("give it as a number") from None


def verbosity(given: str) -> int:
    """Triton takes a level, and true and false for 1 and 0."""
    try:
        return int(_BOOLEANS.get(given.lower(), given))
    except ValueError:
        raise ValueError("give it as a whole number, or as true or false") from None


def one_of(*words: str) -> Callable[[str], str]:
    """Return a parser for one of `words` in any case, which returns the spelling given here."""
    spelt = {word.lower(): word for word in words}

    def read(given: str) -> str:
        try:
            return spelt[given.lower()]
        except KeyError:
            raise ValueError(f"give it as one of {', '.join(words)}") from None

    return read


def named_setting(given: str) -> tuple[str, str, str]:
    """`name,key=value`, or `key=value` with no name, as Triton's `…-config` flags take it."""
    name, comma, setting = given.partition(",")
    if not comma or "=" in name:
        name, setting = "", given
    key, _, value = setting.partition("=")
    if given.startswith(",") or not key or not value:
        raise ValueError("give it as <name>,<setting>=<value>")
    return name, key, value


def rate_limit_resource(given: str) -> dict[str, Any]:
    """`name:count` or `name:count:device`."""
    name, *numbers = given.split(":")
    if not name or len(numbers) not in (1, 2):
        raise ValueError("give it as <resource>:<count> or <resource>:<count>:<device>")
    return {"name": name, **dict(zip(("count", "device"), map(whole, numbers), strict=False))}


def restriction(given: str) -> dict[str, Any]:
    """`protocol,protocol:key=value`; the header is Triton's for that key."""
    protocols, _, header = given.partition(":")
    key, _, value = header.partition("=")
    if not protocols or not key or not value:
        raise ValueError("give it as <protocol>[,<protocol>]:<key>=<value>")
    return {
        "protocols": protocols.split(","),
        "header": f"triton-grpc-protocol-{key.lower()}",
        "value": value,
    }


def http_restriction(given: str) -> dict[str, Any]:
    """`api,api:key=value`; the header is the key."""
    found = restriction(given)
    return {**found, "header": found["header"].removeprefix("triton-grpc-protocol-")}


def host(given: str) -> str:
    """A host without a port, an IPv6 address without its brackets."""
    found = address(given)
    if "port" in found:
        raise ValueError("the port has a flag of its own")
    name: str = found["host"]
    return name


def address(given: str) -> dict[str, Any]:
    """`host` and, where there is one, `port`; a bare IPv6 address is all host."""
    with contextlib.suppress(ValueError):
        return {"host": str(ipaddress.ip_address(given))}
    try:
        parts = urlsplit(f"//{given}")
        name, port = parts.hostname or "", parts.port
    except ValueError:
        name, port = "", None
    # urlsplit is lenient, by version: accept only a text that equals the parts put together.
    spelt = (f"[{name}]" if ":" in name else name) + ("" if port is None else f":{port}")
    if not name or spelt != given.lower():
        raise ValueError("give it as HOST, HOST:PORT or [IPV6]:PORT")
    return {"host": name} if port is None else {"host": name, "port": port}


# The flags of tritonserver whose effect depends on their value.

_TRACE_LEVELS = {
    "off": "OFF",
    "false": "OFF",
    "true": "TIMESTAMPS",
    "on": "TIMESTAMPS",
    "min": "TIMESTAMPS",
    "max": "TIMESTAMPS",
    "timestamps": "TIMESTAMPS",
}


def cache_config(given: str) -> Effect:
    cache, setting, value = named_setting(given)
    if cache != "local":
        raise ValueError("the only cache is 'local': give --cache-config=local,size=<bytes>")
    if setting != "size":
        raise ValueError("the cache 'local' has no setting but size")
    return "serving.cache_bytes", whole(value)


def trace_level(given: str) -> Effect:
    if given.lower() == "tensors":
        raise ValueError("no tensors are written to traces; give TIMESTAMPS alone")
    try:
        return "trace.level", _TRACE_LEVELS[given.lower()]
    except KeyError:
        raise ValueError("give it as OFF or TIMESTAMPS") from None


def trace_config(given: str) -> Effect:
    mode, setting, value = named_setting(given)
    if mode.lower() not in ("", "triton", "opentelemetry"):
        raise ValueError(
            "give it as <setting>=<value>, triton,<setting>=<value> or "
            "opentelemetry,<setting>=<value>"
        )
    match setting:
        case _ if mode.lower() == "opentelemetry":
            return _opentelemetry(setting, value)
        case "level":
            return trace_level(value)
        case "rate" | "count":
            return f"trace.{setting}", whole(value)
        case "file":
            return "trace.file", value
        case "log-frequency":
            return "trace.log_frequency", whole(value)
        case "mode":
            is_triton = one_of("triton", "opentelemetry")(value) == "triton"
            return (
                "a file is written where one is named" if is_triton else ("tracing.enabled", True)
            )
        case _:
            raise ValueError("its settings are level, rate, count, mode, file and log-frequency")


def metrics_config(given: str) -> Effect:
    setting, _, value = given.partition("=")
    if not setting or not value:
        raise ValueError("give it as <setting>=<value>")
    if setting in ("counter_latencies", "histogram_latencies", "summary_latencies"):
        return f"metrics.{setting}", boolean(value)
    if setting == "summary_quantiles":
        return "metrics.summary_quantiles", tuple(map(_quantile, value.split(",")))
    raise ValueError(
        "its settings are counter_latencies, histogram_latencies, summary_latencies and "
        "summary_quantiles"
    )


def _quantile(given: str) -> float:
    """`quantile:error`; the error of the rank is 0 here."""
    quantile, colon, error = given.partition(":")
    try:
        if colon and 0 <= float(quantile) <= 1 and 0 <= float(error) <= 1:
            return float(quantile)
    except ValueError:
        pass
    raise ValueError("give the quantiles as <quantile>:<error>,…, each from 0 to 1")


def _opentelemetry(setting: str, value: str) -> Effect:
    if setting == "url":
        return "tracing.endpoint", value if "://" in value else f"http://{value}"
    if setting == "resource":
        key, _, text_of_key = value.partition("=")
        if not key or not text_of_key:
            raise ValueError("give it as opentelemetry,resource=<key>=<value>")
        return "tracing.resource", value
    if setting.startswith("bsp_"):
        whole(value)
        return "what waits for the collector is bounded here, and sent every second"
    raise ValueError("its settings are url and resource")


def backend_config(given: str) -> Effect:
    _, setting, value = named_setting(given)
    if setting == "default-max-batch-size":
        return "repository.default_max_batch_size", whole(value)
    return "of backends only default-max-batch-size is set here; the rest per model"
