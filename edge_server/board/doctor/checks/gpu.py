"""Checks of the GPU: device files, driver, CUDA's runtime, pycuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.board.doctor.evidence import fault, ok, warning
from edge_server.board.installation import remedy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.board.device_nodes import DeviceNode
    from edge_server.board.doctor.evidence import Evidence, Finding

NO_GPU = "no NVIDIA GPU: models run on the CPU"
# CUresult of cuda.h: cuInit returns the last two, and on a Jetson the first, to a user who may not
# open the device files.
_NO_DEVICE = 100
_NOT_OPENED = (_NO_DEVICE, 801, 999)


def join_groups(nodes: Iterable[DeviceNode], user: str) -> str:
    """Return the command that grants `user` access to `nodes`; empty where no group grants it."""
    groups = sorted({node.group for node in nodes if node.group})
    if not groups:
        return ""
    return f"sudo usermod -aG {','.join(groups)} {user}; then log in again, or restart the daemon"


def gpu_nodes(evidence: Evidence) -> Finding:
    """The device files of GPU and NVDLA exist, and the daemon's user may open them."""
    board = evidence.board
    user = board.account.name
    if not board.gpu_nodes:
        if not board.is_jetson:
            return ok(NO_GPU)
        return fault(
            "no /dev/nvmap, no /dev/nvhost-*, no /dev/nvgpu: nothing leads to the GPU",
            "in a container: --runtime nvidia; elsewhere flash the board anew",
        )
    refused = [node for node in board.gpu_nodes if not node.usable]
    open_nodes = f"{len(board.gpu_nodes) - len(refused)} device files open to {user}"
    if evidence.driver_works and evidence.driver_tried_by_account:
        # Some files are for root on every board, such as those that switch the GPU's power, and
        # /dev/nvmap may be read-only: a successful start of CUDA proves more than the modes.
        others = f", {len(refused)} not, which CUDA does not need to start" if refused else ""
        return ok(f"{open_nodes}{others}")
    curable = [node for node in refused if node.group]
    if curable:
        names = ", ".join(node.path for node in curable)
        return fault(f"closed to {user}: {names}", join_groups(curable, user))
    if any(node.path == "/dev/nvmap" and node.for_root for node in refused):
        return fault(
            "/dev/nvmap is open to root only", "reinstall the udev rules of nvidia-l4t-init"
        )
    others = f", {len(refused)} not, by their modes" if refused else ""
    return ok(f"{open_nodes}{others}")


def driver(evidence: Evidence) -> Finding:
    """CUDA's driver starts."""
    result, board = evidence.result("driver"), evidence.board
    facts = result.facts
    if evidence.driver_works and facts["devices"]:
        devices = ", ".join(
            f"{device['name']} (compute {device['compute_capability']})"
            for device in facts["devices"]
        )
        found = f"CUDA {facts['version']}: {devices}"
        if evidence.driver_tried_by_account:
            return ok(found)
        return ok(f"{found}; as {board.account.name} it is tried by: sudo edge-server doctor")
    if (
        not board.is_jetson
        and not board.gpu_nodes
        and (facts.get("missing") or facts.get("init") == _NO_DEVICE)
    ):
        return ok(NO_GPU)
    found = result.problem or "it sees no device"
    return fault(f"CUDA's driver does not start: {found}", _driver_remedy(evidence))


def _driver_remedy(evidence: Evidence) -> str:
    board, facts = evidence.board, evidence.result("driver").facts
    if not facts.get("missing"):
        refused = [node for node in board.gpu_nodes if not node.usable]
        look = "sudo dmesg | grep -iE 'nvgpu|nvrm', and restart the machine"
        if join := join_groups(refused, board.account.name):
            return join
        if board.is_jetson and facts.get("init") in _NOT_OPENED:
            groups = f"sudo usermod -aG video,render {board.account.name}"
            return f"{groups}, then log in again, or restart the daemon; if that is so: {look}"
        return look
    if board.is_jetson:
        again = "sudo apt install --reinstall nvidia-l4t-cuda"
        return f"in a container: --runtime nvidia; elsewhere: {again}"
    return "install NVIDIA's driver; in a container: --gpus all"


def cuda_runtime(evidence: Evidence) -> Finding:
    """CUDA's runtime library is installed, in a version that the driver supports."""
    result, board = evidence.result("cuda_runtime"), evidence.board
    version = result.facts.get("version")
    if version is None:
        if not board.is_jetson and not evidence.driver_works:
            return ok("none, and none needed on the CPU")
        found = result.problem or "libcudart.so is not found"
        package = _cudart_package(board.jetpack.cuda if board.jetpack else "")
        return warning(f"{found}: TensorRT needs it", f"sudo apt install {package}")
    found = f"CUDA {version} ({result.facts['library']})"
    drivers = evidence.result("driver").facts.get("version", version)
    if _major(version) > _major(drivers):
        return fault(
            f"{found}, but the driver carries CUDA {drivers} only",
            "use the CUDA of this JetPack" if board.is_jetson else "update NVIDIA's driver",
        )
    return ok(found)


def pycuda(evidence: Evidence) -> Finding:
    """pycuda can run edge-server's own kernels."""
    result = evidence.result("pycuda")
    facts = result.facts
    needed = evidence.board.is_jetson or evidence.driver_works
    if result.problem:
        found = f"pycuda cannot be imported: {result.problem}"
        if not needed:
            return ok(f"{found}; none needed on the CPU")
        if not evidence.driver_works:
            return warning(found, "mend the driver first")
        return fault(found, remedy("pycuda"))
    if facts.get("missing"):
        if not needed:
            return ok("none, and none needed on the CPU")
        return warning(
            "pycuda is not installed: images are preprocessed on the CPU",
            remedy("pycuda"),
        )
    return ok(f"pycuda {facts['version']}")


def _cudart_package(cuda: str) -> str:
    return f"cuda-cudart-{cuda.replace('.', '-')}" if cuda else "cuda-cudart-12-6"


def _major(version: str) -> int:
    return int(version.partition(".")[0])
