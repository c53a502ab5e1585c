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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.backends.python import messages as m
from edge_server.backends.python.link import here
from edge_server.backends.python.pb_utils.requests import (
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
)
from edge_server.backends.python.pb_utils.server import AutoCompleteConfig, Logger
from edge_server.backends.python.pb_utils.tensor import TritonModelException, printable
from edge_server.backends.python.shared_memory import take_back
from edge_server.process.child import MessageTooLong

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures
    from collections.abc import Mapping, Sequence

    from edge_server.backends.python.link import DaemonLink

_CLASS = "TritonPythonModel"
_READY_S = 5.0
# Frames of these directories are C++ in Triton: tracebacks leave them out.
_OURS = str(Path(__file__).parent)
_MAY_BE_BROUGHT = (
    "; name it in a requirements.txt beside the model's file, of which `edge-server models env` "
    "makes what the model imports"
)
_MAY_BE_OPENED = (
    "; in its sandbox a model reads its own directory and the system's, and writes to its "
    "temporary one; [python] readable and writable of the daemon's settings open more"
)


class _Refused(Exception):
    """The return value of `execute` is invalid; the text is Triton's."""


class ModelRunner:
    """Processes the daemon's messages in order, on the main thread. `refused` says why no model may
    run in this process; empty where one may."""

    def __init__(self, name: str, link: DaemonLink, refused: str) -> None:
        self._name = name
        self._refused = refused
        self._in_sandbox = False
        self._link = link
        self._model: Any = None
        self._decoupled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # The senders of the requests that run again, by the requests' numbers.
        self._senders: dict[int, InferenceResponseSender] = {}

    def run(self) -> None:
        """Process messages until `Finish`; raises ChannelClosed where the daemon is gone."""
        while True:
            message = self._link.work.get()
            if isinstance(message, m.Execute):
                self._execute(message)
            elif isinstance(message, m.CheckReady):
                self._link.send(m.Ready(self._ready()))
            elif isinstance(message, m.Start):
                try:
                    self._link.send(self._start(message))
                except MessageTooLong as error:
                    self._link.send(m.Started(failure=f"auto_complete_config: {error}"))
            elif isinstance(message, m.Finish):
                self._finish()
                return

    def _start(self, start: m.Start) -> m.Started:
        if self._refused:
            return m.Started(failure=self._refused)
        self._in_sandbox = start.rules.closed
        self._decoupled = start.decoupled
        try:
            model_class = getattr(_import(start), _CLASS)
            if start.complete:
                complete = model_class.auto_complete_config if start.runner else None
                complete = complete or partial(_completed, model_class)
                return m.Started(completed=complete(start.arguments))
            self._link.may_load = True
            self._model = model_class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(start.arguments)
        except BaseException as error:  # noqa: BLE001 - the model may raise any exception
            return m.Started(failure=self._text_of(error))
        if not hasattr(self._model, "execute"):
            return m.Started(failure=f"class {_CLASS} has no method 'execute'")
        completed = self._model.signature if start.runner else ""
        return m.Started(checks_ready=hasattr(self._model, "is_ready"), completed=completed)

    def _execute(self, message: m.Execute) -> None:
        link = self._link
        requests = [
            InferenceRequest.of(
                request, link, self._senders.pop(request.number, None), decoupled=self._decoupled
            )
            for request in message.requests
        ]
        numbers = [request.number for request in message.requests]
        failure = ""
        responses: list[m.Responded] = []
        rescheduled: list[int] = []
        link.executing = True
        began_ns = time.monotonic_ns()
        try:
            returned = self._model.execute(requests)
            continues = self._decoupled and isinstance(returned, Coroutine)
            if continues:
                self._continue(returned, numbers)
            elif isinstance(returned, Coroutine):
                returned = self._run(returned).result()
            execute_ns = time.monotonic_ns() - began_ns
            if not continues:
                responses = self._responses(requests, returned)
            rescheduled = self._rescheduled(requests, numbers)
        except BaseException as error:  # noqa: BLE001 - the model may raise any exception
            execute_ns = time.monotonic_ns() - began_ns
            failure = self._failure(error)
            for number in numbers:
                link.forget(number)
        finally:
            link.executing = False
        # A faulty model may keep the traceback, and with it the inputs, for long.
        del requests
        try:
            link.send(m.Executed(message.batch, execute_ns, failure, responses, rescheduled))
        except MessageTooLong as error:
            for response in responses:
                take_back(response.places, link.outbox)
            link.send(m.Executed(message.batch, execute_ns, self._failure(error)))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        import asyncio  # noqa: PLC0415 - a third of this process's start time

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=_run_loop, args=(self._loop,), name="asyncio", daemon=True
            ).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _continue(self, execution: Coroutine[Any, Any, Any], numbers: Sequence[int]) -> None:
        """Let a decoupled execution continue; if it fails, its unfinished requests get the
        failure."""

        def ended(done: concurrent.futures.Future[Any]) -> None:
            try:
                done.result()
            except BaseException as error:  # noqa: BLE001 - the model may raise any exception
                failure = m.internal_error(self._failure(error))
            else:
                return
            left = [number for number in numbers if number in self._link.unfinished]
            for number in left:
                self._link.forget(number)
                self._link.send(m.Responded(number, failure, final=True))
            if not left and failure.failure is not None:
                # No client learns of it.
                Logger.log_error(failure.failure.text)

        self._run(execution).add_done_callback(ended)

    def _responses(self, requests: Sequence[InferenceRequest], returned: Any) -> list[m.Responded]:
        """Return the responses that `execute` returned; the error texts are Triton's."""
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
        for request, response in zip(requests, returned, strict=True):
            if response is not None and request.rescheduled:
                raise _Refused(
                    "Expected a None object in the execute function return list for reschduled "
                    f"request, found type '{type(response)}'."
                )
            if response is not None and not isinstance(response, InferenceResponse):
                raise _Refused(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
        pairs = zip(requests, returned, strict=True)
        messages = [request.last_response(response) for request, response in pairs]
        return [message for message in messages if message is not None]

    def _rescheduled(
        self, requests: Sequence[InferenceRequest], numbers: Sequence[int]
    ) -> list[int]:
        pairs = zip(requests, numbers, strict=True)
        again = {n: sender for request, n in pairs if (sender := request.runs_again) is not None}
        # A cancelled request does not run again.
        kept = {n: s for n, s in self._senders.items() if n not in self._link.cancelled}
        self._senders = kept | again
        return list(again)

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
        if not isinstance(ready, bool):
            Logger.log_warn(f"is_ready: expected a bool, found type '{type(ready)}'")
            return False
        return ready

    def _finish(self) -> None:
        self._link.may_load = False
        try:
            if hasattr(self._model, "finalize"):
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
        text = f"{type(error).__name__}: {printable(error)}"
        if self._in_sandbox and isinstance(error, PermissionError):
            text += _MAY_BE_OPENED
        if isinstance(error, ModuleNotFoundError):
            text += _MAY_BE_BROUGHT
        return text + (f"\n\nAt:\n{printable(at)}" if at else "")


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run the event loop; `sys.exit` in a coroutine ends only that coroutine."""
    while not loop.is_closed():
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


def _import(start: m.Start) -> Any:
    """Import the module with the model's class: a user's is part of the package formed by its
    version directory."""
    os.chdir(start.working_directory or os.environ["TMPDIR"])
    version_directory = Path(start.directory)
    here.model_directory = start.directory
    if start.runner:
        return importlib.import_module(start.runner)
    if start.source:
        sys.path += [start.source, str(Path(start.source).parent)]
        return importlib.import_module(Path(start.filename).stem)
    sys.path += [str(version_directory), str(version_directory.parent)]
    return importlib.import_module(f"{version_directory.name}.{Path(start.filename).stem}")


def _completed(model_class: Any, arguments: Mapping[str, str]) -> str:
    """Return the configuration after `auto_complete_config`, as JSON; empty where the model
    lacks that function."""
    if not hasattr(model_class, "auto_complete_config"):
        return ""
    completed = model_class.auto_complete_config(AutoCompleteConfig(arguments["model_config"]))
    if not isinstance(completed, AutoCompleteConfig):
        raise TritonModelException(
            f"auto_complete_config function in model '{arguments['model_name']}' must return a "
            f"valid pb.ModelConfig object. Found type '{type(completed)}'"
        )
    return json.dumps(completed.as_dict())
