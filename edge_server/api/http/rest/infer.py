"""Inference: a body becomes a request, and a response the parts of an answer."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.api.admission import PART_BYTES, WINDOW_BITS, decompress
from edge_server.api.calls import HTTP, traced
from edge_server.api.contents import to_raw
from edge_server.api.convert import TopClasses, to_infer_request
from edge_server.api.http.rest.api import JSON, Answer
from edge_server.api.http.rest.infer_request import (
    Wanted,
    json_length,
    json_request,
    raw_request,
    to_json,
)
from edge_server.api.shared_memory import RegionSlice
from edge_server.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.api.convert import OutputForm
    from edge_server.api.http.call import HttpCall
    from edge_server.api.http.rest.api import RestApi, RestCall
    from edge_server.requests import InferResponse

_FASTEST = 1
# A control character, which JSON escapes, stands for an array that is written in parts.
_MARK = b"\0"
WRITTEN_APART = msgspec.Raw(_MARK)


def infer(api: RestApi, call: RestCall) -> Answer:
    """Run a model: the request is in the body.

    Raises:
        EdgeServerError: it is refused, or the model failed.
    """
    with api.gate, api.data_plane.lease() as snapshot:
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
            message, raw, None, call.connection, api.shared_memory, config=config
        )
        request = api.forwarding.add(request, call.headers.items())
        if api.tracer.on:
            times, headers = call.connection, call.headers.items
            reading_ns = (times.began_ns, times.read_ns)
            request = traced(
                api.tracer, request, HTTP, reading_ns, headers, when_over=times.when_answered
            )
        response = snapshot.run(loaded, request)
        api.requests.responded("http", config.name, call.connection.read_ns)
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
