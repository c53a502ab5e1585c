"""Run `model.py` from import to `finalize`, and check its return values."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.backends.python.channel import MessageTooLong
from edge_server.backends.python.child.errors import TritonModelException
from edge_server.backends.python.child.given import printable
from edge_server.backends.python.child.inference import InferenceRequest
from edge_server.backends.python.child.link import here
from edge_server.backends.python.child.logger import Logger
from edge_server.backends.python.child.model_config import ModelConfig
from edge_server.backends.python.child.response import InferenceResponse
from edge_server.backends.python.codes import Code
from edge_server.backends.python.messages import (
    Answered,
    AskReady,
    ChildError,
    ChildResponse,
    Execute,
    Executed,
    Finish,
    ReadyIs,
    Start,
    Started,
)
from edge_server.backends.python.packing import take_back

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures
    from collections.abc import Sequence

    from edge_server.backends.python.child.link import DaemonLink

_CLASS = "TritonPythonModel"
_READY_S = 5.0
# Frames of this directory are C++ in Triton: tracebacks leave them out.
_OURS = str(Path(__file__).parent)
_MAY_BE_OPENED = (
    "; in its sandbox a model reads its own directory and the system's, and writes to its "
    "temporary one; [python] readable and writable of the daemon's settings open more"
)


class _Refused(Exception):
    """The return value of `execute` is invalid; the text is Triton's."""


class ModelRunner:
    """Processes the daemon's messages in order, on the main thread.

    Args:
        name: of the instance.
        link: to the daemon.
        refused: why no model may run in this process; empty where one may.
    """

    def __init__(self, name: str, link: DaemonLink, refused: str = "") -> None:
        self._name = name
        self._refused = refused
        self._in_sandbox = False
        self._link = link
        self._model: Any = None
        self._decoupled = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Process messages until `Finish`.

        Raises:
            ChannelClosed: the daemon is gone.
        """
        while True:
            message = self._link.work.get()
            if isinstance(message, Execute):
                self._execute(message)
            elif isinstance(message, AskReady):
                self._link.send(ReadyIs(self._ready()))
            elif isinstance(message, Start):
                self._send_started(self._start(message))
            elif isinstance(message, Finish):
                self._finish()
                return

    def _send_started(self, started: Started) -> None:
        try:
            self._link.send(started)
        except MessageTooLong as error:
            self._link.send(Started(failure=f"auto_complete_config: {error}"))

    def _start(self, start: Start) -> Started:
        if self._refused:
            return Started(failure=self._refused)
        self._in_sandbox = start.rules.closed
        self._decoupled = start.decoupled
        try:
            model_class = getattr(self._import(start), _CLASS)
            if start.complete:
                return Started(completed=_completed(model_class, start.arguments["model_config"]))
            self._link.may_load = True
            self._model = model_class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(start.arguments)
        except BaseException as error:  # noqa: BLE001 - the model may raise any exception
            return Started(failure=self._text_of(error))
        if not hasattr(self._model, "execute"):
            return Started(failure=f"class {_CLASS} has no method 'execute'")
        return Started(asks_ready=hasattr(self._model, "is_ready"))

    def _import(self, start: Start) -> Any:
        """Import the model's module, as part of the package formed by its version directory."""
        os.chdir(start.working_directory)
        version_directory = Path(start.directory)
        here.model_directory = start.directory
        sys.path += [str(version_directory), str(version_directory.parent)]
        return importlib.import_module(f"{version_directory.name}.{Path(start.filename).stem}")

    def _execute(self, message: Execute) -> None:
        link = self._link
        requests = [
            InferenceRequest.of(asked, link, decoupled=self._decoupled)
            for asked in message.requests
        ]
        numbers = [asked.number for asked in message.requests]
        failure = ""
        answers: list[Answered] = []
        link.executing = True
        began_ns = time.monotonic_ns()
        try:
            returned = self._model.execute(requests)
            if isinstance(returned, Coroutine) and self._decoupled:
                self._run_on(returned, numbers)
                execute_ns = time.monotonic_ns() - began_ns
            else:
                if isinstance(returned, Coroutine):
                    returned = self._run(returned).result()
                execute_ns = time.monotonic_ns() - began_ns
                answers = self._answers(requests, returned)
        except BaseException as error:  # noqa: BLE001 - the model may raise any exception
            execute_ns = time.monotonic_ns() - began_ns
            failure = self._failure(error)
            for number in numbers:
                link.answered(number)
        finally:
            link.executing = False
        # A faulty model may keep the traceback, and with it the inputs, for long.
        del requests
        try:
            link.send(Executed(message.batch, execute_ns, failure, answers))
        except MessageTooLong as error:
            for answered in answers:
                take_back(answered.answer.outputs if answered.answer else (), link.outbox)
            link.send(Executed(message.batch, execute_ns, self._failure(error)))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Start the coroutine on the model's event loop, which has its own thread."""
        import asyncio  # noqa: PLC0415 - a third of this process's start time

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._loop.run_forever, name="asyncio", daemon=True)
            thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run_on(self, execution: Coroutine[Any, Any, Any], numbers: Sequence[int]) -> None:
        """Let a decoupled execution continue; if it fails, its unfinished requests get the
        failure."""

        def answer_failed(done: concurrent.futures.Future[Any]) -> None:
            try:
                done.result()
            except BaseException as error:  # noqa: BLE001 - the model may raise any exception
                answer = ChildResponse(failure=ChildError(Code.INTERNAL, self._failure(error)))
            else:
                return
            for number in numbers:
                if number in self._link.unanswered:
                    self._link.answered(number)
                    self._link.send(Answered(number, answer, final=True))

        self._run(execution).add_done_callback(answer_failed)

    def _answers(self, requests: Sequence[InferenceRequest], returned: Any) -> list[Answered]:
        """Return the responses that `execute` returned; the error texts are Triton's.

        Raises:
            _Refused: the return value is invalid.
        """
        if returned is None:
            returned = [None] * len(requests)
        elif self._decoupled:
            raise _Refused(
                f"Python model '{self._name}' is using the decoupled mode and the execute "
                "function must return None."
            )
        if not isinstance(returned, list):
            raise _Refused(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise _Refused(
                "Number of InferenceResponse objects do not match the number of InferenceRequest "
                f"objects. InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) "
                f"size is:{len(returned)}\n"
            )
        for response in returned:
            if response is not None and not isinstance(response, InferenceResponse):
                raise _Refused(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
        answers = [
            request.last_answer(response)
            for request, response in zip(requests, returned, strict=True)
        ]
        return [answer for answer in answers if answer is not None]

    def _failure(self, error: BaseException) -> str:
        text = str(error) if isinstance(error, _Refused) else self._text_of(error)
        return f"Failed to process the request(s) for model '{self._name}', message: {text}"

    def _ready(self) -> bool:
        try:
            ready = self._model.is_ready()
            if isinstance(ready, Coroutine):
                ready = self._run(ready).result(_READY_S)
        except Exception as error:  # noqa: BLE001 - a model whose `is_ready` fails is not ready
            Logger.log_warn(f"is_ready: {self._text_of(error)}")
            return False
        return bool(ready)

    def _finish(self) -> None:
        self._link.may_load = False
        if not hasattr(self._model, "finalize"):
            return
        try:
            self._model.finalize()
        except BaseException as error:  # noqa: BLE001 - the process ends in any case
            Logger.log_warn(f"finalize: {self._text_of(error)}")

    def _text_of(self, error: BaseException) -> str:
        """Return type, message and traceback, innermost frame first, in Triton's format."""
        frames = [
            frame
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if not frame.filename.startswith((_OURS, "<frozen "))
        ]
        at = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in frames)
        said = f"{type(error).__name__}: {printable(error)}"
        if self._in_sandbox and isinstance(error, PermissionError):
            said += _MAY_BE_OPENED
        return said + (f"\n\nAt:\n{printable(at)}" if at else "")


def _completed(model_class: Any, model_config: str) -> str:
    """Return the configuration after `auto_complete_config`, as JSON; empty where the model
    lacks that function."""
    if not hasattr(model_class, "auto_complete_config"):
        return ""
    completed = model_class.auto_complete_config(ModelConfig(model_config))
    if not isinstance(completed, ModelConfig):
        raise TritonModelException(
            f"auto_complete_config must return the ModelConfig, found type '{type(completed)}'"
        )
    return json.dumps(completed.as_dict())
