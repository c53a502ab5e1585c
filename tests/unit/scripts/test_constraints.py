"""scripts/constraints.txt pins what the checks depend on, to versions that pyproject.toml takes."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]  # the same module under its older name

ROOT = Path(__file__).parents[3]


def test_every_dependency_is_pinned_to_a_version_that_it_takes() -> None:
    pins: dict[str, list[str]] = {}
    for line in (ROOT / "scripts/constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition(" ")[0].partition("==")
            pins.setdefault(canonicalize_name(name), []).append(version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [project["dependencies"], *(extras[name] for name in ("lint", "test", "docs"))]
    for requirement in (Requirement(text) for part in wanted for text in part):
        versions = pins[canonicalize_name(requirement.name)]
        assert all(map(requirement.specifier.contains, versions)), (requirement, versions)
