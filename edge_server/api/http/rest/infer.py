"""Inference: a body becomes a request, and a response the parts of an answer; and generate, whose
body is a flat JSON object of inputs and parameters, and whose answer is a flat one, or many."""

from __future__ import annotations

import asyncio
import math
import threading
import zlib
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.admission import COUNTED_FROM_BYTES, PART_BYTES, WINDOW_BITS, decompress
from edge_server.api.calls import HTTP, http_status, traced
from edge_server.api.contents import to_raw
from edge_server.api.convert import TopClasses, to_infer_request
from edge_server.api.http.rest import json_fields as fields
from edge_server.api.http.rest.api import JSON, Answer
from edge_server.api.http.rest.infer_request import (
    Wanted,
    json_length,
    json_request,
    raw_request,
    set_parameter,
    to_json,
    to_raw_contents,
)
from edge_server.api.shared_memory import RegionSlice
from edge_server.errors import (
    EdgeServerError,
    InternalError,
    InvalidRequest,
    Unavailable,
    Unsupported,
    forget_frames,
)
from edge_server.process.text import as_utf8

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from edge_server.api.convert import OutputForm
    from edge_server.api.http.call import HttpCall
    from edge_server.api.http.rest.api import RestApi, RestCall
    from edge_server.inference.registry import Lease
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, InferResponse, ResponseCallback
    from edge_server.tensors import TensorSpec


_FASTEST = 1
# A control character, which JSON escapes, stands for an array that is written in parts.
_MARK = b"\0"
WRITTEN_APART = msgspec.Raw(_MARK)


def infer(api: RestApi, call: RestCall) -> Answer:
    """Run a model: the request is in the body.

    Raises:
        EdgeServerError: it is refused, or the model failed.
    """
    with api.gate, api.calls.data_plane.lease() as snapshot:
        loaded = snapshot.find(call.model, call.version)
        config = loaded.config
        if config.decoupled:
            raise Unsupported(
                "HTTP end point doesn't support models with decoupled transaction policy"
            )
        body = decompressed(api, call)
        length = json_length(call.headers, len(body))
        if length:
            message, raw, wanted = json_request(
                call.model, call.version, body, length, call.connection
            )
        else:
            message, raw = raw_request(call.model, call.version, config, body)
            wanted = Wanted(others_binary=True)
        request, forms = to_infer_request(
            message,
            raw,
            config,
            call=call.connection,
            shared_memory=api.calls.shared_memory,
        )
        request = api.forwarding.add(request, call.headers.items())
        if api.calls.tracer.on:
            times, headers = call.connection, call.headers.items
            reading_ns = (times.began_ns, times.read_ns)
            request = traced(
                api.calls.tracer, request, HTTP, reading_ns, headers, when_over=times.when_answered
            )
        response = snapshot.run(loaded, request)
        api.calls.requests.responded("http", config.name, call.connection.read_ns)
    answer = to_answer(response, forms, wanted, call.connection)
    if request.trace is not None:
        request.trace.mark(HTTP.send_start)
    return compressed(answer, call.headers.get("accept-encoding", ""))


def decompressed(api: RestApi, call: RestCall) -> memoryview:
    """Return the body as it was before the client compressed it, see `decompress`."""
    encoding = call.headers.get("content-encoding", "")
    if encoding in ("", "identity"):
        return call.body
    if encoding not in WINDOW_BITS:
        raise Unsupported("Unsupported compression type")
    whole = decompress(
        call.body, encoding, api.longest_bytes, call.connection, "http.max_body_bytes"
    )
    return memoryview(whole)


def to_answer(
    response: InferResponse, forms: Mapping[str, OutputForm], wanted: Wanted, call: HttpCall
) -> Answer:
    """Return the answer with JSON and, behind it, the outputs wanted as binary data: views.

    Raises:
        InvalidRequest, InternalError: an output does not travel in the wanted form.
        Unavailable: there is no room for the answer.
    """
    outputs: list[dict[str, Any]] = []
    written: list[list[bytes]] = []
    binary: list[bytes | memoryview] = []
    for name, tensor in response.outputs.items():
        form = forms.get(name)
        value = form.of(tensor) if isinstance(form, TopClasses) else tensor
        array = value.array
        output: dict[str, Any] = {
            "name": name,
            "datatype": value.datatype.value,
            "shape": list(array.shape),
        }
        if isinstance(form, RegionSlice):
            # Without parameters, as Triton: its C++ client takes any for those of binary data.
            form.write(name, memoryview(to_raw(array)))
        elif wanted.is_binary(name):
            raw = to_raw(array)
            output["parameters"] = {"binary_data_size": len(raw)}
            if len(raw):
                binary.append(raw)
        else:
            output["data"] = WRITTEN_APART
            written.append(to_json(name, array, value.datatype, call))
        outputs.append(output)
    message: dict[str, Any] = {"id": response.id} if response.id else {}
    message |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        message["parameters"] = dict(response.parameters)
    text = with_data(msgspec.json.encode(message | {"outputs": outputs}), written)
    call.count_answer(sum(len(part) for part in binary))
    if not binary:
        return Answer(200, JSON, text)
    headers = (
        ("content-type", "application/octet-stream"),
        ("inference-header-content-length", str(sum(len(part) for part in text))),
    )
    return Answer(200, headers, (*text, *binary))


def with_data(message: bytes, written: list[list[bytes]]) -> list[bytes]:
    """Return the parts of JSON in which each `WRITTEN_APART` is an array; small ones joined."""
    between = message.split(_MARK)
    parts = [between[0]]
    for data, after in zip(written, between[1:], strict=True):
        parts += (b"[", *data, b"]", after)
    return parts if any(len(data) > 1 for data in written) else [b"".join(parts)]


def compressed(answer: Answer, accepts: str) -> Answer:
    """Return the answer as the client accepts it: compressed where that is all it accepts, or where
    it is JSON. Tensors gain little and cost much, and some clients name gzip at every request."""
    encoding = _wanted_encoding(accepts)
    only = "," not in accepts
    if encoding not in WINDOW_BITS or not (only or answer.headers == JSON):
        return answer
    writer = zlib.compressobj(_FASTEST, wbits=WINDOW_BITS[encoding])
    parts = [
        writer.compress(memoryview(part)[start : start + PART_BYTES])
        for part in answer.parts
        for start in range(0, len(part), PART_BYTES)
    ]
    headers = (*answer.headers, ("content-encoding", encoding))
    return Answer(answer.status, headers, (b"".join([*parts, writer.flush()]),))


def _wanted_encoding(accepts: str) -> str:
    """Return the encoding of the highest weight, the first of equals."""
    best, most = "identity", 0.0
    for each in accepts.split(","):
        name, _, weight = each.strip().partition(";q=")
        try:
            weighs = float(weight) if weight else 1.0
        except ValueError:
            continue
        if name in ("identity", *WINDOW_BITS) and weighs > most:
            best, most = name, weighs
    return best


def error_answer(status: int, text: str) -> Answer:
    return Answer(status, JSON, (msgspec.json.encode({"error": text}),))


# Responses that wait for a client; then the model waits, for so long at most.
_MOST_WAITING = 16
_SLOW_READER_S = 10.0


class GeneratedResponses:
    """The responses to one request, passed from the model's threads to the event loop.

    A model waits while `_MOST_WAITING` are not sent; after `_SLOW_READER_S` an error is the last
    response. What the model responds then, or after `end`, is dropped, and its request cancelled.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: HttpCall) -> None:
        self._loop = loop
        self._call = call
        self._sent_bytes = 0  # counted of the response that was taken last
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._over = False
        self._complete = False
        self._came = asyncio.Event()
        self._begun: asyncio.Task[None]

    def begin(self, submitting: Coroutine[Any, Any, None]) -> None:
        """Run what submits the request: it may return only when the model does, which waits for its
        responses to be taken. What it raises, `next` raises."""
        self._begun = self._loop.create_task(submitting)
        self._begun.add_done_callback(self._submitted)

    def _submitted(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # is looked at, even where nobody waits any more
        self._came.set()

    def respond(self, response: ResponseCallback, final: bool) -> None:
        """See `Respond`."""
        written = None if response is None else self._counted(_written(response))
        with self._changed:
            in_time = written is None or self._changed.wait_for(
                lambda: self._over or len(self._waiting) < _MOST_WAITING, _SLOW_READER_S
            )
            if not in_time:
                # Nobody would notice that one is missing among the others.
                self._waiting.append(_written(_too_slow()))
                self._over = self._complete = True
            elif written is not None and not self._over:
                self._waiting.append(written)
            self._complete = self._complete or final
        if not in_time:
            self._call.cancel()
        with suppress(RuntimeError):  # the server has stopped, and nobody waits any more
            self._loop.call_soon_threadsafe(self._came.set)

    def _counted(self, written: tuple[int, bytes]) -> tuple[int, bytes]:
        """Count a long response until it is sent; where it does not fit, return the error."""
        if len(written[1]) >= COUNTED_FROM_BYTES:
            try:
                self._call.count(len(written[1]))
            except Unavailable as error:
                return _written(error)
        return written

    def end(self) -> None:
        """The client gets no more: let no model wait, or go on."""
        with self._changed:
            self._over = True
            is_complete = self._complete
            self._changed.notify_all()
        if not is_complete:
            self._call.cancel()

    async def next(self) -> tuple[int, bytes] | None:
        """Return status and JSON of the next response; None after the last."""
        while True:
            self._came.clear()
            with self._changed:
                if self._waiting:
                    self._changed.notify_all()
                    taken = self._waiting.popleft()
                    self._call.give(self._sent_bytes)
                    size_bytes = len(taken[1])
                    self._sent_bytes = size_bytes if size_bytes >= COUNTED_FROM_BYTES else 0
                    return taken
                if self._complete:
                    return None
            if self._begun.done():
                self._begun.result()
            await self._came.wait()


def start(api: RestApi, call: RestCall, responses: GeneratedResponses) -> None:
    """Submit the request in the body; `responses` gets what comes of it.

    Raises:
        EdgeServerError: the request is refused.
    """
    with api.gate:
        lease = api.calls.data_plane.lease()
        try:
            request = _read(api, call, lease)
        except BaseException:
            lease.release()
            raise
        call.connection.when_cancelled(responses.end)
        respond = api.calls.requests.timed(
            "http", request.model_name, responses.respond, lambda error: str(http_status(error))
        )
        api.calls.data_plane.submit(request, respond, lease)


def _read(api: RestApi, call: RestCall, lease: Lease) -> InferRequest:
    loaded = lease.snapshot.find(call.model, call.version)
    if call.headers.get("content-encoding", "") not in ("", "identity"):
        raise InvalidRequest("Unsupported content-encoding, only 'identity' is supported.")
    message, raw = generate_request(
        call.model, call.version, loaded.config, fields.read_json(call.body, call.connection)
    )
    request, _ = to_infer_request(message, raw, loaded.config, call=call.connection)
    return api.forwarding.add(request, call.headers.items())


def generate_request(
    model: str, version: str, config: ModelConfig, given: dict[str, Any]
) -> tuple[Any, list[bytes | memoryview]]:
    """Return the message of a generate request, and its raw contents.

    A key that names an input is that input, a value or a list of them; `id` is the request's; every
    other key is a parameter, also those in `parameters`. Errors have Triton's texts and status.
    """
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    inputs = {spec.name: spec for spec in config.inputs}
    raw: list[bytes | memoryview] = []
    if "parameters" in inputs:
        raise InvalidRequest(
            "Keyword: 'parameters' for nested schema also given as input tensor name"
        )
    nested = fields.field(given, "parameters", dict, default={})
    for key, value in [*given.items(), *nested.items()]:
        if key == "parameters":
            continue
        if key in inputs:
            raw.append(_add_input(message, inputs[key], config, value))
        elif key == "id" and isinstance(value, str):
            message.id = value
        else:
            set_parameter(message.parameters, key, value)
    return message, raw


def _add_input(
    message: Any, spec: TensorSpec, config: ModelConfig, value: Any
) -> bytes | memoryview:
    count = len(value) if isinstance(value, list) else 1
    shape = list(config.full_shape(spec))
    fixed = math.prod(dim for dim in shape if dim != -1)
    left, rest = divmod(count, fixed) if fixed else (0, 1)
    if rest == 0:
        # The innermost dimension that is free takes all, and the others are 1.
        for place in reversed(range(len(shape))):
            if shape[place] == -1:
                shape[place], left = left, 1
    if rest or left != 1:
        raise InvalidRequest(
            f"The schema can not convert input '{spec.name}' to tensor with proper shape"
        )
    message.inputs.add(name=spec.name, datatype=spec.datatype.value, shape=shape)
    return to_raw_contents(spec.name, spec.datatype, count, value)


def _written(response: InferResponse | EdgeServerError) -> tuple[int, bytes]:
    if not isinstance(response, EdgeServerError):
        try:
            return 200, _flat(response)
        except EdgeServerError as error:
            response = error
    answer = error_answer(http_status(response), as_utf8(str(response)))
    forget_frames(response)
    return answer.status, bytes(answer.parts[0])


def _too_slow() -> Unavailable:
    return Unavailable(
        f"no response was read for {_SLOW_READER_S:g} s while {_MOST_WAITING} waited"
    )


def _flat(response: InferResponse) -> bytes:
    """Return a response as one flat object; a tensor of one element is that element."""
    made: dict[str, Any] = {"id": response.id} if response.id else {}
    made |= {"model_name": response.model_name, "model_version": response.model_version}
    made |= response.parameters
    for name, tensor in response.outputs.items():
        data = b"".join(to_json(name, tensor.array, tensor.datatype))
        made[name] = msgspec.Raw(data if tensor.array.size == 1 else b"[" + data + b"]")
    return msgspec.json.encode({name: made[name] for name in sorted(made)})


NOT_ONE = InternalError(
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)
