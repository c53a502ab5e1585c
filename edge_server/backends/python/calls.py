"""Calls that a model makes to other models (Triton's BLS)."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from typing import TYPE_CHECKING

from edge_server.backends.python.arena import ArenaFull
from edge_server.backends.python.channel import ChannelClosed
from edge_server.backends.python.codes import Code, code_of
from edge_server.backends.python.messages import (
    Answer,
    AskModelReady,
    CallAnswered,
    CallModel,
    CallReturned,
    Failure,
)
from edge_server.backends.python.packing import pack_all, unpack
from edge_server.errors import EdgeServerError, InternalError
from edge_server.requests import InferRequest, SequencePlace
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.backends.contract import ExecuteRequest, Tensors
    from edge_server.backends.python.process import ChildProcess
    from edge_server.requests import InferResponse, Trace

# A model that asks for more at once waits for its own.
_MOST_THREADS = 16
SEQUENCE_START = 1
SEQUENCE_END = 2


class ModelCalls:
    """Runs the calls of one model process; each sees the world of a request it is made for.

    A model that is called may run on the thread that calls it, so every call that has not
    returned needs a thread: they are made as they are needed, at most 16, and end at `close`.
    """

    def __init__(self, name: str, process: ChildProcess) -> None:
        self._name = name
        self._process = process
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._calls: dict[int, _CallCancellation] = {}
        self._closed = False

    def call(self, message: CallModel, callers: Sequence[ExecuteRequest]) -> None:
        """Begin a call, made while `callers` run."""
        number = message.request.number
        # Looked at even where the call is refused, so that their memory becomes free.
        inputs = {p.name: Tensor(unpack(p, self._process.inbox)) for p in message.request.inputs}
        if not callers:
            self.refuse(number, "BLS is only supported during the 'execute' function.")
            return
        if len(inputs) < len(message.request.inputs):
            given = Counter(place.name for place in message.request.inputs)
            twice = next(name for name, count in given.items() if count > 1)
            self.refuse(
                number,
                f"[request id: {message.request.id or '<id_unknown>'}] input '{twice}' already "
                "exists in request",
            )
            return
        cancellation = _CallCancellation(callers[0])
        with self._lock:
            self._calls[number] = cancellation
        self._run(lambda: self._submit(message, inputs, callers, cancellation))

    def ask_ready(self, message: AskModelReady, callers: Sequence[ExecuteRequest]) -> None:
        """Tell the model whether another one is ready, as far as `callers` see it."""

        def ask() -> None:
            try:
                if not callers:
                    raise InternalError("is_model_ready works only while a request runs")
                world = callers[0].world
                ready = world.model_ready(message.model_name, message.model_version)
            except EdgeServerError as error:
                self._send(CallReturned(message.call, failure=str(error)))
            else:
                self._send(CallReturned(message.call, float(ready)))

        self._run(ask)

    def cancel(self, number: int) -> None:
        """Nobody waits for that call any more."""
        with self._lock:
            cancellation = self._calls.get(number)
        if cancellation is not None:
            cancellation.cancel()

    def refuse(self, number: int, text: str) -> None:
        """Answer a call that cannot be made."""
        self._answer(number, Answer(failure=Failure(Code.INTERNAL, text)), final=True)

    def close(self) -> None:
        """Take back every call; threads that still run a model end when it has."""
        with self._lock:
            self._closed = True
            cancellations = list(self._calls.values())
            for _ in self._threads:
                self._work.put(None)
        for cancellation in cancellations:
            cancellation.cancel()

    def _run(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                return
            self._busy += 1
            if self._busy > len(self._threads) < _MOST_THREADS:
                thread = threading.Thread(
                    target=self._run_all, name=f"calls of {self._name}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._work.put(work)

    def _run_all(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                self._busy -= 1

    def _submit(
        self,
        message: CallModel,
        inputs: Tensors,
        callers: Sequence[ExecuteRequest],
        cancellation: _CallCancellation,
    ) -> None:
        asked = message.request
        name, version = asked.model_name, asked.model_version
        world = callers[0].world
        try:
            if not world.model_ready(name, version):
                self.refuse(
                    asked.number,
                    f"Failed for execute the inference request. Model '{name}' is not ready.",
                )
                return
            deadlines = [c.request.deadline for c in callers if c.request.deadline is not None]
            sequence = SequencePlace(
                asked.correlation_id,
                bool(asked.flags & SEQUENCE_START),
                bool(asked.flags & SEQUENCE_END),
            )
            world.submit(
                InferRequest(
                    name,
                    inputs,
                    version,
                    tuple(asked.outputs),
                    asked.id,
                    deadline=min(deadlines, default=None),
                    timeout_us=asked.timeout_us,
                    sequence=sequence if asked.correlation_id else None,
                    parameters=asked.parameters,
                    cancellation=cancellation,
                    trace=_trace(callers, name, asked.id),
                ),
                _Listener(self, asked.number, name, decoupled=message.decoupled),
            )
        except EdgeServerError as error:
            self.fail(asked.number, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the model waits for an answer
            self.fail(asked.number, InternalError(f"model '{name}' failed: {error!r}"))

    def give(self, number: int, response: InferResponse | None, *, final: bool) -> bool:
        """Pass one answer on to the model; whether it may hear more."""
        if response is None:
            self._answer(number, None, final=final)
            return not final
        contents = [(name, t.datatype, t.array) for name, t in response.outputs.items()]
        try:
            places = pack_all(contents, self._process.outbox)
        except ArenaFull as error:
            text = f"the outputs of model '{response.model_name}': {error}"
            self.refuse(number, text)
            return False
        answer = Answer(places, parameters=dict(response.parameters))
        self._answer(number, answer, final=final)
        return not final

    def fail(self, number: int, error: EdgeServerError) -> None:
        self._answer(number, Answer(failure=Failure(code_of(error), str(error))), final=True)

    def _answer(self, number: int, answer: Answer | None, *, final: bool) -> None:
        if final:
            with self._lock:
                self._calls.pop(number, None)
        self._send(CallAnswered(number, answer, final))

    def _send(self, message: CallAnswered | CallReturned) -> None:
        try:
            self._process.channel.send(message)
        except ChannelClosed:
            # It is gone already, or hangs so that it reads nothing any more.
            self._process.kill()


class _Listener:
    """Hears the answers to one call."""

    def __init__(self, calls: ModelCalls, number: int, model: str, *, decoupled: bool) -> None:
        self._calls = calls
        self._number = number
        self._model = model
        self._decoupled = decoupled
        self._over = False

    def __call__(self, answer: InferResponse | EdgeServerError | None, final: bool) -> None:
        if self._over:
            return
        if final or self._decoupled or isinstance(answer, EdgeServerError):
            self._over = not self._pass_on(answer, final=final)
        else:
            self._over = True
            self._calls.refuse(
                self._number,
                f"Model {self._model} is using the decoupled. The current BLS request call "
                "doesn't support models using the decoupled transaction policy. Please use "
                "'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
                "models.'",
            )

    def _pass_on(self, answer: InferResponse | EdgeServerError | None, *, final: bool) -> bool:
        """Whether there may be more."""
        if isinstance(answer, EdgeServerError):
            self._calls.fail(self._number, answer)
            return False
        return self._calls.give(self._number, answer, final=final)


def _trace(callers: Sequence[ExecuteRequest], model_name: str, request_id: str) -> Trace | None:
    """That of a call, where it is certain which request it is made for."""
    caller = callers[0].request.trace if len(callers) == 1 else None
    return None if caller is None else caller.child(model_name, request_id)


class _CallCancellation:
    """Cancelled by the model that called, or when its own caller is gone."""

    def __init__(self, caller: ExecuteRequest) -> None:
        self._caller = caller.request
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled or self._caller.cancelled

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        if self._caller.cancellation is not None:
            self._caller.cancellation.when_cancelled(callback)
        with self._lock:
            if not self._cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
