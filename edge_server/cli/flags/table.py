"""The table of all flags and their effects; tritonserver's flags keep their names and meanings.

A flag that only tunes a feature absent here is accepted and logged: a command line of tritonserver
keeps working. A flag that requires an absent feature is refused at once, as its user relies on it.
"""

from __future__ import annotations

from types import MappingProxyType

from edge_server.cli.flags import judges
from edge_server.cli.flags.flag import Flag, gathers, ignored, refused, refused_if_on, sets
from edge_server.cli.flags.texts import (
    boolean,
    host,
    named_setting,
    number,
    one_of,
    opposite,
    pair,
    rate_limit_resource,
    restriction,
    text,
    verbosity,
    whole,
)

DEPRECATED = "Deprecated"

_REPOSITORY = "a model repository in Triton's layout"
_NO_HTTP = "there is no HTTP front end; clients speak gRPC (--grpc-port)"
_NO_CLOUD = "this appliance is no cloud endpoint"
_NO_LIBRARIES = "what there is comes with edge-server, no shared library is searched for"
_NO_POOL = "there is no such memory pool"

_GROUPS: dict[str, tuple[Flag, ...]] = {
    "Appliance": (
        sets("device-id", "ID", "device.id", text, "part of every topic"),
        sets("grpc-socket", "PATH", "grpc.socket", text, "a Unix socket beside TCP"),
        sets(
            "grpc-control",
            "WHERE",
            "grpc.control",
            one_of("everywhere", "unix", "off"),
            "where calls that change the server are answered: everywhere, unix or off",
        ),
        sets("grpc-max-message-bytes", "BYTES", "grpc.max_message_bytes", whole, "largest request"),
        sets("grpc-insecure", "", "grpc.insecure", boolean, "allow plain text beyond the loopback"),
        sets("metrics-insecure", "", "metrics.insecure", boolean, "the same for metrics"),
        sets(
            "repository-settle-secs",
            "S",
            "repository.settle_s",
            number,
            "a model that stays the same so long is all there, if poll",
        ),
        sets(
            "repository-copies",
            "DIR",
            "repository.store",
            text,
            "where copies of models are kept, if poll",
        ),
        sets(
            "incompatible-member",
            "WHAT",
            "repository.incompatible_member",
            one_of("refuse", "take_down"),
            "of a model that its ensemble would not fit: refuse it, or take_down the ensemble",
        ),
    ),
    "Server": (
        sets("id", "NAME", "serving.name", text, "what clients are told the server is called"),
        sets(
            "exit-timeout-secs",
            "S",
            "serving.exit_timeout_s",
            whole,
            "what requests in flight may still take at the end",
        ),
        sets(
            "allow-client-shm",
            "BOOL",
            "serving.client_shared_memory",
            boolean,
            "clients may register shared memory",
        ),
    ),
    "Logging": (
        sets("log-verbose", "LEVEL", "log.verbose", verbosity, "1 and more adds debug lines"),
        sets("log-info", "BOOL", "log.info", boolean, "lines about what goes as it should"),
        sets("log-warning", "BOOL", "log.warning", boolean, "lines that warn"),
        sets("log-error", "BOOL", "log.error", boolean, "lines about what failed"),
        sets(
            "log-format",
            "FORMAT",
            "log.format",
            one_of("default", "ISO8601", "json"),
            "default, ISO8601, or json: an object for each line",
        ),
        sets("log-file", "FILE", "log.file", text, "append there, not to stderr"),
    ),
    "Model repository": (
        gathers("model-repository", "DIR", "repository.paths", text, _REPOSITORY),
        gathers("model-store", "DIR", "repository.paths", text, "the same as --model-repository"),
        sets(
            "model-control-mode",
            "MODE",
            "repository.mode",
            one_of("none", "explicit", "poll"),
            "none, explicit or poll",
        ),
        gathers(
            "load-model",
            "NAME",
            "repository.load",
            text,
            "load at start if explicit; * is all",
        ),
        sets("repository-poll-secs", "S", "repository.poll_s", number, "between two looks if poll"),
        sets(
            "exit-on-error",
            "BOOL",
            "repository.exit_on_error",
            boolean,
            "a model that cannot be loaded ends the daemon",
        ),
        sets(
            "strict-readiness",
            "BOOL",
            "repository.strict_readiness",
            boolean,
            "ready only while every model is",
        ),
        Flag(
            "disable-auto-complete-config",
            "",
            "a config.pbtxt must say everything",
            sets("", "", "repository.auto_complete", opposite).judge,
        ),
        sets(
            "model-load-thread-count",
            "N",
            "repository.load_threads",
            whole,
            "models that load at once",
        ),
        ignored("model-load-retry-count", "N", whole, "a model that cannot be loaded stays so"),
        refused_if_on("model-namespacing", "a model's name is in one repository only"),
        refused("model-config-name", "NAME", "only a model's config.pbtxt is read; put it there"),
    ),
    "gRPC": (
        sets("allow-grpc", "BOOL", "grpc.enabled", boolean, "serve gRPC"),
        sets("grpc-address", "HOST", "grpc.host", host, "beyond the loopback only with TLS"),
        sets("grpc-port", "PORT", "grpc.port", whole, "0 takes a free one"),
        refused_if_on("reuse-grpc-port", "a second server on the port would take half the calls"),
        sets("grpc-use-ssl", "BOOL", "grpc.tls.enabled", boolean, "encrypt the TCP side"),
        sets(
            "grpc-use-ssl-mutual",
            "BOOL",
            "grpc.tls.mutual",
            boolean,
            "and ask clients for a certificate",
        ),
        sets("grpc-server-cert", "FILE", "grpc.tls.certificate", text, "PEM"),
        sets("grpc-server-key", "FILE", "grpc.tls.key", text, "PEM"),
        sets("grpc-root-cert", "FILE", "grpc.tls.client_ca", text, "PEM; signs clients"),
        gathers(
            "grpc-restricted-protocol",
            "PROTOCOLS:KEY=VALUE",
            "grpc.restricted",
            restriction,
            "for calls with the header triton-grpc-protocol-KEY only",
        ),
        sets(
            "grpc-keepalive-time",
            "MS",
            "grpc.keepalive_time_ms",
            whole,
            "a silent client is asked then",
        ),
        sets(
            "grpc-keepalive-timeout", "MS", "grpc.keepalive_timeout_ms", whole, "and given up then"
        ),
        sets(
            "grpc-keepalive-permit-without-calls", "BOOL", "grpc.keepalive_without_calls", boolean
        ),
        sets("grpc-http2-max-pings-without-data", "N", "grpc.max_pings_without_data", whole),
        sets(
            "grpc-http2-min-recv-ping-interval-without-data",
            "MS",
            "grpc.min_ping_interval_without_data_ms",
            whole,
        ),
        sets("grpc-http2-max-ping-strikes", "N", "grpc.max_ping_strikes", whole),
        sets("grpc-max-connection-age", "MS", "grpc.max_connection_age_ms", whole),
        sets("grpc-max-connection-age-grace", "MS", "grpc.max_connection_age_grace_ms", whole),
        ignored("grpc-infer-thread-count", "N", whole, "a call has its thread for its whole life"),
        ignored("grpc-infer-allocation-pool-size", "N", whole, _NO_POOL),
        ignored("grpc-max-response-pool-size", "N", whole, _NO_POOL),
        Flag(
            "grpc-infer-response-compression-level",
            "LEVEL",
            "no effect: answers are not compressed",
            judges.compression_level,
            sets_nothing=True,
        ),
        refused(
            "grpc-header-forward-pattern",
            "REGEX",
            "headers are not forwarded to models; send what they need as request parameters",
        ),
    ),
    "HTTP": (
        refused_if_on("allow-http", _NO_HTTP),
        refused("http-port", "PORT", _NO_HTTP),
        ignored("http-address", "HOST", text, _NO_HTTP),
        ignored("reuse-http-port", "BOOL", boolean, _NO_HTTP),
        ignored("http-thread-count", "N", whole, _NO_HTTP),
        ignored("http-max-input-size", "BYTES", whole, _NO_HTTP),
        ignored("http-header-forward-pattern", "REGEX", text, _NO_HTTP),
        ignored("http-restricted-api", "APIS:KEY=VALUE", text, _NO_HTTP),
        refused_if_on("allow-sagemaker", _NO_CLOUD),
        ignored("sagemaker-port", "PORT", whole, _NO_CLOUD),
        ignored("sagemaker-safe-port-range", "N-N", text, _NO_CLOUD),
        ignored("sagemaker-thread-count", "N", whole, _NO_CLOUD),
        refused_if_on("allow-vertex-ai", _NO_CLOUD),
        ignored("vertex-ai-port", "PORT", whole, _NO_CLOUD),
        ignored("vertex-ai-thread-count", "N", whole, _NO_CLOUD),
        ignored("vertex-ai-default-model", "NAME", text, _NO_CLOUD),
    ),
    "Metrics": (
        sets("allow-metrics", "BOOL", "metrics.enabled", boolean, "tell Prometheus"),
        sets("metrics-address", "HOST", "metrics.host", host, "where it asks"),
        sets("metrics-port", "PORT", "metrics.port", whole, "0 takes a free one"),
        sets(
            "allow-cpu-metrics", "BOOL", "metrics.cpu", boolean, "use of processor and memory too"
        ),
        ignored("allow-gpu-metrics", "BOOL", boolean, "there are no metrics of a GPU yet"),
        ignored("metrics-interval-ms", "MS", number, "numbers are read when they are asked for"),
        ignored(
            "metrics-config",
            "SETTING=VALUE",
            pair("<setting>=<value>", "="),
            "counters are always given, summaries and histograms of requests never",
        ),
    ),
    "Tracing": (
        Flag(
            "trace-config",
            "SETTING=VALUE",
            "level, rate, count; triton,file, triton,log-frequency; repeatable",
            judges.trace_config,
        ),
    ),
    "Backends": (
        Flag(
            "backend-config",
            "NAME,SETTING=VALUE",
            "default-max-batch-size=N; all else has no effect; repeatable",
            judges.backend_config,
        ),
        ignored("backend-directory", "DIR", text, _NO_LIBRARIES),
        ignored("repoagent-directory", "DIR", text, _NO_LIBRARIES),
    ),
    "Scheduling and cache": (
        sets(
            "rate-limit",
            "MODE",
            "serving.rate_limit",
            one_of("off", "execution_count"),
            "execution_count heeds rate_limiter of instance groups",
        ),
        gathers(
            "rate-limit-resource",
            "NAME:COUNT[:DEVICE]",
            "serving.rate_limit_resources",
            rate_limit_resource,
            "how many there are",
        ),
        Flag(
            "cache-config", "local,size=BYTES", "for models that cache answers", judges.cache_config
        ),
        ignored("cache-directory", "DIR", text, _NO_LIBRARIES),
    ),
    "Memory and devices": (
        ignored("pinned-memory-pool-byte-size", "BYTES", whole, _NO_POOL),
        ignored("cuda-memory-pool-byte-size", "GPU:BYTES", pair("<GPU>:<bytes>", ":"), _NO_POOL),
        ignored("cuda-virtual-address-size", "GPU:BYTES", pair("<GPU>:<bytes>", ":"), _NO_POOL),
        ignored("enable-peer-access", "BOOL", boolean, "no GPU asks another for its memory"),
        ignored("min-supported-compute-capability", "N", number, "no GPU is left out"),
        ignored("buffer-manager-thread-count", "N", whole, "tensors are not copied by threads"),
        ignored(
            "host-policy",
            "NAME,SETTING=VALUE",
            named_setting,
            "no thread is bound to a processor",
        ),
        ignored(
            "model-load-gpu-limit",
            "GPU:FRACTION",
            pair("<GPU>:<fraction>", ":"),
            "memory of the GPU is not counted yet",
        ),
    ),
    DEPRECATED: (
        sets(
            "strict-model-config",
            "BOOL",
            "repository.auto_complete",
            opposite,
            "true is --disable-auto-complete-config",
        ),
        sets(
            "response-cache-byte-size",
            "BYTES",
            "serving.cache_bytes",
            whole,
            "--cache-config=local,size=BYTES",
        ),
        sets("trace-file", "FILE", "trace.file", text, "--trace-config=triton,file=FILE"),
        Flag("trace-level", "LEVEL", "--trace-config=level=LEVEL", judges.trace_level),
        sets("trace-rate", "N", "trace.rate", whole, "--trace-config=rate=N"),
        sets("trace-count", "N", "trace.count", whole, "--trace-config=count=N"),
        sets(
            "trace-log-frequency",
            "N",
            "trace.log_frequency",
            whole,
            "--trace-config=triton,log-frequency=N",
        ),
    ),
}

GROUPS = MappingProxyType(_GROUPS)
