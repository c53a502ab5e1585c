"""Write docs/reference, from the code: settings, flags, topics, metrics and exit codes.

python scripts/reference_pages.py            # write the pages
python scripts/reference_pages.py --check    # fail where one is not current
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncapi
import msgspec
from msgspec import inspect as types

from edge_server.api.http.metric_table import TABLE
from edge_server.api.http.model_metrics import ModelMetrics
from edge_server.api.http.sources import LaneLatency, Sources
from edge_server.cli.verbs import EXIT_CODE_MEANINGS
from edge_server.inference.registry import LoadedModel, ModelEntry, ModelState
from edge_server.inference.statistics import ModelStatistics
from edge_server.settings import Settings
from edge_server.settings.sections import POWER, RESTART, part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/reference"
FLAGS = ROOT / "edge_server/cli/flags/flags.txt"
_HOST_NAME = "the host's name"
_KINDS = {
    "event": "QoS 1, at least once and in order",
    "input": "read by the device; QoS 0",
    "live": "QoS 0, expires",
    "state": "QoS 1, retained",
}


def _table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    text = "# Settings\n\n```\nedge-server check --config config.toml\n```\n\n"
    text += (
        "names what is wrong with a file; an unknown key is an error that names the nearest known "
        "one. Every key, its default, and whether a reload applies it while lanes go on:\n"
    )
    return text + "".join(_sections(Settings, "", RESTART))


def _sections(section: type[msgspec.Struct], path: str, part: str) -> Iterator[str]:
    below: list[tuple[str, type[msgspec.Struct], str]] = []
    rows = []
    about = _attributes(section)
    for field in msgspec.structs.fields(section):
        name = field.encode_name
        inner, table = _struct_of(field.type)
        applies = part_of(field.type) or part
        if inner is not None:
            below.append((table.format(path=f"{path}.{name}".lstrip(".")), inner, applies))
        else:
            kind = _type_text(_info(field.type))
            reload = "" if applies in {RESTART, POWER} else "yes"
            rows.append((f"`{name}`", kind, _default(field), reload, about.get(name, "")))
    if rows:
        heading = path if path.startswith("[") else f"[{path}]"
        yield f"\n## `{heading}`\n\n{_summary(section)}\n\n"
        yield _table(("key", "values", "default", "reload", ""), iter(rows))
    for name, inner, applies in below:
        yield from _sections(inner, name, applies)


def _struct_of(annotation: Any) -> tuple[type[msgspec.Struct] | None, str]:
    """Return the struct of a table, and how its path is written; None where it is no table."""
    info = _info(annotation)
    options = info.types if isinstance(info, types.UnionType) else (info,)
    for one in options:
        if isinstance(one, types.StructType):
            return one.cls, "{path}"
        if isinstance(one, types.DictType) and isinstance(one.value_type, types.StructType):
            return one.value_type.cls, "{path}.NAME"
        if isinstance(one, types.VarTupleType) and isinstance(one.item_type, types.StructType):
            return one.item_type.cls, "[[{path}]]"
    return None, ""


def _info(annotation: Any) -> types.Type:
    info = types.type_info(annotation)
    return info.type if isinstance(info, types.Metadata) else info


def _summary(section: type[msgspec.Struct]) -> str:
    text = inspect.getdoc(section) or ""
    text = text.partition("\n\nAttributes:")[0]
    text = re.sub(r"^`\[.*?\]+`: *", "", text)
    return text[:1].upper() + text[1:]


def _attributes(section: type[msgspec.Struct]) -> dict[str, str]:
    text = (inspect.getdoc(section) or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for names, about in re.findall(
        r"(?m)^    (\w[\w, ]*): ((?:.|\n(?!    \w[\w, ]*: |\S))*)", text
    ):
        for name in names.split(", "):
            found[name] = " ".join(about.split())
    return found


def _default(field: Any) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return _HOST_NAME if field.encode_name == "id" else ""
    if field.default is msgspec.NODEFAULT:
        return "required"
    value = msgspec.to_builtins(field.default)
    return "none" if value is None else f"`{msgspec.json.encode(value).decode()}`"


def _type_text(info: Any) -> str:
    if isinstance(info, types.UnionType):
        return " or ".join(_type_text(one) for one in info.types if one != types.NoneType())
    if isinstance(info, types.LiteralType):
        return ", ".join(f"`{value}`" for value in info.values)
    if isinstance(info, types.VarTupleType):
        return f"list of {_type_text(info.item_type)}"
    if isinstance(info, types.DictType):
        return f"table of {_type_text(info.value_type)}"
    if isinstance(info, types.IntType | types.FloatType):
        kind = "integer" if isinstance(info, types.IntType) else "number"
        low, high = info.ge if info.ge is not None else info.gt, info.le
        bounds = {" from": low, " to": high}
        return kind + "".join(f"{word} {n}" for word, n in bounds.items() if n is not None)
    return {types.BoolType: "true, false", types.StrType: "text"}.get(type(info), "text")


def flags_page() -> str:
    text = "# Flags of `run` and `check`\n\n```\nedge-server run --help-triton\n```\n\n"
    text += (
        "lists the same. Tritonserver's flags keep their names; a flag whose feature is absent "
        "here is refused, or accepted with a warning.\n"
    )
    group: list[tuple[str, ...]] = []
    heading = ""
    for line in [*FLAGS.read_text().splitlines(), "End"]:
        if line.startswith("  "):
            flag, effect, about = (part.strip() for part in line.split("|", 2))
            word = effect.split()[0]
            what = f"`{word}`" if "." in word else {"special": ""}.get(word, word)
            group.append((f"`--{flag}`", what, about))
        elif line and not line.startswith("#"):
            if group:
                text += f"\n## {heading}\n\n" + _table(("flag", "setting", ""), iter(group))
            heading, group = line.strip(), []
    return text


def topics_page() -> str:
    names = {asyncapi.DEVICE: "<device>", asyncapi.CAMERA: "<camera>", asyncapi.MODEL: "<model>"}
    names[asyncapi.NETWORK] = "<network>"
    text = "# Topics\n\n```\nmosquitto_sub -v -t 'edge/v1/#'\n```\n\nshows them all; "
    text += "[asyncapi.json](../asyncapi.json) has their messages.\n\n"

    def rows() -> Iterator[tuple[str, ...]]:
        for row in asyncapi.rows():
            address = row.address
            for key, name in names.items():
                address = address.replace(key, name)
            yield f"`{address}`", row.message, _KINDS[row.kind], row.summary

    return text + _table(("topic", "message", "how", "when"), rows())


def metrics_page() -> str:
    text = "# Metrics\n\n```\ncurl http://127.0.0.1:8002/metrics\n```\n\n"
    text += (
        "The text is OpenMetrics where the client asks for it (`Accept: "
        "application/openmetrics-text`), and Prometheus' own format otherwise. What has no value "
        "yet, or is not on this machine, is not exported. [Observe](../observe.md) has alert "
        "rules, a dashboard and traces.\n\n## The appliance\n\n"
    )
    own = [(m.name, m.kind, m.labels, m.unit, m.text) for m in TABLE.values()]
    text += _metrics(row for row in own if row[0].startswith("edge_"))
    text += "\n## Triton's\n\n"
    text += "By Triton's names, for the dashboards that ask for them.\n\n"
    text += _metrics([*_nv(), *(row for row in own if row[0].startswith("nv_"))])
    return text + (
        "\n`process_*` are of the daemon's process, by prometheus_client; models may add metrics "
        "of their own, see [Python models](../python_models.md).\n"
    )


def _metrics(rows: Iterable[tuple[str, str, str, str, str]]) -> str:
    cells = (
        (f"`{name}`", kind, ", ".join(f"`{each}`" for each in labels.split()), unit, about)
        for name, kind, labels, unit, about in rows
    )
    return _table(("metric", "type", "labels", "unit", ""), cells)


def _nv() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield what is exported of a model that is loaded."""
    loaded = LoadedModel(None, 1, _Idle(), ModelStatistics())
    entry = ModelEntry("m", 1, ModelState.READY, loaded=loaded)
    sources = Sources("", lambda: [entry], [], LaneLatency())
    for family in ModelMetrics(sources).collect():
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        unit = {"us": "microseconds", "secs": "seconds"}.get(family.name.rpartition("_")[2], "")
        kind = "counter" if family.type == "unknown" else family.type
        yield family.name, kind, " ".join(labels), unit, family.documentation


class _Idle:
    """A scheduler that nothing waits for."""

    def pending(self) -> int:
        return 0


def exit_codes_page() -> str:
    text = "# Exit codes\n\n```\nedge-server check --config config.toml; echo $?\n```\n\n"
    rows = ((str(code), meaning) for code, meaning in EXIT_CODE_MEANINGS.items())
    return (
        text
        + _table(("code", "meaning"), rows)
        + (
            "\nsystemd restarts the daemon, without a limit of attempts, after every code but 0, 2 "
            "and 78.\n"
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    PAGES.mkdir(exist_ok=True)
    for name, made in (
        ("settings", settings_page()),
        ("flags", flags_page()),
        ("topics", topics_page()),
        ("metrics", metrics_page()),
        ("exit_codes", exit_codes_page()),
    ):
        page = PAGES / f"{name}.md"
        if not check:
            page.write_text(made)
        elif not page.exists() or page.read_text() != made:
            sys.exit(f"{page.relative_to(ROOT)} is not current: run scripts/reference_pages.py")


if __name__ == "__main__":
    main()
