"""An ONNX file in, a TensorRT plan out: for those who want no more than that.

    python3 scripts/onnx_to_plan.py model.onnx model.plan --fp16
    python3 scripts/onnx_to_plan.py model.onnx model.plan --shape input 1x3x360x640 4x3x360x640

Run it on the device that shall run the plan: a plan belongs to one GPU with one TensorRT. It needs
TensorRT 8.6 or newer (on a Jetson: apt install python3-libnvinfer) and nothing else, not even
edge-server. `edge-server plan build` does the same with a side-car that the daemon checks, NVDLA's
report, INT8, a timing cache and a progress bar.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    arguments = parse_arguments()
    try:
        import tensorrt  # noqa: F401, PLC0415 - a machine without it gets a sentence
    except ImportError as error:
        print(f"onnx_to_plan: no TensorRT here: {error}", file=sys.stderr)
        return 69
    try:
        plan = build(arguments)
    except RuntimeError as error:
        print(f"onnx_to_plan: {error}", file=sys.stderr)
        return 1
    arguments.plan.write_bytes(plan)
    print(f"{arguments.plan}: {len(plan) / 2**20:.1f} MiB")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("onnx", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument(
        "--fp16", action="store_true", help="layers may use FP16 (up to TensorRT 10)"
    )
    parser.add_argument(
        "--dla", type=int, metavar="CORE", help="use NVDLA, and the GPU for the rest"
    )
    parser.add_argument("--workspace", type=int, default=1024, metavar="MIB")
    parser.add_argument(
        "--shape",
        nargs=3,
        action="append",
        default=[],
        metavar=("INPUT", "MIN", "MAX"),
        help="of an input with free dimensions, like: input 1x3x360x640 4x3x360x640",
    )
    return parser.parse_args()


def build(arguments: argparse.Namespace) -> bytes:
    """The plan's bytes.

    Raises:
        RuntimeError: TensorRT cannot read the file, or build it.
    """
    import tensorrt as trt  # noqa: PLC0415

    version = tuple(map(int, trt.__version__.split(".")[:2]))
    logger = trt.Logger(trt.Logger.WARNING)
    builder: trt.Builder = trt.Builder(logger)

    # Up to 8 a network must be told that its shapes include the batch; from 10 on they always do.
    flags = 0
    if version < (10, 0):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    network: trt.INetworkDefinition = builder.create_network(flags)

    parser: trt.OnnxParser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(arguments.onnx)):
        errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
        raise RuntimeError("\n".join([f"{arguments.onnx}: TensorRT cannot read it:", *errors]))

    config: trt.IBuilderConfig = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, arguments.workspace << 20)

    if arguments.fp16:
        # From 11 on the types are those of the ONNX file, and the flag is gone.
        if not hasattr(trt.BuilderFlag, "FP16"):
            raise RuntimeError("TensorRT 11 takes no --fp16; give an ONNX file that is FP16-typed")
        config.set_flag(trt.BuilderFlag.FP16)

    if arguments.dla is not None:
        if arguments.dla >= builder.num_DLA_cores:
            raise RuntimeError(f"this device has {builder.num_DLA_cores} NVDLA cores")
        config.default_device_type = trt.DeviceType.DLA
        config.DLA_core = arguments.dla
        config.set_flag(trt.BuilderFlag.GPU_FALLBACK)

    if arguments.shape:
        profile: trt.IOptimizationProfile = builder.create_optimization_profile()
        for name, least, most in arguments.shape:
            profile.set_shape(name, sizes(least), sizes(most), sizes(most))
        config.add_optimization_profile(profile)

    plan: trt.IHostMemory | None = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("TensorRT built nothing; what it said stands above")
    return bytes(plan)


def sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


if __name__ == "__main__":
    sys.exit(main())
