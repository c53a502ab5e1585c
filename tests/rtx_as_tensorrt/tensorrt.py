"""TensorRT-RTX under the name of TensorRT: a real parser and a real builder that need no GPU.

Not a simulation: the classes are TensorRT-RTX's own, NVIDIA's edition for desktops, whose interface
is that of TensorRT 11. Its plans run on no Jetson. A test has it imported by putting this directory
on PYTHONPATH.
"""

from tensorrt_rtx_bindings import *  # noqa: F403

# RTX numbers its editions anew; what the code asks the version for is the interface.
__version__ = "11.4.0"
