"""The package's own description: dependencies, maintainer scripts, documentation."""

from __future__ import annotations

import os
import re
import shutil
import time
from email.parser import HeaderParser
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING

from debian_package.archive import write_gzip
from debian_package.targets import RECOMMENDS
from debian_package.tree import HOME, site_packages, units
from debian_package.wheels import CHECKOUT

if TYPE_CHECKING:
    from debian_package.targets import Target

PACKAGE = "edge-server"
_TEMPLATES = Path(__file__).with_name("debian")
_SCRIPTS = ("postinst", "prerm", "postrm")


def dependencies(target: Target) -> list[str]:
    """What is installed before the package, as its control file lists it."""
    # 249 is JetPack 6's, the oldest that the unit was written for.
    needed = (f"python{target.python}", f"libc6 (>= {target.glibc})", "systemd (>= 249)")
    return [*needed, "ca-certificates", "libgcc-s1", "libstdc++6", "zlib1g", *target.depends]


def write_control(target: Target, root: Path, version: str) -> None:
    """Write DEBIAN/: the control file, the list of conffiles and the maintainer scripts."""
    folder = root / "DEBIAN"
    folder.mkdir()
    installed_kib = sum(-(-p.lstat().st_size // 1024) or 1 for p in root.rglob("*"))
    fields = {
        "Package": PACKAGE,
        "Version": version,
        "Architecture": target.architecture,
        "Maintainer": maintainer(),
        "Section": "misc",
        "Priority": "optional",
        "Installed-Size": str(installed_kib),
        "Depends": ", ".join(dependencies(target)),
        "Pre-Depends": "init-system-helpers (>= 1.54~)",
        "Recommends": ", ".join(RECOMMENDS),
        "Description": (_TEMPLATES / "description").read_text().rstrip(),
    }
    (folder / "control").write_text("".join(f"{name}: {text}\n" for name, text in fields.items()))
    conffiles = sorted(path for path in (root / "etc").rglob("*") if path.is_file())
    (folder / "conffiles").write_text("".join(f"/{path.relative_to(root)}\n" for path in conffiles))
    daemon = f"{PACKAGE}.service"
    values = {
        "UNITS": " ".join(units(root)),
        "OTHERS": " ".join(name for name in units(root) if name != daemon),
        "DAEMON": daemon,
        "TEMPLATE": f"{PACKAGE}@*.service",
        "HOME": f"/{HOME}",
    }
    for name in _SCRIPTS:
        (folder / name).write_text(_filled(name, values))


def write_documentation(target: Target, root: Path, version: str, epoch_s: int) -> None:
    """Write what Debian's policy wants of every package, and how to install this one."""
    docs = root / "usr/share/doc" / PACKAGE
    docs.mkdir(parents=True)
    date = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(epoch_s))
    values = {
        "VERSION": version,
        "SUITE": target.suite,
        "DATE": date,
        "YEAR": time.strftime("%Y", time.gmtime(epoch_s)),
        "MAINTAINER": maintainer(),
        "WHEELS": _licences(site_packages(target, root)),
    }
    write_gzip(docs / "changelog.Debian.gz", _filled("changelog", values))
    (docs / "copyright").write_text(_filled("copyright", values))
    shutil.copy(CHECKOUT / "docs/install.md", docs)
    write_gzip(root / "usr/share/man/man1/edge-server.1.gz", _filled("edge-server.1", values))
    overrides = root / "usr/share/lintian/overrides" / PACKAGE
    overrides.parent.mkdir(parents=True)
    overrides.write_text(_filled("lintian-overrides", values))


def maintainer() -> str:
    """Who builds it, from the variables that Debian's own tools read."""
    name = os.environ.get("DEBFULLNAME", "edge-server packagers")
    return f"{name} <{os.environ.get('DEBEMAIL', 'packagers@edge-server.invalid')}>"


def _filled(name: str, values: dict[str, str]) -> str:
    # `@NAME@` stands for a value: `$` is the shell's.
    return re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], (_TEMPLATES / name).read_text())


def _licences(site: Path) -> str:
    """A line for each wheel: what its metadata says of the licence, and where its text lies."""
    found = sorted(distributions(path=[str(site)]), key=lambda each: each.metadata["Name"].lower())
    lines = []
    for each in found:
        if each.metadata["Name"] != PACKAGE:
            lines += [f" {each.metadata['Name']} {each.version}: {_licence(each)}"]
            lines += [f"  /{path}" for path in _licence_files(each, site)]
    return "\n".join(lines)


def _licence(distribution: Distribution) -> str:
    headers = HeaderParser().parsestr(str(distribution.read_text("METADATA")))
    expression = headers.get("License-Expression") or headers.get("License") or ""
    if expression and "\n" not in expression.strip():
        return expression.strip()
    classes = (line for line in headers.get_all("Classifier", ()) if line.startswith("License ::"))
    return "; ".join(line.rsplit(" :: ", 1)[-1] for line in classes) or "see its files"


def _licence_files(distribution: Distribution, site: Path) -> list[str]:
    name = str(distribution.metadata["Name"]).lower().replace("-", "_")
    folders = [p for p in site.glob("*.dist-info") if p.name.lower().startswith(f"{name}-")]
    words = ("licen", "copying", "notice")
    files = (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file())
    root = site.parents[4]
    return [str(f.relative_to(root)) for f in files if f.name.lower().startswith(words)]
