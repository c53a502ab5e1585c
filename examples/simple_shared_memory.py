"""Tensors in system shared memory: only their place travels. Needs --allow-client-shm=true."""

import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import shared_memory

client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
left = np.arange(16, dtype=np.int32).reshape(1, 16)
right = np.full((1, 16), 5, np.int32)
size = left.nbytes

given = shared_memory.create_shared_memory_region("given", "/edge_server_example_in", 2 * size)
made = shared_memory.create_shared_memory_region("made", "/edge_server_example_out", 2 * size)
try:
    shared_memory.set_shared_memory_region(given, [left, right])
    client.register_system_shared_memory("given", "/edge_server_example_in", 2 * size)
    client.register_system_shared_memory("made", "/edge_server_example_out", 2 * size)
    inputs = [
        triton.InferInput("INPUT0", [1, 16], "INT32"),
        triton.InferInput("INPUT1", [1, 16], "INT32"),
    ]
    inputs[0].set_shared_memory("given", size)
    inputs[1].set_shared_memory("given", size, offset=size)
    outputs = [triton.InferRequestedOutput("OUTPUT0"), triton.InferRequestedOutput("OUTPUT1")]
    outputs[0].set_shared_memory("made", size)
    outputs[1].set_shared_memory("made", size, offset=size)
    client.infer("simple", inputs, outputs=outputs)
    sums = shared_memory.get_contents_as_numpy(made, np.int32, [1, 16])
    np.testing.assert_array_equal(sums, left + right)
    print(sums[0])
finally:
    client.unregister_system_shared_memory()
    shared_memory.destroy_shared_memory_region(given)
    shared_memory.destroy_shared_memory_region(made)
client.close()
