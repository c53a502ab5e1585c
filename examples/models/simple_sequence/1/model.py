"""OUTPUT = the sum of the sequence's values so far; the sum travels as implicit state."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()
            before = pb_utils.get_input_tensor_by_name(request, "SUM_IN").as_numpy()
            total = np.where(start == 1, value, before + value).astype(np.int32)
            outputs = [pb_utils.Tensor("OUTPUT", total), pb_utils.Tensor("SUM_OUT", total)]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
