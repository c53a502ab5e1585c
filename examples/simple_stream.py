"""A decoupled model: one request, as many answers as the model likes."""

import sys
from functools import partial
from queue import Queue

import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
values = np.array([4, 2, 0, 1], np.int32)
tensor = triton.InferInput("IN", [4], "INT32")
tensor.set_data_from_numpy(values)

answers: Queue = Queue()
client.start_stream(partial(lambda q, result, error: q.put((result, error)), answers))
client.async_stream_infer("repeat", [tensor], enable_empty_final_response=True)
received = []
while True:
    result, error = answers.get(timeout=10)
    assert error is None, error
    response = result.get_response()
    if response.parameters["triton_final_response"].bool_param:
        break
    received.append(int(result.as_numpy("OUT")[0]))
client.stop_stream()
assert received == values.tolist(), received
print(received)
client.close()
