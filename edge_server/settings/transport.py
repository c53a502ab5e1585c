"""The tables `[grpc]` and `[http]`, with what is below them: addresses, limits, trust."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec

from edge_server.settings.sections import (
    RESTART,
    Count,
    Port,
    Positive,
    Section,
    applied_by,
    is_loopback,
)

MIB = 1024 * 1024
# sockaddr_un has 108 bytes, one of them for the terminating zero.
_LONGEST_SOCKET_PATH_BYTES = 107

# gRPC counts milliseconds in 32 bits; Triton's INT_MAX for "never" is one of them.
Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]

Protocol = Literal[
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
    "lanes",
]

# `re` holds the interpreter's lock while it searches, and so every camera's thread.
_MOST_REPEATS: Final = 3
_CASE_COUNTS: Final = "(?-i)"
# What a regular expression is made of; the rest, a set in brackets included, is one character.
_TOKEN: Final = re.compile(
    r"""(?P<verbose>\(\?[a-zA-Z]*x[a-zA-Z-]*[:)])
    |(?P<comment>\(\?\#[^)]*\)|\(\?[a-zA-Z]+\))
    |(?P<reference>\\[1-9]|\(\?P=\w+\))
    |(?P<open>\((?:\?(?:P<\w+>|<?[=!]|\(\w+\)|>|[a-zA-Z-]*:))?)
    |(?P<sign>[)|])
    |(?P<repeat>(?:[*+?]|\{(?=[\d,])(?:\d*,)?(?P<times>\d*)\})[?+]?)
    |\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.""",
    re.VERBOSE | re.DOTALL,
)
_INNERMOST: Final = re.compile(r"\(([^()]*)\)")


class Tls(Section, frozen=True):
    """`[grpc.tls]` and `[http.tls]`: encryption of TCP; files in PEM form, reloaded when renewed.

    Attributes:
        enabled: the server presents `certificate` and encrypts every connection.
        mutual: a client must also present a certificate signed by `client_ca`; implies `enabled`.
        key: the private key of `certificate`; readable by its owner, and by its group at most.
    """

    enabled: Annotated[bool, applied_by(RESTART)] = False
    mutual: Annotated[bool, applied_by(RESTART)] = False
    certificate: str = ""
    key: str = ""
    client_ca: str = ""

    @property
    def on(self) -> bool:
        return self.enabled or self.mutual

    def __post_init__(self) -> None:
        if self.on and not (self.certificate and self.key):
            raise ValueError(
                "TLS needs certificate and key (of gRPC: --grpc-server-cert, --grpc-server-key)"
            )
        if self.mutual and not self.client_ca:
            raise ValueError("mutual TLS needs client_ca (of gRPC: --grpc-root-cert)")


class Restriction(Section, frozen=True):
    """`[[grpc.restricted]]`, `[[http.restricted]]`: `protocols` serve only calls whose `header` has
    the value `value`."""

    protocols: Annotated[tuple[Protocol, ...], msgspec.Meta(min_length=1)]
    header: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_.-]+\Z")]
    value: Annotated[str, msgspec.Meta(min_length=1)]


class Grpc(Section, frozen=True):
    """`[grpc]`: the addresses, clients and limits of the Triton protocol.

    Attributes:
        port: of TCP; 0 takes a free one.
        insecure: allows another address than the loopback without TLS.
        socket: path of a Unix socket that serves beside TCP, with limits of its own.
        control: where calls that change the server (load, unload, shared memory, trace and log
            settings, the vehicle's state, recordings) are served. Beyond the loopback "everywhere"
            serves them only where clients need tokens or certificates (mutual TLS).
        max_message_bytes: of a request; a 4K BGR frame has 25 MB, and the protocol's own 2 GiB
            would let one client fill the board's memory. Responses have no limit.
        max_pending_bytes: of all requests and responses in flight and what is parsed from them, on
            TCP, on the socket as many again, and as many of tensors that were copied from shared
            memory.
        max_decompressed_bytes: of a request that its client compressed with gzip or deflate; 0
            refuses compressed requests. A few kilobytes of them can become many megabytes.
        message_timeout_ms: a call ends whose request has not arrived by then, or whose response the
            client has not read, on a stream after 10 s at least; 25 MB take 2 s at 100 Mbit/s.
        max_connections: on TCP, and as many again on the socket.
        max_streams: concurrent calls on one connection; a client's process shares one.
        max_infer_streams: open streams of inferences, on TCP, and as many again on the socket.
        max_lane_streams: streams of lanes, of events, of reflection and of health that are open at
            once, on TCP and as many again on the socket; each has a thread, beside those of
            inferences.
        forward_headers: a regular expression; headers of a call whose name has a match of it become
            parameters of the request, for Python models to read. Upper and lower case are equal,
            unless it begins with `(?-i)`. Empty forwards none. Headers
            with secrets of this daemon are never forwarded: `authorization`, `cookie` and those of
            `restricted`.
        reflection: generic clients can list the services and their messages.
        max_metadata_bytes: headers of one call.
        idle_timeout_ms: a connection without a call is closed after this time.
        max_connection_age_ms: a TCP connection is closed at this age and the client reconnects, so
            that a client that holds half-sent requests of streams loses them; its calls get
            `max_connection_age_grace_ms` to finish.
        keepalive_time_ms: a silent connection is pinged after that time, and closed after
            `keepalive_timeout_ms`.
        max_ping_strikes: more early pings than that close the connection; 0 closes none. gRPC adds
            an error to the pending close for each ping that it has already received, so a flood
            costs the square of its length; without a limit each ping costs its answer.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 8001
    insecure: bool = False
    socket: str | None = None
    control: Literal["everywhere", "unix", "off"] = "everywhere"
    tls: Annotated[Tls, applied_by("grpc")] = Tls()
    restricted: tuple[Restriction, ...] = ()
    max_message_bytes: Annotated[int, msgspec.Meta(ge=64 * 1024, le=2**31 - 1)] = 64 * MIB
    max_pending_bytes: Annotated[int, msgspec.Meta(ge=MIB, le=2**40), applied_by("grpc")] = (
        192 * MIB
    )
    max_decompressed_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    message_timeout_ms: Annotated[Milliseconds, applied_by("grpc")] = 3000
    max_connections: Positive = 64
    max_streams: Positive = 100
    max_infer_streams: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    max_lane_streams: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 48
    forward_headers: str = ""
    reflection: bool = True
    max_metadata_bytes: Annotated[int, msgspec.Meta(ge=1024, le=MIB)] = 8192
    handshake_timeout_ms: Milliseconds = 2000
    idle_timeout_ms: Milliseconds = 300_000
    max_connection_age_ms: Milliseconds = 600_000
    max_connection_age_grace_ms: Milliseconds = 30_000
    keepalive_time_ms: Milliseconds = 20_000
    keepalive_timeout_ms: Milliseconds = 10_000
    keepalive_without_calls: bool = False
    max_pings_without_data: Count = 2
    min_ping_interval_without_data_ms: Count = 10_000
    max_ping_strikes: Count = 0

    def __post_init__(self) -> None:
        if not self.insecure and not self.tls.on and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} is beyond the loopback, where anybody could send requests and listen "
                "in plain text; encrypt it with [grpc.tls] (--grpc-use-ssl=true), or set "
                "insecure = true (--grpc-insecure) if that is meant"
            )
        check_header_pattern(self.forward_headers)
        if self.socket is not None and not (
            0 < len(self.socket.encode()) <= _LONGEST_SOCKET_PATH_BYTES
        ):
            raise ValueError(f"socket: the path must have 1 to {_LONGEST_SOCKET_PATH_BYTES} bytes")
        if self.control == "unix" and self.socket is None:
            raise ValueError('control = "unix" needs a socket (--grpc-socket)')
        _check_restricted(self.restricted)


class Access(Section, frozen=True):
    """`[access]`: who may call over TCP; the Unix socket is open to those who may open its file.

    Attributes:
        tokens_file: a line for each bearer token: its scopes (`read`, `infer`, `control`; separated
            by commas), and the token. Only its owner may read it, and its group at most. Changes
            apply at once. Without the file nobody needs a token.
    """

    tokens_file: str | None = None


class Http(Section, frozen=True):
    """`[http]`: the address and limits of HTTP: Triton's protocol, metrics, and pages.

    Attributes:
        port: of TCP; 0 takes a free one.
        insecure: allows another address than the loopback without TLS.
        max_body_bytes: of a request; a longer one is refused before it is read.
        max_pending_bytes: of the bodies of all requests in flight, what is parsed from them, and
            answers.
        message_timeout_ms: a connection ends whose request's header, or then its body, has not
            arrived by then, or whose client has not read what was sent.
        idle_timeout_ms: a connection without a request is closed after this time.
        max_connections: one more ends the connection that has kept the server waiting longest; more
            than `max_inferences` of `[serving]`, so that health is answered beside these;
            connections whose TLS handshake is not done are counted too.
        max_header_bytes: of one request, its first line included.
        forward_headers: as `[grpc]` has it.
        host_names: by which clients may call this device over HTTP, the metrics' port included,
            beside the name of this machine, `localhost` and addresses; any other name may lead a
            browser here against its user's will.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 8000
    insecure: bool = False
    tls: Tls = Tls()
    restricted: tuple[Restriction, ...] = ()
    forward_headers: str = ""
    host_names: tuple[str, ...] = ()
    max_body_bytes: Annotated[int, msgspec.Meta(ge=64 * 1024, le=2**31 - 1)] = 64 * MIB
    max_pending_bytes: Annotated[int, msgspec.Meta(ge=MIB, le=2**40)] = 192 * MIB
    message_timeout_ms: Milliseconds = 3000
    idle_timeout_ms: Milliseconds = 60_000
    max_connections: Positive = 96
    max_header_bytes: Annotated[int, msgspec.Meta(ge=1024, le=MIB)] = 16384

    def __post_init__(self) -> None:
        if self.enabled and not (self.insecure or self.tls.on or is_loopback(self.host)):
            raise ValueError(
                f"{self.host} is beyond the loopback, where anybody could send requests and listen "
                "in plain text; encrypt it with [http.tls], or set insecure = true "
                "(--http-insecure) if that is meant"
            )
        check_header_pattern(self.forward_headers)
        _check_restricted(self.restricted, "api")


def _check_restricted(restricted: tuple[Restriction, ...], what: str = "protocol") -> None:
    protocols = [name for each in restricted for name in each.protocols]
    for name in protocols:
        if protocols.count(name) > 1:
            raise ValueError(
                f"restricted {what} '{name}' can not be specified in multiple config groups"
            )


def header_pattern(pattern: str) -> re.Pattern[str]:
    """Return `forward_headers` compiled: case does not count, unless it begins with `(?-i)`.

    Raises:
        re.error: it is no regular expression.
    """
    cased = pattern.removeprefix(_CASE_COUNTS)
    return re.compile(cased, re.IGNORECASE if cased == pattern else 0)


def check_header_pattern(pattern: str) -> None:
    """Raises: ValueError: `pattern` is no regular expression, or some name of a header takes longer
    than any camera can wait."""
    try:
        repeats = _repeats_of(header_pattern(pattern).pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"forward_headers: no regular expression: {error}") from None
    if repeats > _MOST_REPEATS:
        raise ValueError(
            f"forward_headers: more than {_MOST_REPEATS} repeats one behind the other take too "
            "long for some names; name the headers, as in ^x-(user|trip)-"
        )


def _repeats_of(pattern: str) -> int:
    """Return how many repeats without end follow one another in a valid pattern.

    Raises:
        ValueError: one repeats what has another, or alternatives.
    """
    signs = _TOKEN.sub(_sign_of, pattern)
    while "&*" not in signs:
        if (group := _INNERMOST.search(signs)) is None:
            return _most_repeats(signs).count("*")
        varies = re.search(r"[*?|&]", group[1])
        inner = _most_repeats(group[1]) + "&" if varies else "x"
        signs = signs[: group.start()] + inner + signs[group.end() :]
    raise ValueError(
        "forward_headers: a repeat of something with repeats or alternatives takes too "
        "long for some names; write it without the outer repeat"
    )


def _sign_of(token: re.Match[str]) -> str:
    """Return `(`, `)` or `|`; `*` of a repeat without end, `?` of another; `x` of a character, `&`
    of what can match different texts."""
    kind = token.lastgroup
    if kind == "verbose":
        raise ValueError("forward_headers: no regular expression: (?x) is not supported here")
    if kind == "repeat":
        return "?" if token[0][0] == "?" or token["times"] in ("0", "1") else "*"
    return {"open": "(", "sign": token[0], "reference": "&", "comment": ""}.get(kind or "", "x")


def _most_repeats(signs: str) -> str:
    return max(signs.split("|"), key=lambda alternative: alternative.count("*"))
