"""Tensors of strings."""

import sys

import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
numbers = np.arange(16).reshape(1, 16)
texts = np.char.encode(numbers.astype(np.str_), "utf-8").astype(np.object_)
inputs = [
    triton.InferInput("INPUT0", [1, 16], "BYTES"),
    triton.InferInput("INPUT1", [1, 16], "BYTES"),
]
for tensor in inputs:
    tensor.set_data_from_numpy(texts)
answer = client.infer("simple_string", inputs)
sums = answer.as_numpy("OUTPUT0")
assert [int(text) for text in sums[0]] == (numbers[0] * 2).tolist()
print(b" ".join(sums[0]).decode())
client.close()
