"""Two sequences side by side, each with a sum of its own: one by unary calls, one by a stream."""

import sys
from functools import partial
from queue import Queue

import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
values = [1, 2, 3, 4]


def tensor(value: int) -> triton.InferInput:
    made = triton.InferInput("INPUT", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[value]], np.int32))
    return made


def place(index: int) -> dict[str, bool]:
    return {"sequence_start": index == 0, "sequence_end": index == len(values) - 1}


sums = []
for index, value in enumerate(values):
    answer = client.infer("simple_sequence", [tensor(value)], sequence_id=1001, **place(index))
    sums.append(int(answer.as_numpy("OUTPUT")[0, 0]))
assert sums == [1, 3, 6, 10], sums

answers: Queue = Queue()
client.start_stream(partial(lambda q, result, error: q.put((result, error)), answers))
for index, value in enumerate(values):
    client.async_stream_infer(
        "simple_sequence", [tensor(10 * value)], sequence_id="texts-too", **place(index)
    )
streamed = []
for _ in values:
    result, error = answers.get(timeout=10)
    assert error is None, error
    streamed.append(int(result.as_numpy("OUTPUT")[0, 0]))
client.stop_stream()
assert streamed == [10, 30, 60, 100], streamed
print(sums, streamed)
client.close()
