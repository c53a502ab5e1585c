"""What the package is built for: a suite of Debian or Ubuntu, its Python, an architecture."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

LOCKS = Path(__file__).with_name("locks")

# ONNX Runtime needs none of these to run a model: they convert and quantise networks, colour its
# log and print formulas. Nor does the recorder need compression, nor oras a schema where it reads.
UNUSED = ("coloredlogs", "sympy", "lz4", "zstandard", "jsonschema")

# The recorder; both are Python alone, 1 MB.
_RECORDER = ("mcap>=1.3,<2", "foxglove-schemas-protobuf>=0.3,<1")
# Spans for a collector; imported where the settings turn them on.
_TRACING = ("opentelemetry-sdk>=1.45,<2", "opentelemetry-exporter-otlp-proto-http>=1.45,<2")

# Channels of a registry: it reads references and logs in, 100 kB; requests is that of spans.
_CHANNELS = ("oras>=0.2.40,<0.3",)

# pycuda itself is source only: scripts/build_pycuda_wheel compiles it.
PYCUDA_NEEDS = ("mako", "platformdirs>=2.2", "pytools>=2011.2")

_JETSON = {
    # cv2 of apt is compiled for NumPy 1, and a library for NumPy 2 runs on it too.
    "requirements": (
        "onnxruntime>=1.20,<2",
        "numpy>=1.26,<2",
        *PYCUDA_NEEDS,
        *_RECORDER,
        *_TRACING,
        *_CHANNELS,
    ),
    # Ubuntu's own OpenCV, which has GStreamer, where JetPack's is not installed.
    "opencv": "libopencv-python (>= 4.5.4) | python3-opencv (>= 4.5.4)",
}
# A desktop: ONNX Runtime on the CPU, OpenCV from its wheel. Debian's and Ubuntu's python3-opencv
# would bring 150 packages with it (VTK, Qt) and hold NumPy at 1.
_DESKTOP = (
    "onnxruntime>=1.20,<2",
    "opencv-python-headless>=4.8,<6",
    *_RECORDER,
    *_TRACING,
    *_CHANNELS,
)

# GStreamer reads live cameras with PyGObject, which belongs to the system's own Python; so does the
# library with which records reach the journal with their fields.
RECOMMENDS = (
    "python3-systemd",
    "python3-gi",
    "python3-gst-1.0",
    "gir1.2-gst-plugins-base-1.0",
    "gstreamer1.0-plugins-good",
    "gstreamer1.0-plugins-bad",
)


@dataclass(frozen=True)
class Target:
    """One build of the package.

    Attributes:
        suite: the distribution's code name, part of the version.
        architecture: as dpkg names it.
        python: the minor version of the distribution's own Python.
        glibc: the distribution's, which bounds the wheels.
        requirements: beside those of `pyproject.toml`.
        depends: beside Python, systemd and the libraries that every wheel needs.
    """

    suite: str
    architecture: str
    python: str
    glibc: str
    requirements: tuple[str, ...]
    depends: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.suite}-{self.architecture}"

    @property
    def lock(self) -> Path:
        return LOCKS / f"{self.name}.txt"

    @property
    def own_wheels(self) -> Path:
        """Where wheels lie that were compiled here, of what is published as source only."""
        return Path(__file__).parents[2] / "dist/wheels" / self.name

    @property
    def uses_gpu(self) -> bool:
        """Whether the package is for a board, whose GPU pycuda speaks to."""
        return self.architecture == "arm64"

    @property
    def machine(self) -> str:
        """The architecture as the kernel and wheels name it."""
        return {"arm64": "aarch64", "amd64": "x86_64"}[self.architecture]

    @property
    def platform(self) -> str:
        """What uv calls it."""
        return f"{self.machine}-manylinux_{self.glibc.replace('.', '_')}"


TARGETS = {
    target.name: target
    for target in (
        Target(  # JetPack 6
            *("jammy", "arm64", "3.10", "2.35", _JETSON["requirements"]),
            (
                "nvidia-l4t-cuda (>= 36.3)",
                "nvidia-l4t-cuda (<< 37~)",
                # libnvdla_compiler.so, which libnvinfer needs; in no BSP, and no dependency of it.
                "nvidia-l4t-dla-compiler (>= 36.3)",
                "cuda-cudart-12-6 (>= 12.6) | cuda-cudart-12-2 (>= 12.2)",
                "python3-libnvinfer (>= 8.6.2)",
                "python3-libnvinfer (<< 11~)",
                _JETSON["opencv"],
            ),
        ),
        Target(  # JetPack 7.2
            *("noble", "arm64", "3.12", "2.39", _JETSON["requirements"]),
            (
                "nvidia-l4t-cuda (>= 39.2)",
                "nvidia-l4t-cuda (<< 40~)",
                "cuda-cudart-13-2 (>= 13.2)",
                "python3-libnvinfer (>= 10.16)",
                "python3-libnvinfer (<< 12~)",
                _JETSON["opencv"],
            ),
        ),
        Target("jammy", "amd64", "3.10", "2.35", _DESKTOP),
        Target("noble", "amd64", "3.12", "2.39", _DESKTOP),
        Target("bookworm", "amd64", "3.11", "2.36", _DESKTOP),
    )
}


def target_named(name: str) -> Target:
    """The target of that name, `here` for this machine's.

    Raises:
        SystemExit: there is none; its text names those there are.
    """
    wanted = _here() if name == "here" else name
    if wanted not in TARGETS:
        raise SystemExit(
            f"build_deb: no target {wanted}; there are {', '.join(TARGETS)} (a new one is a row in"
            f" {Path(__file__).name} and a lock of --update-locks)"
        )
    return TARGETS[wanted]


def _here() -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    facts = dict(line.split("=", 1) for line in lines if "=" in line)
    command = ("dpkg", "--print-architecture")
    architecture = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return f"{facts.get('VERSION_CODENAME', 'unknown').strip(chr(34))}-{architecture.strip()}"
