"""OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, each number a decimal string."""

import numpy as np
import triton_python_backend_utils as pb_utils


def as_text(numbers):
    return np.char.encode(numbers.astype(np.str_), "utf-8").astype(np.object_)


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().astype(np.int64)
            right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy().astype(np.int64)
            outputs = [
                pb_utils.Tensor("OUTPUT0", as_text(left + right)),
                pb_utils.Tensor("OUTPUT1", as_text(left - right)),
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
