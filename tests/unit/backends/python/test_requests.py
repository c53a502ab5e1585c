"""Requests and responses that a model makes: what it has to give, and the errors of what is
wrong."""

from __future__ import annotations

import json
import os
import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.backends.python import pb_utils
from edge_server.backends.python.link import here
from edge_server.backends.python.pb_utils.requests import (
    InferenceRequest,
    InferenceResponse,
    ResponseIterator,
)
from edge_server.backends.python.pb_utils.tensor import PbTensor, TritonModelException

NEEDED: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "other"}


def test_a_request_carries_what_it_was_made_with() -> None:
    tensor = PbTensor("x", np.zeros(1, np.int32))
    request = InferenceRequest("r", 7, [tensor], ["y"], "other", parameters={"gain": 1.5})
    assert request.inputs() == [tensor]
    assert (request.request_id(), request.correlation_id()) == ("r", 7)
    assert request.requested_output_names() == ["y"]
    assert json.loads(request.parameters()) == {"gain": 1.5}


@pytest.mark.parametrize("name", NEEDED)
def test_what_triton_requires_is_required(name: str) -> None:
    fields = {each: value for each, value in NEEDED.items() if each != name}
    for left_out in (fields, fields | {name: None}):
        with pytest.raises(
            TypeError, match="requires inputs, requested_output_names and model_name"
        ):
            InferenceRequest(**left_out)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("inputs", [5], "inputs must be Tensor objects"),
        ("requested_output_names", [5], "must be a str"),
        ("requested_output_names", [None], "must be a str"),
        ("model_name", 5, "model_name must be a str"),
        ("request_id", 5, "request_id must be a str"),
        ("request_id", None, "request_id must be a str"),
        ("correlation_id", None, "cannot be interpreted as an integer"),
        ("correlation_id", 2**64, "correlation_id must fit 64 bits"),
        ("model_version", "1", "model_version must be an int"),
        ("model_version", None, "model_version must be an int"),
        ("flags", None, "flags must be an int"),
        ("timeout", 1.5, "timeout must be an int"),
    ],
)
def test_a_value_of_another_type_is_a_type_error(name: str, value: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        InferenceRequest(**(NEEDED | {name: value}))


def test_an_input_that_is_none_is_refused_in_tritons_words() -> None:
    with pytest.raises(TritonModelException, match="with id '' and model name 'other' should not"):
        InferenceRequest(**(NEEDED | {"inputs": [None]}))


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ([], "got <class 'list'>"),
        ("gain", "got <class 'str'>"),
        ({1: "int key"}, "Expect parameters keys to have type str, found type <class 'int'>"),
        ({"null": None}, "Expect parameters values .*, found type <class 'NoneType'>"),
        ({"list": ["v"]}, "Expect parameters values .*, found type <class 'list'>"),
    ],
)
def test_parameters_of_a_response_are_a_dict_of_plain_values(parameters: Any, text: str) -> None:
    with pytest.raises(TritonModelException, match=text):
        InferenceResponse([], parameters=parameters)
    assert InferenceResponse([], parameters=None).parameters() == "{}"


def iterator(count: int) -> ResponseIterator:
    """Over `count` responses, which have all come."""
    responses: queue.SimpleQueue[tuple[InferenceResponse, bool]] = queue.SimpleQueue()
    for number in range(count):
        response = InferenceResponse([], parameters={"number": number})
        responses.put((response, number == count - 1))
    link: Any = SimpleNamespace()
    return ResponseIterator(link, 1, responses)


def rest(responses: ResponseIterator) -> list[int]:
    return [json.loads(response.parameters())["number"] for response in responses]


def test_a_loop_over_responses_goes_on_where_the_last_one_ended() -> None:
    responses = iterator(5)
    next(responses)
    assert rest(responses) == [1, 2, 3, 4]
    with pytest.raises(StopIteration):
        next(responses)
    assert rest(responses) == [0, 1, 2, 3, 4]
    for response in responses:
        if "1" in response.parameters():
            break
    next(responses)
    assert rest(responses) == [3, 4]
    assert rest(responses) == [0, 1, 2, 3, 4]


def test_more_responses_than_are_kept_can_be_read_once() -> None:
    responses = iterator(65)
    assert rest(responses) == list(range(65))
    with pytest.raises(TritonModelException, match="more than 64 responses"):
        rest(responses)


def test_a_process_that_the_model_started_is_refused_what_needs_a_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(here, "link", SimpleNamespace(pid=os.getpid() + 1, executing=True))
    with pytest.raises(RuntimeError, match="in the model's own process only"):
        InferenceRequest(**NEEDED).exec()
    with pytest.raises(RuntimeError, match="in the model's own process only"):
        pb_utils.MetricFamily("frames", "", "counter")
    with pytest.raises(RuntimeError, match="in the model's own process only"):
        pb_utils.load_model("other")
