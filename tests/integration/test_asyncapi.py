"""AsyncAPI's own parser reads the document of our topics without a fault."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs/asyncapi.json"
PARSER = "@asyncapi/parser@3.6.3"
CHECK = """
import { Parser } from "@asyncapi/parser";
import { readFileSync } from "node:fs";
const { document, diagnostics } = await new Parser().parse(readFileSync(process.argv[2], "utf8"));
// 0 is an error, 1 a warning; that there is a newer AsyncAPI is one of the hints.
for (const each of diagnostics)
  if (each.severity < 2) console.log(each.path.join("."), each.message);
console.log(document ? document.operations().all().length : "nothing");
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm: apt install npm")
def test_the_parser_of_asyncapi_finds_no_fault(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "check.mjs").write_text(CHECK)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", PARSER]
    installed = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"no package registry in reach: {installed.stderr[-200:]}")
    check = ["node", "check.mjs", DOCUMENT]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip().isdecimal(), done.stdout
    assert int(done.stdout) >= 15
