"""The bill of materials, as CycloneDX JSON: the wheels by their lock, the rest by its hashes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debian_package.archive import sha256
from debian_package.tree import MODELS, site_packages

if TYPE_CHECKING:
    from debian_package.targets import Target


def bill_of_materials(target: Target, root: Path, version: str) -> str:
    """JSON of all that the laid-out tree holds, and of the packages of apt that it needs."""
    done = subprocess.run(
        [
            Path(sys.executable).with_name("cyclonedx-py"),
            *("requirements", "--output-reproducible", "--of", "JSON", target.lock),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    bill: dict[str, Any] = json.loads(done.stdout)
    bill["metadata"]["component"] = {
        "type": "application",
        "bom-ref": "edge-server",
        "name": "edge-server",
        "version": version,
        "purl": f"pkg:deb/edge-server@{version}?arch={target.architecture}&distro={target.suite}",
    }
    kernels = site_packages(target, root) / "edge_server/gpu/kernels"
    images = (path for path in kernels.iterdir() if path.suffix in (".cubin", ".fatbin"))
    models = (path for path in (root / MODELS).rglob("*") if path.is_file())
    for path in sorted((*images, *models)):
        name = str(path.relative_to(root))
        bill["components"].append(
            {
                "type": "machine-learning-model" if path.suffix == ".onnx" else "file",
                "bom-ref": name,
                "name": name,
                "hashes": [{"alg": "SHA-256", "content": sha256(path)}],
            }
        )
    for wanted in target.depends:
        bill["components"].append(
            {"type": "library", "bom-ref": wanted, "name": wanted, "scope": "required"}
        )
    return json.dumps(bill, indent=1, sort_keys=True) + "\n"
