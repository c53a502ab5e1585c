"""The table of all flags and their effects; tritonserver's flags keep their names and meanings.

A flag that only tunes a feature absent here is accepted and logged: a command line of tritonserver
keeps working. A flag that requires an absent feature is refused at once, as its user relies on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from edge_server.cli.flags import values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.cli.flags.values import Effect

DEPRECATED = "Deprecated"

_NO_HTTP = "there is no HTTP front end; clients speak gRPC (--grpc-port)"
_NO_CLOUD = "this appliance is no cloud endpoint"
_NO_LIBRARIES = "what there is comes with edge-server, no shared library is searched for"
_NO_POOL = "there is no such memory pool"

# Name and value of the flag | effect | text for the help. The effect is the setting of that path;
# `ignored` after a check of the value's form; `refused`; `refused if on`; or `special`.
_TABLE = f"""
Appliance
  device-id ID                       | device.id                    | part of every topic
  grpc-socket PATH                   | grpc.socket                  | a Unix socket beside TCP
  grpc-control WHERE                 | grpc.control                 | where calls that change the server are answered: everywhere, unix or off
  grpc-max-message-bytes BYTES       | grpc.max_message_bytes       | largest request
  grpc-insecure                      | grpc.insecure                | allow plain text beyond the loopback
  metrics-insecure                   | metrics.insecure             | the same for metrics
  repository-settle-secs S           | repository.settle_s          | a model that stays the same so long is all there, if poll
  repository-copies DIR              | repository.store             | where copies of models are kept, if poll
  incompatible-member WHAT           | repository.incompatible_member | of a model that its ensemble would not fit: refuse it, or take_down the ensemble
Server
  id NAME                            | serving.name                 | what clients are told the server is called
  exit-timeout-secs S                | serving.exit_timeout_s       | what requests in flight may still take at the end
  allow-client-shm BOOL              | serving.client_shared_memory | clients may register shared memory
Logging
  log-verbose LEVEL                  | log.verbose                  | 1 and more adds debug lines
  log-info BOOL                      | log.info                     | lines about what goes as it should
  log-warning BOOL                   | log.warning                  | lines that warn
  log-error BOOL                     | log.error                    | lines about what failed
  log-format FORMAT                  | log.format                   | default, ISO8601, or json: an object for each line
  log-file FILE                      | log.file                     | append there, not to stderr
Model repository
  model-repository DIR               | repository.paths             | a model repository in Triton's layout; repeatable
  model-store DIR                    | repository.paths             | the same as --model-repository; repeatable
  model-control-mode MODE            | repository.mode              | none, explicit or poll
  load-model NAME                    | repository.load              | load at start if explicit; * is all; repeatable
  repository-poll-secs S             | repository.poll_s            | between two looks if poll
  exit-on-error BOOL                 | repository.exit_on_error     | a model that cannot be loaded ends the daemon
  strict-readiness BOOL              | repository.strict_readiness  | ready only while every model is
  disable-auto-complete-config       | repository.auto_complete     | a config.pbtxt must say everything
  model-load-thread-count N          | repository.load_threads      | models that load at once
  model-load-retry-count N           | ignored whole                | a model that cannot be loaded stays so
  model-namespacing BOOL             | refused if on                | a model's name is in one repository only
  model-config-name NAME             | refused                      | only a model's config.pbtxt is read; put it there
gRPC
  allow-grpc BOOL                    | grpc.enabled                 | serve gRPC
  grpc-address HOST                  | grpc.host                    | beyond the loopback only with TLS
  grpc-port PORT                     | grpc.port                    | 0 takes a free one
  reuse-grpc-port BOOL               | refused if on                | a second server on the port would take half the calls
  grpc-use-ssl BOOL                  | grpc.tls.enabled             | encrypt the TCP side
  grpc-use-ssl-mutual BOOL           | grpc.tls.mutual              | and ask clients for a certificate
  grpc-server-cert FILE              | grpc.tls.certificate         | PEM
  grpc-server-key FILE               | grpc.tls.key                 | PEM
  grpc-root-cert FILE                | grpc.tls.client_ca           | PEM; signs clients
  grpc-restricted-protocol PROTOCOLS:KEY=VALUE | grpc.restricted              | for calls with the header triton-grpc-protocol-KEY only; repeatable
  grpc-keepalive-time MS             | grpc.keepalive_time_ms       | a silent client is asked then
  grpc-keepalive-timeout MS          | grpc.keepalive_timeout_ms    | and given up then
  grpc-keepalive-permit-without-calls BOOL | grpc.keepalive_without_calls |
  grpc-http2-max-pings-without-data N | grpc.max_pings_without_data  |
  grpc-http2-min-recv-ping-interval-without-data MS | grpc.min_ping_interval_without_data_ms |
  grpc-http2-max-ping-strikes N      | grpc.max_ping_strikes        |
  grpc-max-connection-age MS         | grpc.max_connection_age_ms   |
  grpc-max-connection-age-grace MS   | grpc.max_connection_age_grace_ms |
  grpc-infer-thread-count N          | ignored whole                | a call has its thread for its whole life
  grpc-infer-allocation-pool-size N  | ignored whole                | {_NO_POOL}
  grpc-max-response-pool-size N      | ignored whole                | {_NO_POOL}
  grpc-infer-response-compression-level LEVEL | special                      | no effect: answers are not compressed
  grpc-header-forward-pattern REGEX  | refused                      | headers are not forwarded to models; send what they need as request parameters
HTTP
  allow-http BOOL                    | refused if on                | {_NO_HTTP}
  http-port PORT                     | refused                      | {_NO_HTTP}
  http-address HOST                  | ignored text                 | {_NO_HTTP}
  reuse-http-port BOOL               | ignored boolean              | {_NO_HTTP}
  http-thread-count N                | ignored whole                | {_NO_HTTP}
  http-max-input-size BYTES          | ignored whole                | {_NO_HTTP}
  http-header-forward-pattern REGEX  | ignored text                 | {_NO_HTTP}
  http-restricted-api APIS:KEY=VALUE | ignored text                 | {_NO_HTTP}
  allow-sagemaker BOOL               | refused if on                | {_NO_CLOUD}
  sagemaker-port PORT                | ignored whole                | {_NO_CLOUD}
  sagemaker-safe-port-range N-N      | ignored text                 | {_NO_CLOUD}
  sagemaker-thread-count N           | ignored whole                | {_NO_CLOUD}
  allow-vertex-ai BOOL               | refused if on                | {_NO_CLOUD}
  vertex-ai-port PORT                | ignored whole                | {_NO_CLOUD}
  vertex-ai-thread-count N           | ignored whole                | {_NO_CLOUD}
  vertex-ai-default-model NAME       | ignored text                 | {_NO_CLOUD}
Metrics
  allow-metrics BOOL                 | metrics.enabled              | tell Prometheus
  metrics-address HOST               | metrics.host                 | where it asks
  metrics-port PORT                  | metrics.port                 | 0 takes a free one
  allow-cpu-metrics BOOL             | metrics.cpu                  | use of processor and memory too
  allow-gpu-metrics BOOL             | ignored boolean              | there are no metrics of a GPU yet
  metrics-interval-ms MS             | ignored number               | numbers are read when they are asked for
  metrics-config SETTING=VALUE       | ignored <setting>=<value>    | counters are always given, summaries and histograms of requests never
Tracing
  trace-config SETTING=VALUE         | special                      | level, rate, count; triton,file, triton,log-frequency; repeatable
Backends
  backend-config NAME,SETTING=VALUE  | special                      | default-max-batch-size=N; all else has no effect; repeatable
  backend-directory DIR              | ignored text                 | {_NO_LIBRARIES}
  repoagent-directory DIR            | ignored text                 | {_NO_LIBRARIES}
Scheduling and cache
  rate-limit MODE                    | serving.rate_limit           | execution_count heeds rate_limiter of instance groups
  rate-limit-resource NAME:COUNT[:DEVICE] | serving.rate_limit_resources | how many there are; repeatable
  cache-config local,size=BYTES      | special                      | for models that cache answers
  cache-directory DIR                | ignored text                 | {_NO_LIBRARIES}
Memory and devices
  pinned-memory-pool-byte-size BYTES | ignored whole                | {_NO_POOL}
  cuda-memory-pool-byte-size GPU:BYTES | ignored <GPU>:<bytes>        | {_NO_POOL}
  cuda-virtual-address-size GPU:BYTES | ignored <GPU>:<bytes>        | {_NO_POOL}
  enable-peer-access BOOL            | ignored boolean              | no GPU asks another for its memory
  min-supported-compute-capability N | ignored number               | no GPU is left out
  buffer-manager-thread-count N      | ignored whole                | tensors are not copied by threads
  host-policy NAME,SETTING=VALUE     | ignored <name>,<setting>=<value> | no thread is bound to a processor
  model-load-gpu-limit GPU:FRACTION  | ignored <GPU>:<fraction>     | memory of the GPU is not counted yet
Deprecated
  strict-model-config BOOL           | repository.auto_complete     | true is --disable-auto-complete-config
  response-cache-byte-size BYTES     | serving.cache_bytes          | --cache-config=local,size=BYTES
  trace-file FILE                    | trace.file                   | --trace-config=triton,file=FILE
  trace-level LEVEL                  | special                      | --trace-config=level=LEVEL
  trace-rate N                       | trace.rate                   | --trace-config=rate=N
  trace-count N                      | trace.count                  | --trace-config=count=N
  trace-log-frequency N              | trace.log_frequency          | --trace-config=triton,log-frequency=N
"""

_IGNORED: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "text": values.text,
        "boolean": values.boolean,
        "whole": values.whole,
        "number": values.number,
        "<name>,<setting>=<value>": values.named_setting,
        "<setting>=<value>": values.pair("<setting>=<value>", "="),
        "<GPU>:<bytes>": values.pair("<GPU>:<bytes>", ":"),
        "<GPU>:<fraction>": values.pair("<GPU>:<fraction>", ":"),
    }
)

_SPECIAL: Mapping[str, Callable[[str], Effect]] = MappingProxyType(
    {
        "backend-config": values.backend_config,
        "cache-config": values.cache_config,
        "grpc-infer-response-compression-level": values.compression_level,
        "trace-config": values.trace_config,
        "trace-level": values.trace_level,
    }
)

# Flags whose values have another form than their setting's type suggests.
_FORMS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "disable-auto-complete-config": values.opposite,
        "exit-timeout-secs": values.whole,
        "grpc-address": values.host,
        "log-verbose": values.verbosity,
        "metrics-address": values.host,
        "strict-model-config": values.opposite,
    }
)


@dataclass(frozen=True)
class Flag:
    """One flag of the command line.

    Attributes:
        name: without the dashes.
        value: the name of the value in the help; empty for a flag without a value.
        effect: see the table.
        text: the table's text: what the flag is for, or why it has no effect.
    """

    name: str
    value: str
    effect: str
    text: str

    @property
    def path(self) -> str:
        """The flag's setting, `table.key`; empty if it has none, or more than one."""
        return self.effect if "." in self.effect else ""

    @property
    def sets_nothing(self) -> bool:
        """The flag only exists so that a command line of tritonserver's keeps working, or gets an
        explanation why it cannot."""
        return self.effect.startswith(("ignored", "refused")) or self.text.startswith("no effect")

    @property
    def help(self) -> str:
        """The text for the help."""
        if self.effect.startswith("ignored"):
            return f"no effect: {self.text}"
        if self.effect.startswith("refused"):
            return f"{'refused' if self.effect == 'refused' else 'only false'}: {self.text}"
        return self.text or f"sets {self.path}"

    def apply(self, given: str) -> Effect:
        """Return the effect of the flag with the value `given`.

        Raises:
            ValueError: the value is invalid, or the flag is refused.
        """
        if self.effect == "refused" or (self.effect == "refused if on" and values.boolean(given)):
            raise ValueError(self.text)
        if self.effect == "refused if on":
            return "it is off in any case"
        if self.effect == "special":
            return _SPECIAL[self.name](given)
        if self.effect.startswith("ignored"):
            _IGNORED[self.effect.removeprefix("ignored ")](given)
            return self.text
        return self.path, self._read(given)

    def _read(self, given: str) -> Any:
        return _FORMS.get(self.name, _form_of(self.path))(given)


def is_list(path: str) -> bool:
    """Return whether the setting at `path` takes a flag's values one after the other."""
    from edge_server.settings.read import type_of  # noqa: PLC0415

    return get_origin(type_of(path)) is tuple


def _form_of(path: str) -> Callable[[str], Any]:
    """Return the parser for the type of the setting at `path`."""
    from edge_server.settings import RateLimitResourceSection, Restriction  # noqa: PLC0415
    from edge_server.settings.read import type_of, types_in  # noqa: PLC0415

    forms: dict[Any, Callable[[str], Any]] = {
        str: values.text,
        bool: values.boolean,
        int: values.whole,
        float: values.number,
        Restriction: values.restriction,
        RateLimitResourceSection: values.rate_limit_resource,
    }
    types = types_in(type_of(path))
    if words := next((get_args(each) for each in types if get_origin(each) is Literal), None):
        return values.one_of(*words)
    return next(forms[each] for each in types if each in forms)


def _groups() -> dict[str, tuple[Flag, ...]]:
    groups: dict[str, tuple[Flag, ...]] = {}
    title = ""
    for line in _TABLE.strip().splitlines():
        if "|" not in line:
            title = line
            groups[title] = ()
            continue
        flag, effect, text = (column.strip() for column in line.split("|"))
        name, _, value = flag.partition(" ")
        groups[title] += (Flag(name, value, effect, text),)
    return groups


GROUPS: Mapping[str, tuple[Flag, ...]] = MappingProxyType(_groups())
