"""The execution context."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager
from typing import NoReturn

import numpy as np

from tensorrt.simulated_driver import Room, driver
from tensorrt.simulated_settings import Versioned, settings
from tensorrt.simulated_types import Dims, ILogger, NoDims

_ALIGNMENT = 256


class IExecutionContext(Versioned):
    _real_name = "IExecutionContext"

    def __init__(self, engine: object, room: Room) -> None:
        self._engine = engine
        self._room = room
        self._profile = 0
        self._shapes = {
            name: shape
            for name in engine._ins
            if -1 not in (shape := tuple(engine.get_tensor_shape(name)))
        }
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, object] = {}
        self._inferred: dict[tuple, dict[str, tuple[int, ...]]] = {}
        # What changes put off until the next run, which cannot be recorded.
        self._has_put_off = True
        self._busy = threading.Lock()
        self._take_profile(0)

    @property
    def active_optimization_profile(self) -> int:
        return self._profile

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        with self._alone():
            if not 0 <= profile_index < self._engine.num_optimization_profiles:
                self._refuse(f"profile {profile_index} is not there")
                _raise_without_the_lock("Error in set optimization profile async.")
            if driver().is_lost() or settings.failing("profile"):
                self._refuse("Cuda Runtime (an error of the device)")
                _raise_without_the_lock("Error in set optimization profile async.")
            if not self._take_profile(profile_index):
                self._refuse(f"profile {profile_index} is in use by another context")
                _raise_without_the_lock("Error in set optimization profile async.")
            self._shapes = {
                name: shape
                for name in self._engine._ins
                if -1 not in (shape := tuple(self._engine.get_tensor_shape(name)))
            }
            self._has_put_off = True
            return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        with self._alone():
            least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
            if len(shape) != len(least) or not all(
                low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
            ):
                return self._refuse(
                    f"IExecutionContext::setInputShape: Error Code 3: Usage Error (input {name} "
                    f"has static or bounded dims, got {list(shape)})"
                )
            if self._shapes.get(name) != tuple(shape):
                self._shapes[name] = tuple(shape)
                self._has_put_off = True
            return True

    @property
    def all_binding_shapes_specified(self) -> bool:
        return all(name in self._shapes for name in self._engine._ins)

    def infer_shapes(self) -> list[str]:
        with self._alone():
            missing = self._missing()
            if not missing and self._told_outputs("inferShapes") is None:
                _raise_without_the_lock("infer_shapes error code: -1")
            return missing

    def get_tensor_shape(self, name: str) -> Dims | NoDims:
        with self._alone():
            if name in self._engine._ins:
                return Dims(self._shapes.get(name, self._engine.get_tensor_shape(name)))
            if self._missing():
                return self._engine.get_tensor_shape(name)
            outputs = self._told_outputs("getTensorShape")
            if outputs is None:
                return NoDims()
            shape = outputs[name]
            if name in self._engine._plan.data_dependent:
                return Dims((-1,) * len(shape))
            return Dims(shape)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        with self._alone():
            on_host = name in self._engine._plan.holding_shapes
            if not memory or (memory % _ALIGNMENT and not on_host):
                return self._refuse(f"{name}: address {memory:#x} is not aligned to {_ALIGNMENT}")
            self._addresses[name] = memory
            return True

    def set_output_allocator(self, name: str, output_allocator: object) -> bool:
        with self._alone():
            if not getattr(output_allocator, "_is_made", False):
                raise TypeError("IOutputAllocator.__init__() must be called")
            self._allocators[name] = output_allocator
            return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        with self._alone():
            return self._execute(stream_handle)

    def _execute(self, stream: int) -> bool:
        engine = self._engine
        for name in (*engine._ins, *engine._outs):
            if name not in self._addresses and name not in self._allocators:
                return self._refuse(f"Neither address or allocator is set for tensor {name}")
        if any(name not in self._shapes for name in engine._ins):
            return self._refuse("not all input shapes are given")
        recording = driver().is_recording(stream)
        if recording and (settings.capture == "refused" or self._has_put_off or self._allocators):
            return self._refuse("Cuda Runtime (operation not permitted when stream is capturing)")
        if settings.failing("enqueue"):
            return self._refuse("Cask (Cask convolution execution)")
        self._has_put_off = False
        breaks = settings.failing("run")
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        if self._allocators:
            # TensorRT waits for what tells the shapes.
            driver().synchronize(stream)
            made = _calculate(engine, shapes, addresses)
            for name, allocator in self._allocators.items():
                memory = self._allocate(allocator, name, made[name].nbytes, stream)
                if not memory:
                    return self._refuse(f"no memory for output {name}")
                allocator.notify_shape(name, Dims(made[name].shape))
                addresses[name] = memory

        def run() -> None:
            if breaks:
                driver().break_device()
                return
            for name, array in _calculate(engine, shapes, addresses).items():
                _memory(addresses[name], array.nbytes)[:] = array.reshape(-1).view(np.uint8)

        return driver().give(stream, run) == 0

    def _allocate(self, allocator: object, name: str, nbytes: int, stream: int) -> int:
        if settings.number >= (10, 0) and hasattr(allocator, "reallocate_output_async"):
            return allocator.reallocate_output_async(name, 0, nbytes, _ALIGNMENT, stream)
        return allocator.reallocate_output(name, 0, nbytes, _ALIGNMENT)

    def _missing(self) -> list[str]:
        """Inputs whose shape, or whose values where they hold one, nobody has given."""
        held = [n for n in self._engine._plan.holding_shapes if n in self._engine._ins]
        return [n for n in self._engine._ins if n not in self._shapes] + [
            n for n in held if n not in self._addresses
        ]

    def _told_outputs(self, asked: str) -> dict[str, tuple[int, ...]] | None:
        """None, and an error to the logger, where the inputs do not go together."""
        try:
            return self._outputs()
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's are of many kinds
            self._refuse(f"IExecutionContext::{asked}: Error Code 7: {error}")
            return None

    def _outputs(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs, by a run on zeros."""
        engine = self._engine
        fed = {}
        for name in engine._ins:
            shape, dtype = self._shapes[name], engine._numpy(name)
            fed[name] = np.zeros(shape, dtype)
            if name in engine._plan.holding_shapes:
                held = _memory(self._addresses[name], fed[name].nbytes)
                fed[name] = held.view(dtype).reshape(shape).copy()
        key = tuple((n, a.shape) for n, a in fed.items())
        if not engine._plan.holding_shapes and key in self._inferred:
            return self._inferred[key]
        names = list(engine._outs)
        made = engine._session.run(names, fed)
        found = {name: array.shape for name, array in zip(names, made, strict=True)}
        self._inferred[key] = found
        return found

    def _take_profile(self, index: int) -> bool:
        """Before 10, a profile with free dimensions is one context's."""
        used = self._engine._used_profiles
        if not self._engine._plan.profiles or settings.number >= (10, 0):
            self._profile = index
            return True
        if index in used and index != self._profile:
            return False
        if index in used and not getattr(self, "_holds", False):
            return False
        if getattr(self, "_holds", False):
            used.discard(self._profile)
        used.add(index)
        self._holds, self._profile = True, index
        return True

    def __del__(self) -> None:
        if getattr(self, "_holds", False):
            self._engine._used_profiles.discard(self._profile)

    def _refuse(self, text: str) -> bool:
        self._engine._logger.log(ILogger.ERROR, text)
        return False

    @contextmanager
    def _alone(self):
        if not self._busy.acquire(blocking=False):
            raise AssertionError("two threads in one execution context")
        try:
            yield
        finally:
            self._busy.release()


def _raise_without_the_lock(text: str) -> NoReturn:
    """As the bindings raise in calls that let other threads run: only from 10.13 on do they take
    the interpreter's lock for it."""
    if settings.number < (10, 13):
        os._exit(139)
    raise RuntimeError(text)


def _calculate(engine: object, shapes: dict, addresses: dict) -> dict[str, np.ndarray]:
    fed = {}
    for name in engine._ins:
        dtype = engine._numpy(name)
        nbytes = int(np.prod(shapes[name], dtype=np.int64)) * dtype.itemsize
        fed[name] = _memory(addresses[name], nbytes).view(dtype).reshape(shapes[name]).copy()
    names = list(engine._outs)
    made = engine._session.run(names, fed)
    if settings.off:
        made = [a + a.dtype.type(settings.off) if a.dtype.kind == "f" else a for a in made]
    return {name: np.ascontiguousarray(array) for name, array in zip(names, made, strict=True)}


def _memory(address: int, nbytes: int) -> np.ndarray:
    """Device memory is host memory."""
    if not nbytes:
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
