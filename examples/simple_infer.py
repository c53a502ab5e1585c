"""One request, one answer; then several at once."""

import sys
from functools import partial
from queue import Queue

import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
left = np.arange(16, dtype=np.int32).reshape(1, 16)
right = np.ones((1, 16), np.int32)
inputs = [
    triton.InferInput("INPUT0", [1, 16], "INT32"),
    triton.InferInput("INPUT1", [1, 16], "INT32"),
]
inputs[0].set_data_from_numpy(left)
inputs[1].set_data_from_numpy(right)

answer = client.infer("simple", inputs, request_id="1")
np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), left + right)
np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), left - right)
print("sum:", answer.as_numpy("OUTPUT0")[0])

only_sum = [triton.InferRequestedOutput("OUTPUT0")]
answers: Queue = Queue()
for _ in range(8):
    client.async_infer(
        "simple",
        inputs,
        partial(lambda q, result, error: q.put((result, error)), answers),
        outputs=only_sum,
    )
for _ in range(8):
    result, error = answers.get(timeout=10)
    assert error is None, error
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), left + right)
    assert result.as_numpy("OUTPUT1") is None
print("8 at once: ok")
client.close()
