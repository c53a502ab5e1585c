"""Each flag reaches its setting, or is logged, or is refused; there is no fourth way."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.cli.flags import GROUPS, choose, nearest
from edge_server.errors import SettingsError
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from edge_server.settings import Settings

IGNORED = "ignored"
REFUSED = "refused"

# Flag → a value as it stands on the command line, and the setting it gives, or the other two ways.
EXPECTED: dict[str, list[tuple[str, Any]]] = {
    "device-id": [("truck", ("device.id", "truck"))],
    "device-clock": [("synchronized", ("device.clock", "synchronized"))],
    "grpc-socket": [("/run/x", ("grpc.socket", "/run/x"))],
    "grpc-control": [("off", ("grpc.control", "off"))],
    "grpc-max-lane-streams": [("9", ("grpc.max_lane_streams", 9))],
    "grpc-reflection": [("false", ("grpc.reflection", False))],
    "grpc-max-message-bytes": [("100000000", ("grpc.max_message_bytes", 100000000))],
    "grpc-insecure": [("true", ("grpc.insecure", True))],
    "http-insecure": [("true", ("http.insecure", True))],
    "metrics-insecure": [("true", ("metrics.insecure", True))],
    "id": [("orin", ("serving.name", "orin"))],
    "exit-timeout-secs": [("7", ("serving.exit_timeout_s", 7))],
    "allow-client-shm": [("true", ("serving.client_shared_memory", True))],
    "log-verbose": [("2", ("log.verbose", 2)), ("true", ("log.verbose", 1))],
    "log-info": [("false", ("log.info", False))],
    "log-warning": [("0", ("log.warning", False))],
    "log-error": [("off", ("log.error", False))],
    "log-format": [("iso8601", ("log.format", "ISO8601"))],
    "log-file": [("/tmp/log", ("log.file", "/tmp/log"))],  # noqa: S108
    "model-repository": [("/m", ("repository.paths", ("/m",)))],
    "model-store": [("/m", ("repository.paths", ("/m",)))],
    "model-control-mode": [
        ("none", ("repository.mode", "none")),
        ("EXPLICIT", ("repository.mode", "explicit")),
        ("poll", ("repository.mode", "poll")),
    ],
    "load-model": [("*", ("repository.load", ("*",)))],
    "repository-poll-secs": [
        ("2.5", ("repository.poll_s", 2.5)),
        ("0", ("repository.poll_s", 0.0)),
    ],
    "repository-settle-secs": [("0.5", ("repository.settle_s", 0.5))],
    "repository-copies": [("/s", ("repository.store", "/s"))],
    "incompatible-member": [
        ("refuse", ("repository.incompatible_member", "refuse")),
        ("take_down", ("repository.incompatible_member", "take_down")),
    ],
    "exit-on-error": [("False", ("repository.exit_on_error", False))],
    "strict-readiness": [("false", ("repository.strict_readiness", False))],
    "disable-auto-complete-config": [("true", ("repository.auto_complete", False))],
    "model-load-thread-count": [("8", ("repository.load_threads", 8))],
    "model-load-retry-count": [("1", ("repository.load_retries", 1))],
    "model-namespacing": [("true", REFUSED), ("false", IGNORED)],
    "model-config-name": [("orin", ("repository.config_name", "orin"))],
    "allow-grpc": [("false", ("grpc.enabled", False))],
    "grpc-address": [("::1", ("grpc.host", "::1")), ("[::1]", ("grpc.host", "::1"))],
    "grpc-port": [("9001", ("grpc.port", 9001))],
    "reuse-grpc-port": [("true", REFUSED), ("0", IGNORED)],
    "grpc-server-cert": [("c", ("grpc.tls.certificate", "c"))],
    "grpc-server-key": [("k", ("grpc.tls.key", "k"))],
    "grpc-root-cert": [("r", ("grpc.tls.client_ca", "r"))],
    "grpc-use-ssl": [("false", ("grpc.tls.enabled", False))],
    "grpc-use-ssl-mutual": [("false", ("grpc.tls.mutual", False))],
    "grpc-restricted-protocol": [
        ("health,trace:k=v", ("grpc.restricted.0.header", "triton-grpc-protocol-k"))
    ],
    "grpc-keepalive-time": [("7200000", ("grpc.keepalive_time_ms", 7200000))],
    "grpc-keepalive-timeout": [("20000", ("grpc.keepalive_timeout_ms", 20000))],
    "grpc-keepalive-permit-without-calls": [("1", ("grpc.keepalive_without_calls", True))],
    "grpc-http2-max-pings-without-data": [("0", ("grpc.max_pings_without_data", 0))],
    "grpc-http2-min-recv-ping-interval-without-data": [
        ("300000", ("grpc.min_ping_interval_without_data_ms", 300000))
    ],
    "grpc-http2-max-ping-strikes": [("0", ("grpc.max_ping_strikes", 0))],
    "grpc-max-connection-age": [("5000", ("grpc.max_connection_age_ms", 5000))],
    "grpc-max-connection-age-grace": [("500", ("grpc.max_connection_age_grace_ms", 500))],
    "grpc-infer-thread-count": [("2", IGNORED)],
    "grpc-infer-allocation-pool-size": [("8", IGNORED)],
    "grpc-max-response-pool-size": [("8", IGNORED)],
    "grpc-infer-response-compression-level": [("none", IGNORED), ("High", IGNORED)],
    "grpc-header-forward-pattern": [("my_.*", ("grpc.forward_headers", "my_.*"))],
    "allow-http": [("false", ("http.enabled", False))],
    "http-port": [("9000", ("http.port", 9000))],
    "http-address": [("::1", ("http.host", "::1"))],
    "reuse-http-port": [("true", REFUSED), ("false", IGNORED)],
    "http-thread-count": [("8", IGNORED)],
    "http-max-input-size": [("100000", ("http.max_body_bytes", 100000))],
    "http-header-forward-pattern": [("my_.*", ("http.forward_headers", "my_.*"))],
    "http-restricted-api": [
        (
            "health,inference:K=v",
            (
                "http.restricted",
                ({"protocols": ("health", "inference"), "header": "k", "value": "v"},),
            ),
        )
    ],
    "allow-sagemaker": [("true", REFUSED), ("false", IGNORED)],
    "sagemaker-port": [("8080", IGNORED)],
    "sagemaker-safe-port-range": [("1-2", IGNORED)],
    "sagemaker-thread-count": [("8", IGNORED)],
    "allow-vertex-ai": [("true", REFUSED), ("false", IGNORED)],
    "vertex-ai-port": [("8080", IGNORED)],
    "vertex-ai-thread-count": [("8", IGNORED)],
    "vertex-ai-default-model": [("m", IGNORED)],
    "allow-metrics": [("false", ("metrics.enabled", False))],
    "metrics-address": [("localhost", ("metrics.host", "localhost"))],
    "metrics-port": [("9002", ("metrics.port", 9002))],
    "allow-cpu-metrics": [("false", ("metrics.cpu", False))],
    "allow-gpu-metrics": [("false", ("metrics.gpu", False))],
    "metrics-interval-ms": [("2000.5", IGNORED)],
    "metrics-config": [
        ("summary_latencies=true", ("metrics.summary_latencies", True)),
        ("counter_latencies=false", ("metrics.counter_latencies", False)),
        ("histogram_latencies=true", ("metrics.histogram_latencies", True)),
        ("summary_quantiles=0.5:0.05,0.9:0.01", ("metrics.summary_quantiles", (0.5, 0.9))),
        ("summary_quantiles=0.5", REFUSED),
        ("summary_quantiles=2:0.1", REFUSED),
        ("gauge_latencies=true", REFUSED),
    ],
    "trace-config": [
        ("level=TIMESTAMPS", ("trace.level", ("TIMESTAMPS",))),
        ("level=TENSORS", REFUSED),
        ("rate=5", ("trace.rate", 5)),
        ("count=-1", ("trace.count", -1)),
        ("triton,file=/t", ("trace.file", "/t")),
        ("triton,log-frequency=3", ("trace.log_frequency", 3)),
        ("mode=triton", IGNORED),
        ("mode=opentelemetry", ("tracing.enabled", True)),
        ("opentelemetry,url=http://host/v1", ("tracing.endpoint", "http://host/v1")),
        ("opentelemetry,url=host:4318/v1", ("tracing.endpoint", "http://host:4318/v1")),
        ("opentelemetry,resource=service.name=x", ("tracing.resource.0", "service.name=x")),
        ("opentelemetry,resource=x", REFUSED),
        ("opentelemetry,bsp_max_queue_size=2048", IGNORED),
        ("opentelemetry,bsp_max_queue_size=many", REFUSED),
        ("opentelemetry,file=x", REFUSED),
        ("mode=jaeger", REFUSED),
    ],
    "backend-config": [
        ("tensorrt,plugins=a.so;b.so", IGNORED),
        ("key=value", IGNORED),
        ("default-max-batch-size=8", ("repository.default_max_batch_size", 8)),
    ],
    "backend-directory": [
        ("/opt/tritonserver/backends", ("python.backends", "/opt/tritonserver/backends"))
    ],
    "repoagent-directory": [("/opt/tritonserver/repoagents", IGNORED)],
    "rate-limit": [("execution_count", ("serving.rate_limit", "execution_count"))],
    "rate-limit-resource": [
        ("R1:10", ("serving.rate_limit_resources.0.count", 10)),
        ("R1:10:0", ("serving.rate_limit_resources.0.device", 0)),
    ],
    "cache-config": [
        ("local,size=1048576", ("serving.cache_bytes", 1048576)),
        ("redis,host=x", REFUSED),
        ("local,colour=red", REFUSED),
    ],
    "cache-directory": [("/opt/tritonserver/caches", IGNORED)],
    "enable-peer-access": [("true", IGNORED)],
    "pinned-memory-pool-byte-size": [("268435456", IGNORED)],
    "cuda-memory-pool-byte-size": [("0:67108864", IGNORED)],
    "cuda-virtual-address-size": [("0:1", IGNORED)],
    "min-supported-compute-capability": [("6.0", IGNORED)],
    "buffer-manager-thread-count": [("0", IGNORED)],
    "host-policy": [("gpu_0,numa-node=0", IGNORED)],
    "model-load-gpu-limit": [("0:0.8", IGNORED)],
    "strict-model-config": [
        ("true", ("repository.auto_complete", False)),
        ("false", ("repository.auto_complete", True)),
    ],
    "response-cache-byte-size": [("1000", ("serving.cache_bytes", 1000))],
    "trace-file": [("/t", ("trace.file", "/t"))],
    "trace-level": [("min", ("trace.level", ("TIMESTAMPS",)))],
    "trace-rate": [("7", ("trace.rate", 7))],
    "trace-count": [("9", ("trace.count", 9))],
    "trace-log-frequency": [("2", ("trace.log_frequency", 2))],
}
FLAGS = [flag for group in GROUPS.values() for flag in group]


def setting(settings: Settings, path: str) -> Any:
    """The value at `grpc.tls.key`, lists by number."""
    plain = msgspec.to_builtins(settings, builtin_types=(tuple,))
    return reduce(lambda at, key: at[int(key) if key.isdigit() else key], path.split("."), plain)


def test_the_whole_table_is_expected_here_and_no_name_is_in_it_twice() -> None:
    assert sorted(flag.name for flag in FLAGS) == sorted(EXPECTED)


@pytest.mark.parametrize(
    ("name", "value", "outcome"),
    [(name, *case) for name, cases in EXPECTED.items() for case in cases],
)
def test_each_flag_reaches_its_setting_or_is_logged_or_refused(
    name: str, value: str, outcome: Any
) -> None:
    if outcome == REFUSED:
        with pytest.raises(SettingsError, match=f"^--{name}={value[:4]}".replace("*", r"\*")):
            choose({name: [value]})
        return
    chosen = choose({name: [value]})
    if outcome == IGNORED:
        assert chosen.overrides == {}
        assert len(chosen.notes) == 1
        assert chosen.notes[0].startswith(f"--{name}={value} has no effect: ")
        return
    path, expected = outcome
    assert setting(read_settings(None, chosen.overrides), path) == expected


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("grpc-port", "http", "--grpc-port=http: give it as a whole number"),
        ("exit-on-error", "yes", "--exit-on-error=yes: give it as true or false"),
        ("log-format", "xml", "--log-format=xml: give it as one of default, ISO8601"),
        ("grpc-address", "host:1", "--grpc-address=host:1: the port has a flag of its own"),
        ("rate-limit-resource", "R1", "give it as <resource>:<count>"),
        ("rate-limit-resource", "R1:1:2:3", "give it as <resource>:<count>"),
        ("backend-config", ",a=b", "give it as <name>,<setting>=<value>"),
        ("backend-config", "tensorrt,plugins", "give it as <name>,<setting>=<value>"),
        ("cache-config", "local,size=big", "give it as a whole number"),
        ("trace-config", "level=LOUD", "give it as OFF or TIMESTAMPS"),
        ("trace-config", "colour=red", "its settings are level, rate, count"),
        ("reuse-http-port", "true", "would take half the requests"),
    ],
)
def test_a_value_that_is_none_is_refused_with_the_right_form(
    name: str, value: str, says: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        choose({name: [value]})
    assert says in str(caught.value)


def test_a_secret_on_the_command_line_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as caught:
        choose({"grpc-restricted-protocol": ["health:secret"]})
    assert str(caught.value).startswith("--grpc-restricted-protocol: give it as <protocol>")
    assert "secret" not in str(caught.value)


def test_flags_that_may_be_repeated_add_up_in_order_and_others_take_the_last() -> None:
    chosen = choose(
        {"model-repository": ["b", "a", "b"], "model-store": ["c"], "grpc-port": ["1", "2"]}
    )
    assert chosen.overrides == {"repository": {"paths": ["b", "a", "c"]}, "grpc": {"port": 2}}


def test_a_deprecated_flag_is_logged_and_gives_way_to_its_successor() -> None:
    chosen = choose({"disable-auto-complete-config": ["true"], "strict-model-config": ["false"]})
    assert chosen.overrides == {"repository": {"auto_complete": False}}
    assert chosen.notes == [
        "--strict-model-config is deprecated: true is --disable-auto-complete-config"
    ]
    chosen = choose({"trace-rate": ["5"], "trace-config": ["rate=6"]})
    assert chosen.overrides == {"trace": {"rate": 6}}


def test_two_sizes_of_the_cache_are_tritons_error() -> None:
    with pytest.raises(SettingsError, match="Incompatible flags --response-cache-byte-size"):
        choose({"response-cache-byte-size": ["1"], "cache-config": ["local,size=2"]})


def test_an_unknown_flag_names_the_nearest() -> None:
    known = [f"--{flag.name}" for flag in FLAGS]
    assert nearest(["--model-repo=/m"], known).endswith("did you mean --model-repository?")
    assert nearest(["8001"], known) == "unknown argument 8001"


@given(st.sampled_from(FLAGS), st.text(max_size=30))
def test_whatever_stands_behind_a_flag_it_is_set_or_logged_or_refused_in_words(
    flag: Any, value: str
) -> None:
    try:
        chosen = choose({flag.name: [value]})
    except SettingsError as error:
        assert str(error).startswith(f"--{flag.name}")  # noqa: PT017
    else:
        assert chosen.overrides or chosen.notes
