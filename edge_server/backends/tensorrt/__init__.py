"""`tensorrt`: plans on a GPU, and on the NVDLA cores beside it. `backend` is the backend itself.

Only modules that are imported once a plan is loaded import TensorRT: `backend` first reports why a
machine has no usable GPU.
"""
