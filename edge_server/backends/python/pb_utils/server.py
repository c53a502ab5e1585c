"""What a model gets from the daemon: log lines, metrics, the load of other models; and
`pb_utils.ModelConfig`, which `auto_complete_config` may complete. Texts are Triton's."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Mapping
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from edge_server.backends.python import messages as m
from edge_server.backends.python.link import daemon, replying_daemon
from edge_server.backends.python.pb_utils.tensor import TritonModelException, printable, text
from edge_server.backends.python.shared_memory import ArenaFull, pack_for_daemon, take_back
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.python.shared_memory import Content

Kind = Literal["counter", "gauge", "histogram"]
_KINDS = get_args(Kind)
_NO_FAMILY = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The "
    "'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been "
    "deleted."
)


class LogLevel(IntEnum):
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    VERBOSE = logging.DEBUG


def _log(message: str, level: LogLevel = LogLevel.INFO) -> None:
    if not isinstance(level, LogLevel):
        raise TypeError(f"level must be a level of Logger, found type '{type(level)}'")
    daemon().send(m.LogLine(int(level), printable(text(message, "message"))))


class Logger:
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    log = staticmethod(_log)
    log_info = staticmethod(partial(_log, level=INFO))
    log_warn = staticmethod(partial(_log, level=WARNING))
    log_error = staticmethod(partial(_log, level=ERROR))
    log_verbose = staticmethod(partial(_log, level=VERBOSE))


class MetricFamily:
    """Metrics of one name that differ in their labels. The daemon keeps the values, which survive
    this process."""

    COUNTER: Kind = "counter"
    GAUGE: Kind = "gauge"
    HISTOGRAM: Kind = "histogram"

    def __init__(
        self, name: str | None = None, description: str | None = None, kind: Kind | None = None
    ) -> None:
        if kind not in _KINDS:
            raise TypeError(f"a metric is of no kind {kind!r}; kinds: {', '.join(_KINDS)}")
        self._family = m.MakeFamily(
            text(name, "name"), text(description, "description"), cast("Kind", kind)
        )
        _query(self._family)

    def Metric(  # noqa: N802 - Triton's name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric with these labels; equal labels share one metric. As in Triton it
        serves only as long as the model keeps this family. `buckets`: ascending upper bounds, of a
        histogram only."""
        kind = self._family.kind
        if buckets is None if kind == "histogram" else buckets:
            raise TritonModelException(
                "Histogram requires buckets, and no other kind of metric takes them."
            )
        if not isinstance(labels or {}, Mapping):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        texts = {text(k, "label"): text(v, "label's value") for k, v in (labels or {}).items()}
        bounds = [float(bound) for bound in buckets or ()]
        number = int(_query(m.MakeMetric(self._family, texts, bounds)))
        return Metric(number, kind, weakref.ref(self))


class Metric:
    def __init__(self, number: int, kind: Kind, family: weakref.ref[MetricFamily]) -> None:
        self._number = number
        self._kind = kind
        self._family = family

    def increment(self, value: float) -> None:
        if self._kind == "histogram" or (self._kind == "counter" and float(value) < 0):
            raise TritonModelException(f"a {self._kind} cannot be incremented by {value}")
        self._change("increment", value)

    def set(self, value: float) -> None:
        if self._kind != "gauge":
            raise TritonModelException(f"a {self._kind} cannot be set")
        self._change("set", value)

    def observe(self, value: float) -> None:
        if self._kind != "histogram":
            raise TritonModelException(f"a {self._kind} cannot observe")
        self._change("observe", value)

    def _change(self, action: Literal["increment", "set", "observe"], value: float) -> None:
        self._check_family()
        daemon().send(m.ChangeMetric(self._number, action, float(value)))

    def _check_family(self) -> None:
        if self._family() is None:
            raise TritonModelException(_NO_FAMILY)

    def value(self) -> float:
        self._check_family()
        if self._kind == "histogram":
            raise TritonModelException("a histogram has no single value")
        return _query(m.ReadMetric(self._number))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    name, version = text(model_name, "model_name"), text(model_version, "model_version")
    _check_may_load("is_model_ready")
    return bool(_query(m.IsModelReady(name, version)))


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model; return when the load is complete. See `ServerContext.load`. Raises
    TritonModelException where it failed, or is not possible here."""
    name, override = text(model_name, "model_name"), text(config, "config")
    link = replying_daemon()
    contents = _contents(name, files)
    _check_may_load("load_model")
    try:
        places = pack_for_daemon(contents, link.outbox)
    except ArenaFull as error:
        raise TritonModelException(
            f"the files for model '{name}': {error}; parameter 'shared_memory_limit_mib' allows "
            "more"
        ) from None
    try:
        _query(m.LoadModel(name, override, places))
    except TritonModelException:
        # The daemon has received the places.
        raise
    except BaseException:
        take_back(places, link.outbox)
        raise


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Stop new requests to a model; return at once, requests in flight finish."""
    name = text(model_name, "model_name")
    _check_may_load("unload_model")
    _query(m.UnloadModel(name, bool(unload_dependents)))


def _check_may_load(function: str) -> None:
    if not daemon().may_load:
        raise TritonModelException(
            f"{function} works in 'initialize' and 'execute', not in 'auto_complete_config' and "
            "'finalize'"
        )


def _query(what: m.Question) -> float:
    result = replying_daemon().query(what)
    if result.failure:
        raise TritonModelException(result.failure)
    return result.value


def _contents(model_name: str, files: Any) -> list[Content]:
    if files is None:
        return []
    if not isinstance(files, dict):
        # Triton's text.
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and "
            "file contents"
        )
    contents: list[Content] = []
    for key, content in files.items():
        path = text(key, "a key of files")
        if not isinstance(content, bytes):
            raise TypeError(f"files['{path}'] must be bytes, found type '{type(content)}'")
        contents.append((path, DataType.UINT8, np.frombuffer(content, np.uint8)))
    return contents


_PROPERTIES = {
    "input": ("name", "data_type", "dims", "optional"),
    "output": ("name", "data_type", "dims"),
}


class AutoCompleteConfig:
    """`pb_utils.ModelConfig`: a configuration as a dict, in Triton's JSON form, with Triton's rules
    for its completion."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but {self._where} specified "
                f"max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        for choice in ("sequence_batching", "ensemble_scheduling"):
            if choice in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{choice}', but "
                    f"{self._where[3:]} tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, tensor: dict[str, Any]) -> None:
        self._add("input", tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        self._add("output", tensor)

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        if set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(
                f"model transaction property {self._where} contains property other than "
                "'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.setdefault("decoupled", decoupled) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model "
                f"'{self._name}', which is already set to '{policy['decoupled']}'."
            )

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    @property
    def _where(self) -> str:
        return f"in auto-complete-config function for model '{self._name}'"

    def _add(self, kind: str, tensor: dict[str, Any]) -> None:
        *names, last = _PROPERTIES[kind]
        if set(tensor) - {*names, last}:
            listed = ", ".join(f"'{name}'" for name in names)
            raise ValueError(
                f"{kind} '{tensor.get('name', '')}' {self._where} contains property other than "
                f"{listed} and '{last}'."
            )
        if "name" not in tensor:
            raise ValueError(f"{kind} {self._where} is missing 'name' property.")
        for required in ("data_type", "dims"):
            if required not in tensor:
                raise ValueError(
                    f"{kind} '{tensor['name']}' {self._where} is missing '{required}' property."
                )
        for configured in self._model_config.setdefault(kind, []):
            if configured["name"] == tensor["name"]:
                self._agree(kind, configured, tensor)
                return
        self._model_config[kind].append(dict(tensor))

    def _agree(self, kind: str, configured: dict[str, Any], tensor: dict[str, Any]) -> None:
        where = f"model '{self._name}', tensor '{tensor['name']}': the model expects"
        datatype = configured.get("data_type", "TYPE_INVALID")
        if datatype not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {datatype} "
                f"for {kind} '{tensor['name']}', model provides {tensor['data_type']}"
            )
        dims = [int(dim) for dim in configured.get("dims", [])]
        if dims and dims != list(tensor["dims"]):
            raise ValueError(
                f"{where} dims {tensor['dims']} but the model configuration specifies dims {dims}"
            )
        optional = configured.get("optional", False)
        if "optional" in tensor and optional and optional != tensor["optional"]:
            raise ValueError(
                f"{where} optional {tensor['optional']} but the model configuration specifies "
                f"optional {optional}"
            )
        configured.update(tensor)
