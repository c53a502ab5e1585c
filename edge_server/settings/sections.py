"""The tables of the configuration file, one struct each; those of gRPC are in `transport`."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
# `$` would take a line end behind the name.
NAME = r"^[a-z0-9_-]{1,64}\Z"
CHANNEL = r"^oci://[^\s/@]+/[^\s@:]+:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z"
REGION = r"^(road|[0-9]{1,5},[0-9]{1,5},[0-9]{1,5},[0-9]{1,5})?\Z"
# Clients measure with as many (`perf_analyzer --concurrency-range=64`).
MOST_INFERENCES: Final = 64
EventKind = Literal["lane_departure", "lane_change", "camera", "model", "degraded"]
InterpretedBackend = Literal["python", "pytorch", "tensorflow", "openvino", "paddle"]
PayloadFormat = Literal["json", "protobuf"]
Name = Annotated[str, msgspec.Meta(pattern=NAME)]


RESTART: Final = "restart"
# Settings of a unit of its own, which reads the file when it starts.
POWER: Final = "edge-server-power.service"


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file: immutable, and an unknown key is an error.

    A reload applies a setting that is `Annotated` with `applied_by`, or whose table is; every other
    needs a restart.
    """


def applied_by(part: str) -> msgspec.Meta:
    """Return the annotation of a setting or table that `part` applies at a reload: a name of
    `live_parts`, POWER or RESTART."""
    return msgspec.Meta(extra={"applied_by": part})


def part_of(annotation: Any) -> str | None:
    """Return the part that applies a field of this type; None if its table says which."""
    found = (meta.extra for meta in getattr(annotation, "__metadata__", ()) if meta.extra)
    return next((extra["applied_by"] for extra in found), None)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_name() -> str:
    """Return the host's name as a topic may spell it."""
    return re.sub(r"[^a-z0-9_-]+", "-", socket.gethostname().lower())[:64] or "edge"


class DeviceSection(Section, frozen=True):
    """`[device]`: the name of this appliance; its id is part of every topic.

    Attributes:
        clock: `synchronized` where a time daemon keeps the clock: messages are degraded
            (`clock_unsynchronized`) until it does. `any` degrades only those that are made while
            the clock shows a time before this software was made.
    """

    id: Name = msgspec.field(default_factory=_host_name)
    clock: Literal["any", "synchronized"] = "any"


class ChannelSection(Section, frozen=True):
    """`[repository.channels.NAME]`: a tag of a registry whose models this device takes, in mode
    `poll`; see docs/fleet.md.

    Attributes:
        source: `oci://REGISTRY/REPOSITORY:TAG`.
        keys: files of public keys; one of them must have signed the tag's index.
        interval_s: between two requests; up to a half less, at random.
        ca_file: PEM; the authority of the registry's certificate; None are those of the system.
    """

    source: Annotated[str, msgspec.Meta(pattern=CHANNEL)]
    keys: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    interval_s: Annotated[float, msgspec.Meta(ge=1, le=86400)] = 300.0
    ca_file: str | None = None


class Repository(Section, frozen=True):
    """`[repository]`: where the models are, which are loaded, and how faults are handled.

    Attributes:
        mode: `none` loads all models at start and never again; `explicit` loads `load` at start
            and the rest on request; `poll` loads all, and follows every change.
        poll_s: seconds between two scans, in mode `poll`; 0 scans at the start only.
        settle_s: a model's files are complete once unchanged for so many seconds, in mode `poll`.
        store: directory of the model copies in mode `poll`, a separate one for each set of
            `paths`; empty is `store` in systemd's state directory, or in the user's. Other modes
            copy to `TMPDIR`.
        store_max_bytes: limit for all copies together, those of other `paths` included.
        disk_reserve_bytes: free space that copies of models leave on their disk, or a twentieth of
            a smaller disk. Copies that served earlier are removed for it, oldest first; what serves
            and what serves after a restart never is.
        memory_reserve_bytes: in mode `poll` no model is loaded that would leave less free memory.
        probation_requests: number of requests for which a replacing model is a canary, for at
            least `probation_s`; if it does worse, the daemon rolls back. 0 disables the canary.
        incompatible_member: for a model that a serving ensemble would no longer fit: `refuse`
            keeps both as they are, `take_down` makes the ensemble unavailable until its members
            fit again.
        signatures: whether models must be signed, in every mode: `require` refuses unsigned
            models, `warn` logs them.
        signature_keys: files of the public keys, of which one must fit.
        load: names to load at start in mode `explicit`; `*` alone is all.
        exit_on_error: a model that cannot be loaded at start ends the daemon.
        strict_readiness: the server is ready only while every model is.
        auto_complete: values missing in a config.pbtxt are derived from the model's files.
        default_max_batch_size: of a model that can batch and declares no limit.
        load_threads: number of models loaded at once.
        load_retries: number of further attempts for a model that cannot be loaded.
        config_name: a model's `configs/<config_name>.pbtxt` takes the place of its config.pbtxt,
            where it exists: one repository serves boards that differ. A config.pbtxt with the
            parameter `preferred_configs` serves until that can, and where it cannot.
        wait_for_plans_s: at a boot edge-server-plans.service lets the daemon start so many seconds
            later at most; 0 builds plans beside the daemon.
        channels: what a registry says which models this device has, by name.
    """

    paths: tuple[str, ...] = ("models",)
    mode: Literal["none", "explicit", "poll"] = "none"
    poll_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 15.0
    settle_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 2.0
    store: str = ""
    store_max_bytes: Positive = 8 << 30
    disk_reserve_bytes: Count = 256 << 20
    memory_reserve_bytes: Count = 256 << 20
    probation_requests: Count = 200
    probation_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 30.0
    incompatible_member: Literal["refuse", "take_down"] = "refuse"
    signatures: Literal["off", "warn", "require"] = "off"
    signature_keys: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    exit_on_error: bool = True
    strict_readiness: bool = True
    auto_complete: bool = True
    default_max_batch_size: Positive = 4
    load_threads: Positive = 4
    load_retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    config_name: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]*)?\Z")] = ""
    wait_for_plans_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 900.0
    channels: dict[Name, ChannelSection] = {}

    def __post_init__(self) -> None:
        if self.channels and self.mode != "poll":
            raise ValueError(
                'channels need mode = "poll": only then a model is followed, and rolled back'
            )
        if "*" in self.load and len(self.load) > 1:
            raise ValueError(
                "Wildcard model name '*' must be the ONLY startup model if specified at all."
            )
        for path in self.paths:
            if "://" in path:
                raise ValueError(
                    f"{path}: models are served from local disks; `edge-server models pull` brings "
                    "a model from S3, HTTPS or OCI into a directory"
                )


class Mqtt(Section, frozen=True):
    """`[mqtt]`: the broker; without this table nothing is published.

    Attributes:
        insecure: allows a password, or the vehicle's state, to cross a network in plain text.
        ca_file: PEM; the authority that must have signed the broker's certificate; enables TLS.
        cert_file: PEM; this device's own certificate, with its private key in `key_file`.
        payload: of lanes and events: `protobuf` is the message of lanes.proto or events.proto, in
            half the bytes of `json`, which is its JSON mapping. States are always JSON.
        vehicle_state: takes the vehicle's speed, yaw rate and indicator from the topic `vehicle`,
            in the form of `payload`; whoever may publish there can withhold warnings.
        home_assistant: the prefix under which Home Assistant discovers the device, by default
            `homeassistant` there; None announces nothing.
    """

    host: str
    port: Port = 1883
    username: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure: bool = False
    payload: PayloadFormat = "json"
    vehicle_state: bool = False
    home_assistant: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")] | None = None

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file belong together: give both, or neither")
        if self.cert_file and not self.ca_file:
            raise ValueError("cert_file needs ca_file: without it there is no TLS")
        if self.home_assistant and self.payload != "json":
            raise ValueError('home_assistant needs payload = "json": it reads nothing else')
        if self.vehicle_state and not (self.ca_file or self.insecure or is_loopback(self.host)):
            raise ValueError(
                f"{self.host} is beyond the loopback, and vehicle_state would let anybody on the "
                "network withhold warnings; encrypt with ca_file, or set insecure = true if that "
                "is meant"
            )
        if self.password_file and not (self.ca_file or self.insecure or is_loopback(self.host)):
            raise ValueError(
                f"{self.host} is beyond the loopback, and the password would cross the network in "
                "plain text; encrypt it with ca_file, or set insecure = true if that is meant"
            )


class NetworkSection(Section, frozen=True):
    """`[cameras.NAME.networks.NETWORK]`: another network that looks at the camera's frames.

    Attributes:
        max_hz: at most so many frames a second; 0 is every frame.
        deadline_ms: older frames are not given to the network, and older results are stale.
        priority: of several networks that wait, the one runs next that has had the least time,
            divided by its priority.
        region: what the network sees of the picture: `x,y,width,height` in px, or `road`, which is
            below the horizon of the camera's calibration; empty is all.
        publish: results go to MQTT and streams; otherwise they are counted, and recorded, alone.
        track: boxes of one object keep their number from frame to frame.
        shadow_of: `lanes` compares the network's lanes with those that are served, in a tenth of a
            thread's time; they are not published.
    """

    model: str
    max_hz: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 500
    priority: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    region: Annotated[str, msgspec.Meta(pattern=REGION)] = ""
    publish: bool = True
    track: bool = False
    shadow_of: Literal["lanes"] | None = None


class CameraSection(Section, frozen=True):
    """`[cameras.NAME]`: where frames come from and which model detects lanes in them.

    Attributes:
        credentials_file: the user name and the password of a live camera; see `read_credentials`.
        reader: of a live camera; `auto` prefers GStreamer.
        priority: where a model is slower than its cameras, one of priority 2 gets twice the lanes
            of one of priority 1.
        max_age_ms: frames that are older are not sent to the model, and lanes that are older when
            they are published are stale. Lanes older than 1 s are never published.
        color_matrix: overrides the matrix that the camera reports for its YUV images.
        color_range: likewise the range of their values.
        calibration: the file of `edge-server calibrate`; without it lanes are in pixels alone.
        model: empty for a camera without lanes, whose frames go to its networks alone.
        networks: other networks that look at the same frames, by name; see docs/networks.md.
    """

    uri: str
    model: str = "lane_detection"
    credentials_file: str | None = None
    reader: Literal["auto", "gstreamer", "opencv"] = "auto"
    priority: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    max_age_ms: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 200
    color_matrix: Literal["bt601", "bt709"] | None = None
    color_range: Literal["limited", "full"] | None = None
    calibration: str | None = None
    networks: dict[Name, NetworkSection] = {}

    def __post_init__(self) -> None:
        if "lanes" in self.networks:
            raise ValueError(
                "networks.lanes: `lanes` is the network of the camera's own model; give another "
                "one another name"
            )
        if self.model:
            return
        if not self.networks:
            raise ValueError(
                "model is empty, and there are no networks: nothing would look at the frames; name "
                "a lane model, or add [cameras.NAME.networks.NETWORK]"
            )
        for name, network in self.networks.items():
            if network.shadow_of is not None:
                raise ValueError(
                    f"networks.{name}.shadow_of: the camera has no lanes to compare with; name its "
                    "lane model"
                )


class Vehicle(Section, frozen=True):
    """`[vehicle]`: the vehicle that carries the cameras.

    Attributes:
        width_m: between the outer edges of its front wheels.
    """

    width_m: Annotated[float, msgspec.Meta(ge=0.5, le=4.0)] = 1.9


class LaneDeparture(Section, frozen=True):
    """`[lane_departure]`: when a warning begins; it needs a camera with a calibration.

    Attributes:
        time_to_line_s: so long before a wheel is on the boundary. ISO 17361 allows 0.75 m inside,
            at the earliest, where the vehicle drifts at up to 0.5 m/s.
        min_speed_mps: no warning below; where the vehicle's speed is not known, at every speed.
    """

    enabled: bool = True
    time_to_line_s: Annotated[float, msgspec.Meta(ge=0, le=1.5)] = 1.0
    min_speed_mps: Annotated[float, msgspec.Meta(ge=0, le=50)] = 16.7


class EventsSection(Section, frozen=True):
    """`[events]`: events with their ids, kept for those who may not miss one.

    Attributes:
        file: lines of JSON. None is `events.jsonl` in systemd's state directory; without systemd,
            events are kept in memory alone, and their ids begin at 1 with every start.
        kept: number of events; the oldest are forgotten.
    """

    file: str | None = None
    kept: Annotated[int, msgspec.Meta(ge=10, le=100_000)] = 10_000


class RecorderSection(Section, frozen=True):
    """`[recorder]`: what the cameras saw and what came of it, in MCAP files; see docs/recorder.md.

    Attributes:
        mode: `events` writes a file around each event and on request; `continuous` writes all the
            time, and keeps the files of events longer; `off` costs nothing.
        directory: the daemon's own; empty is `recordings` in systemd's state directory, or in the
            user's.
        cameras: names; empty is every camera.
        events: the kinds of events that begin a file, or pin one.
        before_s: so much before the event is kept in memory and written.
        after_s: likewise after it.
        file_s: a file is no longer.
        max_bytes: all files together; the oldest are deleted, those of events last.
        memory_bytes: what is kept in memory is no larger, whatever `before_s` says.
        jpeg_quality: of pictures that did not come as JPEG from the camera.
        width: larger pictures are made so small, in px; 0 leaves them as they are.
    """

    mode: Literal["off", "events", "continuous"] = "off"
    directory: str = ""
    cameras: tuple[Name, ...] = ()
    events: tuple[EventKind, ...] = ("lane_departure", "camera", "model", "degraded")
    before_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 10.0
    after_s: Annotated[float, msgspec.Meta(ge=0, le=300)] = 10.0
    file_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 60.0
    max_bytes: Annotated[int, msgspec.Meta(ge=64 << 20)] = 4 << 30
    memory_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 256 << 20
    jpeg_quality: Annotated[int, msgspec.Meta(ge=1, le=100)] = 85
    width: Annotated[int, msgspec.Meta(ge=0, le=16384)] = 0


class LogSection(Section, frozen=True):
    """`[log]`: which lines are logged and where; `verbose` 1 and more adds debug lines.

    Attributes:
        info: logs normal operation; likewise `warning` and `error`.
        format: `default` is short times for a terminal and priorities for the journal; `json` an
            object for each line, with time, level, logger, thread and text.
        file: lines are appended to this file instead of stderr.
    """

    verbose: Count = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: Literal["default", "ISO8601", "json"] = "default"
    file: Annotated[str | None, applied_by(RESTART)] = None


class Power(Section, frozen=True):
    """`[power]`: what `edge-server power apply` sets on a Jetson, at boot; None leaves it as it is.

    Attributes:
        mode: name or number of a mode of nvpmodel: `MAXN`, `15W`, 0.
        clocks: `max` pins all clocks to the highest of the mode (jetson_clocks); `auto` leaves them
            to the kernel.
    """

    mode: Annotated[str, msgspec.Meta(min_length=1)] | Count | None = None
    clocks: Literal["auto", "max"] | None = None


class RateLimitResourceSection(Section, frozen=True):
    """The amount of one resource; with `device` -1 the amount on each device."""

    name: str
    count: Positive
    device: int = -1


class Serving(Section, frozen=True):
    """`[serving]`: how requests are served.

    Attributes:
        name: the server's name for clients.
        exit_timeout_s: seconds that in-flight requests get when the daemon stops.
        client_shared_memory: clients on this machine may register shared memory.
        max_inferences: requests in flight at once on each of gRPC's TCP side, its socket, and HTTP;
            each holds a thread, and the next one is refused (UNAVAILABLE, 503).
        rate_limit: whether `rate_limiter` of instance groups is applied.
        rate_limit_resources: the amounts; the default is the most that any model requires.
        cache_bytes: for responses of models with `response_cache`; 0 disables the cache.
    """

    name: str = "triton"
    exit_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=3600), applied_by("stop")] = 3.0
    client_shared_memory: bool = False
    max_inferences: Annotated[int, msgspec.Meta(ge=1, le=1024)] = MOST_INFERENCES
    rate_limit: Literal["off", "execution_count"] = "off"
    rate_limit_resources: tuple[RateLimitResourceSection, ...] = ()
    cache_bytes: Count = 0


class TraceSection(Section, frozen=True):
    """`[trace]`: Triton's trace settings at the start; clients may change all but the file.

    Attributes:
        level: TIMESTAMPS records when each request was received, queued, computed and completed.
        rate: one of so many requests is traced; with `[tracing]` 0 traces those alone whose caller
            does.
        count: maximum number of traces; -1 is unlimited.
        log_frequency: traces per file before the next file begins, `file.0`, `file.1`, …; 0 is one
            file.
        file: path of the traces, 64 MiB in all; empty disables traces.
    """

    level: tuple[Literal["OFF", "TIMESTAMPS", "TENSORS"], ...] = ("OFF",)
    rate: Count = 1000
    count: Annotated[int, msgspec.Meta(ge=-1)] = -1
    log_frequency: Count = 0
    file: Annotated[str, applied_by(RESTART)] = ""

    def __post_init__(self) -> None:
        if "OFF" in self.level and len(self.level) > 1:
            raise ValueError("Expect only one trace level 'OFF' is specified")
        if "TENSORS" in self.level:
            raise ValueError(
                "level TENSORS is not supported: no tensors are written to traces; give "
                "TIMESTAMPS alone"
            )


class TracingSection(Section, frozen=True):
    """`[tracing]`: spans of requests and frames for OpenTelemetry, over OTLP/HTTP.

    Attributes:
        endpoint: where a collector takes spans, path included.
        sample: the share of requests and of frames that is traced; None is one of `trace.rate`. A
            request with a `traceparent` is traced where its caller records the trace, and not
            otherwise.
        resource: what the spans' resource says beside the device's own: each `key=value`.
        ca_file: PEM; the authority that must have signed the collector's certificate; None are
            those that the library knows.
    """

    enabled: bool = False
    endpoint: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s@]+\Z")] = (
        "http://127.0.0.1:4318/v1/traces"
    )
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    resource: tuple[Annotated[str, msgspec.Meta(pattern=r"^[^=]+=.")], ...] = ()
    ca_file: str | None = None


class Metrics(Section, frozen=True):
    """`[metrics]`: the address that Prometheus scrapes; port 0 takes a free one.

    `insecure` allows another address than the loopback; metrics have no encryption. `cpu` and `gpu`
    add Triton's metrics of processor and GPU.

    Attributes:
        counter_latencies: total times of each model's requests, and what its cache has saved.
        summary_latencies: `summary_quantiles` of these times in the last minute.
        histogram_latencies: how long each phase of requests takes, and how long decoupled models
            take to their first response.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 8002
    insecure: bool = False
    cpu: bool = True
    gpu: bool = True
    counter_latencies: bool = True
    summary_latencies: bool = False
    summary_quantiles: tuple[Annotated[float, msgspec.Meta(ge=0, le=1)], ...] = (
        *(0.5, 0.9, 0.95, 0.99, 0.999),
    )
    histogram_latencies: bool = False

    def __post_init__(self) -> None:
        if self.enabled and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} is beyond the loopback, where anybody could read in plain text what "
                "this appliance does; set insecure = true (--metrics-insecure) if that is meant"
            )


class Python(Section, frozen=True):
    """`[python]`: the processes of Python models, and of models that a framework runs: what they
    may access beside their own directory.

    Attributes:
        sandbox: `auto` closes off everything that the kernel can close off and logs the rest;
            `require` refuses Python models where something stays open; `off` closes nothing off.
        readable: more files and directories that the models may read.
        writable: likewise read and write. Each process has a temporary directory of its own.
        private: files and directories that stay closed although a parent directory is open; the
            daemon's own secrets and state always stay closed.
        unix_sockets: whether the models may connect to Unix sockets. By default they may unless
            the daemon serves gRPC on one: they run as the daemon's user, to whom it is open.
        backends: Triton's directory of backends: a model whose `backend` is the name of a directory
            in it with a `model.py` is run by that file.
        interpreters: backend → the Python that runs its models, 3.10 or newer, which has that
            framework, msgspec and numpy; without an entry it is the daemon's own.
        model_interpreters: likewise model → the Python that runs it, whatever its backend has.
    """

    sandbox: Literal["auto", "require", "off"] = "auto"
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    unix_sockets: bool | None = None
    backends: str = ""
    interpreters: dict[InterpretedBackend, str] = {}
    model_interpreters: dict[str, str] = {}

    def interpreter_of(self, model: str, backend: str) -> str:
        """Return the Python of a model; empty is the daemon's own."""
        by_backend: Mapping[Any, str] = self.interpreters
        return self.model_interpreters.get(model, by_backend.get(backend, ""))
