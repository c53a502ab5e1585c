"""Which calls each listener allows: AccessRules for every method, BrowserRule for every path."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import socket
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

from edge_server.errors import PermissionDenied, SettingsError, Unauthenticated
from edge_server.settings.sections import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edge_server.settings import Grpc, Http, Restriction

log = logging.getLogger(__name__)

Scope = Literal["read", "infer", "control"]
SCOPES: frozenset[str] = frozenset(get_args(Scope))
# Those of a credential; the file's group may read it, as that of a TLS key.
_TOO_OPEN = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_LONGEST_FILE_BYTES = 1024 * 1024


class Tokens:
    """The tokens in a file; every call sees its present content.

    A file that becomes unreadable or invalid leaves the tokens as they were, and the log says why.
    One that cannot be read is tried again at every call: what prevents it, like a missing group or
    a lack of file descriptors, may pass without a trace in the file.

    Raises:
        SettingsError: the file cannot be read, is open to everyone, or has an invalid line.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._logged = ""
        self._seen = self._signature()
        self._scopes = _read(self._path)

    def refusal(
        self, scope: Scope | None, metadata: Iterable[tuple[str, str | bytes]]
    ) -> Unauthenticated | PermissionDenied | None:
        """Return why a call with these headers is refused; None where it is allowed.

        Args:
            scope: that it needs; None needs no token.
        """
        if scope is None:
            return None
        given = next((value for key, value in metadata if key == "authorization"), "")
        text = given.decode("latin-1") if isinstance(given, bytes) else given
        kind, _, token = text.partition(" ")
        if kind.lower() != "bearer" or not token:
            return Unauthenticated("this call needs a token: send 'authorization: Bearer <token>'")
        found = self.scopes_of(token.strip())
        if not found:
            return Unauthenticated("the token is not valid")
        if scope not in found:
            return PermissionDenied(f"the token has not the scope '{scope}'")
        return None

    def scopes_of(self, token: str) -> frozenset[str]:
        """Return the scopes of a token, after as long for every token; none where it is wrong."""
        self._look()
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        found: frozenset[str] = frozenset()
        for known, scopes in self._scopes.items():
            if hmac.compare_digest(known, digest):
                found = scopes
        return found

    def may_read(self, token: str) -> bool:
        return "read" in self.scopes_of(token)

    def _look(self) -> None:
        if self._signature() == self._seen:
            return
        with self._lock:
            signature = self._signature()
            if signature == self._seen:
                return
            try:
                self._scopes = _read(self._path)
            except SettingsError as error:
                if str(error) != self._logged:
                    # The text is complete; a traceback adds nothing.
                    log.error("access: tokens stay as they were: %s", error)  # noqa: TRY400
                self._logged = str(error)
                if isinstance(error.__cause__, OSError):
                    return
            else:
                log.info("access: %s tokens of %s", len(self._scopes), self._path)
                self._logged = ""
            # Last: until then no call may take the former tokens for the present ones.
            self._seen = signature

    def _signature(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - half the time, at every call
        except OSError:
            return ()
        # A copy with the time of its original changes `st_ctime_ns` alone.
        times = found.st_mtime_ns, found.st_ctime_ns
        return *times, found.st_size, found.st_ino, found.st_mode


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read(path: Path) -> Mapping[bytes, frozenset[str]]:
    """Return the scopes by the digest of their token."""
    where = f"access.tokens_file: {path}"
    try:
        # A pipe would have every call wait for its writer.
        with open(path, "rb", opener=_open_at_once) as file:
            found_mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(found_mode):
                raise SettingsError(f"{where}: is no file")
            mode = stat.S_IMODE(found_mode)
            content = file.read(_LONGEST_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(
            f"{where}: cannot be read: {error.strerror}; put a file there that this user may read"
        ) from error
    if mode & _TOO_OPEN:
        raise SettingsError(f"{where}: others may read or change it (mode {mode:o}): chmod 600 it")
    if len(content) > _LONGEST_FILE_BYTES:
        raise SettingsError(f"{where}: has more than {_LONGEST_FILE_BYTES} bytes")
    found: dict[bytes, frozenset[str]] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        scopes = frozenset(words[0].split(","))
        if len(words) != 2 or not scopes <= SCOPES or not _TOKEN.fullmatch(words[1]):
            raise SettingsError(
                f"{where}: line {number} is not scopes (of {', '.join(sorted(SCOPES))}; separated "
                "by commas) and a token of 16 to 512 letters, digits and ._~+/=-"
            )
        digest = hashlib.sha256(words[1].encode()).digest()
        if digest in found:
            raise SettingsError(f"{where}: line {number} has a token for a second time")
        found[digest] = scopes
    return found


TRITON = "/inference.GRPCInferenceService/"
_LANES = "/edge.lanes.v1.LaneService/"
REFLECTION = tuple(
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    for version in ("v1", "v1alpha")
)

RECORD = f"{_LANES}Record"
LOG_SETTINGS = f"{TRITON}LogSettings"
# Over HTTP only, and read like the rest.
METRICS = "/metrics"

# Triton's words for groups of methods (`--grpc-restricted-protocol`), and `lanes`.
PROTOCOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "health": (
            f"{TRITON}ServerLive",
            f"{TRITON}ServerReady",
            f"{TRITON}ModelReady",
            "/grpc.health.v1.Health/Check",
            "/grpc.health.v1.Health/Watch",
        ),
        "metadata": (f"{TRITON}ServerMetadata", f"{TRITON}ModelMetadata"),
        "inference": (f"{TRITON}ModelInfer", f"{TRITON}ModelStreamInfer"),
        "shared-memory": tuple(
            f"{TRITON}{kind}SharedMemory{what}"
            for kind in ("System", "Cuda")
            for what in ("Status", "Register", "Unregister")
        ),
        "model-config": (f"{TRITON}ModelConfig",),
        "model-repository": tuple(
            f"{TRITON}Repository{what}" for what in ("Index", "ModelLoad", "ModelUnload")
        ),
        "statistics": (f"{TRITON}ModelStatistics",),
        "trace": (f"{TRITON}TraceSetting",),
        "logging": (LOG_SETTINGS,),
        "lanes": (
            *(
                f"{_LANES}{name}"
                for name in (
                    *("StreamLanes", "GetLatestLanes", "StreamEvents", "ListCameras"),
                    *("SetVehicleState", "Record"),
                )
            ),
            "/edge.perception.v1.PerceptionService/StreamNetworks",
        ),
    }
)

# Methods that change nothing for other clients. Every other method is a control call, so that a
# new method stays closed until it is added here.
OPEN = frozenset(
    {
        *PROTOCOLS["health"],
        *PROTOCOLS["metadata"],
        *PROTOCOLS["inference"],
        *PROTOCOLS["model-config"],
        *PROTOCOLS["statistics"],
        f"{TRITON}SystemSharedMemoryStatus",
        f"{TRITON}CudaSharedMemoryStatus",
        f"{TRITON}RepositoryIndex",
        *REFLECTION,
        *PROTOCOLS["lanes"],
        METRICS,
    }
    - {f"{_LANES}SetVehicleState", RECORD}
)

# Control calls only if the request names a setting; without one the call only reads the settings.
UPDATES = frozenset({f"{TRITON}TraceSetting", LOG_SETTINGS})


@dataclass(frozen=True)
class AccessRules:
    """The calls that one listener allows.

    Attributes:
        control_refusal: the reason why it refuses control calls; empty where it allows them.
        restrictions: method → header and value that a call must carry.
        tokens: None where nobody needs one.
        what: is restricted, in Triton's text.
    """

    control_refusal: str
    restrictions: Mapping[str, Restriction]
    tokens: Tokens | None = None
    what: str = "protocol"

    @classmethod
    def of(cls, settings: Grpc, *, unix: bool, tokens: Tokens | None = None) -> AccessRules:
        """Return the rules of gRPC's TCP side, or of the Unix socket, whose files' permissions say
        who may call: it needs no tokens."""
        control = _control_refusal(settings, None if unix else settings, tokens, "grpc")
        return cls(control, _restrictions(settings.restricted), None if unix else tokens)

    @classmethod
    def of_http(cls, settings: Http, grpc: Grpc, tokens: Tokens | None = None) -> AccessRules:
        """Return the rules of HTTP, which serves control calls where gRPC's TCP side does."""
        control = _control_refusal(grpc, settings, tokens, "http")
        return cls(control, _restrictions(settings.restricted), tokens, "API")

    @property
    def refuse_any(self) -> bool:
        """Whether the rules refuse any call at all."""
        return bool(self.control_refusal or self.restrictions or self.tokens)

    def refusal(
        self, method: str, metadata: Iterable[tuple[str, str | bytes]], *, updates: bool = False
    ) -> str:
        """Return why a call of `method` with these headers is refused; empty if it is allowed.

        Args:
            updates: the call is one of `UPDATES`, and changes settings.
        """
        restriction = self.restrictions.get(method)
        if restriction is not None:
            given = next((value for key, value in metadata if key == restriction.header), b"")
            given = given.encode() if isinstance(given, str) else given
            if not hmac.compare_digest(given, restriction.value.encode()):
                return f"This {self.what} is restricted, expecting header '{restriction.header}'"
        is_control = updates or not (method in OPEN or method in UPDATES)
        name = method.rpartition("/")[2]
        return f"{name} {self.control_refusal}" if is_control and self.control_refusal else ""

    def token_refusal(
        self, method: str, metadata: Iterable[tuple[str, str | bytes]], *, updates: bool = False
    ) -> Unauthenticated | PermissionDenied | None:
        """Return why a call of `method` needs another token; None where it is allowed."""
        if self.tokens is None:
            return None
        return self.tokens.refusal("control" if updates else _scope_of(method), metadata)


class BrowserRule:
    """Which requests of browsers a listener serves: those of its own pages, by a name it has.

    A page of another site may send requests here that it cannot read, and they would take effect.
    Or it has its own name point here (DNS rebinding): then it could read everything, and its
    requests come with that name as their host. Clients that are no browsers send neither `Origin`
    nor `Sec-Fetch-Site`.

    Args:
        host_names: by which this device may be called, beside its own, `localhost` and addresses.
    """

    def __init__(self, host_names: Iterable[str] = ()) -> None:
        self._names = frozenset(("localhost", *(name.lower() for name in host_names)))

    def refusal(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return why a request with these headers, their names in lower case, is refused; empty if
        it is allowed."""
        hosts, origins, sent = [], [], {}
        for name, value in headers:
            if name == b"host":
                hosts.append(value.decode("latin-1").lower())
            elif name == b"origin":
                origins.append(value.decode("latin-1").lower())
            elif name.startswith(b"sec-fetch-"):
                sent[name] = value
        # No browser leaves out the host, or sends two.
        for host in hosts:
            if not self._is_own(_without_port(host)):
                return (
                    f"this device is not called {_without_port(host)[:256]!r} here; use its "
                    "address, or name it in http.host_names"
                )
        if any(origin.partition("://")[2] != host for origin in origins for host in hosts or [""]):
            return "another site's page may neither read nor change anything here"
        if sent.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none") and not (
            # A link to the page, which opens in a window that the other site cannot read.
            method == "GET"
            and sent.get(b"sec-fetch-mode") == b"navigate"
            and sent.get(b"sec-fetch-dest") == b"document"
        ):
            return "another site's page may neither read nor change anything here"
        return ""

    def _is_own(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            own = socket.gethostname().lower()  # may be set after the daemon has started
            return name in (own, f"{own}.local")
        # No name server has led a browser to an address.
        return True


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and not name.endswith(":") else host


def _control_refusal(
    grpc: Grpc, listener: Grpc | Http | None, tokens: Tokens | None, section: str
) -> str:
    """Return why `listener`, None is the Unix socket, refuses control calls; "" if it does not."""
    if grpc.control == "off":
        return 'is a control call, and those are off (grpc.control = "off")'
    if listener is None:
        return ""
    if grpc.control == "unix":
        return f"is a control call; those are served on the Unix socket {grpc.socket}"
    if tokens is None and not listener.tls.mutual and not is_loopback(listener.host):
        return (
            f"is a control call; beyond the loopback ({section}.host = {listener.host!r}) those "
            "need tokens ([access] tokens_file) or client certificates (mutual in "
            f"[{section}.tls]), and without them are served on the Unix socket (grpc.socket) alone"
        )
    return ""


def _restrictions(restricted: Iterable[Restriction]) -> Mapping[str, Restriction]:
    return {
        method: each
        for each in restricted
        for protocol in each.protocols
        for method in PROTOCOLS[protocol]
    }


def _scope_of(method: str) -> Scope | None:
    """Return the scope that a call of `method` needs; a health check needs none."""
    if method in PROTOCOLS["health"]:
        return None
    if method in PROTOCOLS["inference"]:
        return "infer"
    return "read" if method in OPEN or method in UPDATES else "control"
