"""Write docs/reference, from the code: settings, flags, topics, messages, metrics, exit codes; and
the figures of docs/figures.md, from benchmarks/results.

python scripts/reference_pages.py            # write the pages
python scripts/reference_pages.py --check    # fail where one is not current
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncapi
import msgspec
from debian_package.targets import TARGETS
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from lane_frame_schema import definitions
from msgspec import inspect as types

from edge_server.api.http.metric_table import TABLE
from edge_server.api.http.metrics import model_metrics
from edge_server.api.http.sources import Sources
from edge_server.board.board import JETPACKS
from edge_server.cli.commands import COMMANDS
from edge_server.cli.flags import GROUPS, Flag
from edge_server.cli.verbs import EXIT_CODE_MEANINGS, Verb
from edge_server.inference.registry import LoadedModel, ModelEntry, ModelState
from edge_server.inference.statistics import ModelStatistics
from edge_server.pipeline.lane_feed import LaneLatency
from edge_server.proto.edge.lanes.v1 import events_pb2, health_pb2, lane_service_pb2, lanes_pb2
from edge_server.proto.edge.perception.v1 import perception_pb2
from edge_server.settings import Settings
from edge_server.settings.sections import POWER, RESTART, part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/reference"
RESULTS = ROOT / "benchmarks/results"
FIGURES = ROOT / "docs/figures.md"
_FIGURES_BEGIN = "<!-- from here on written by scripts/reference_pages.py of benchmarks/results -->"
PROTO = ROOT / "edge_server/proto"
_LANES = "edge/lanes/v1"
_PERCEPTION = "edge/perception/v1"
_PROTOS = (
    *(f"{_LANES}/{name}" for name in ("lanes", "events", "health", "lane_service")),
    f"{_PERCEPTION}/perception",
)
# The messages that travel by themselves, in the order of the page.
_TRAVELLING = (
    lanes_pb2.LaneFrame,
    perception_pb2.NetworkFrame,
    events_pb2.Event,
    health_pb2.DeviceHealth,
    lane_service_pb2.Calibration,
    lane_service_pb2.SetVehicleStateRequest,
)
_JSON = {
    Field.TYPE_STRING: "text",
    Field.TYPE_BOOL: "true, false",
    Field.TYPE_UINT32: "integer from 0",
    Field.TYPE_SINT32: "integer",
    Field.TYPE_INT64: "integer, as text",
    Field.TYPE_UINT64: "integer from 0, as text",
}
# JetPack 7.0 and 7.1, which no Orin runs.
_THORS_L4T = 38
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
    text = "# Settings\n\n```sh\nedge-server check --config config.toml\n```\n\n"
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
    return "true, false" if isinstance(info, types.BoolType) else "text"


def flags_page() -> str:
    text = "# Flags of `run` and `check`\n\n```sh\nedge-server run --help-triton\n```\n\n"
    text += (
        "lists the same. Tritonserver's flags keep their names; a flag whose feature is absent "
        "here is refused, or accepted with a warning.\n"
    )
    for heading, flags in GROUPS.items():
        rows = ((f"`--{flag.spelling}`", _setting_of(flag), flag.text) for flag in flags)
        text += f"\n## {heading}\n\n" + _table(("flag", "setting", ""), rows)
    return text


def _setting_of(flag: Flag) -> str:
    word = flag.effect.split()[0]
    return f"`{word}`" if "." in word else {"special": ""}.get(word, word)


def topics_page() -> str:
    names = {asyncapi.DEVICE: "<device>", asyncapi.CAMERA: "<camera>", asyncapi.MODEL: "<model>"}
    names |= {asyncapi.NETWORK: "<network>", asyncapi.CHANNEL: "<channel>"}
    text = "# Topics\n\n```sh\nmosquitto_sub -v -t 'edge/v1/#'\n```\n\n"
    text += "prints every message of every device. "
    text += "[Messages](messages.md) shows lanes and events field by field; "
    text += "[asyncapi.json](../asyncapi.json) describes all messages for programs.\n\n"

    def rows() -> Iterator[tuple[str, ...]]:
        for row in asyncapi.rows():
            address = row.address
            for key, name in names.items():
                address = address.replace(key, name)
            yield f"`{address}`", row.message, _KINDS[row.kind], row.summary

    return text + _table(("topic", "message", "how", "when"), rows())


def messages_page() -> str:
    text = (
        "# Messages\n\n```sh\nmosquitto_sub -h localhost -t 'edge/v1/+/cameras/+/lanes' -C 1"
        "\n```\n\nprints one lanes message. MQTT carries JSON, or protobuf with "
        '`payload = "protobuf"` in `[mqtt]`; gRPC carries protobuf. The JSON is the proto3 mapping '
        "with these names:\n\n"
        "- an integer of 64 bits is a text, because a double holds only 53 bits of it;\n"
        "- an enum is its name;\n"
        "- a field that the table marks with “?” is absent where its value is unknown. Every other "
        "field is always present.\n\n"
        "Within v1 fields are only added: ignore those that you do not know. "
        "[MQTT](../mqtt.md#which-status-to-act-on) says which `status` may be acted upon. Sources: "
    )
    text += _links("proto", _PROTOS)
    schemas = (f"{_LANES}/lane_frame", f"{_PERCEPTION}/network_frame", f"{_LANES}/health")
    text += f"; JSON Schemas: {_links('schema.json', schemas)}.\n"
    for title, name in (
        ("A lanes message", f"{_LANES}/lane_frame"),
        ("A message of another network", f"{_PERCEPTION}/network_frame"),
        ("An event", f"{_LANES}/event"),
    ):
        example = (PROTO / f"{name}.example.json").read_text().strip()
        text += f"\n## {title}\n\n```json\n{example}\n```\n"
    return text + "\n## Fields\n" + "".join(_message_tables())


def _links(suffix: str, names: Iterable[str]) -> str:
    files = (f"{name}.{suffix}" for name in names)
    return ", ".join(f"[{Path(file).name}](../../edge_server/proto/{file})" for file in files)


def _message_tables() -> Iterator[str]:
    """Yield a table for each message and each enum that `_TRAVELLING` leads to."""
    schemas = {
        name: schema
        for travelling in _TRAVELLING
        for name, schema in definitions(travelling).items()
    }
    about: dict[str, str] = {}
    for file in _described_files().file:
        comments = {
            tuple(where.path): " ".join(where.leading_comments.split())
            for where in file.source_code_info.location
        }
        # A field without a comment has that of its type.
        names = {4: [each.name for each in file.message_type]}
        names[5] = [each.name for each in file.enum_type]
        for number, kinds in names.items():
            about |= {name: comments.get((number, index), "") for index, name in enumerate(kinds)}
        for index, message in enumerate(file.message_type):
            if message.name not in schemas:
                continue
            always = schemas[message.name]["required"]
            yield f"\n### {message.name}\n\n{comments.get((4, index), '')}".rstrip() + "\n\n"
            yield _table(
                ("field", "JSON", ""),
                (
                    (
                        f"`{field.name}`{'' if field.name in always else ' ?'}",
                        _json_of(field),
                        comments.get((4, index, 2, number))
                        or about.get(field.type_name.rpartition(".")[2], ""),
                    )
                    for number, field in enumerate(message.field)
                ),
            )
        for index, enum in enumerate(file.enum_type):
            yield f"\n### {enum.name}\n\n{comments.get((5, index), '')}".rstrip() + "\n\n"
            yield _table(
                ("value", "number", ""),
                (
                    (f"`{value.name}`", str(value.number), comments.get((5, index, 2, number), ""))
                    for number, value in enumerate(enum.value)
                    if value.number  # proto3 reads 0 where a field is missing; it is never sent
                ),
            )


def _described_files() -> FileDescriptorSet:
    """Return the .proto files with their comments, which the compiled modules do not have."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "set"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", "--include_source_info"]
        files = [f"{name}.proto" for name in _PROTOS]
        subprocess.run([*command, f"--descriptor_set_out={made}", *files], check=True)
        return FileDescriptorSet.FromString(made.read_bytes())


def _json_of(field: Field) -> str:
    name = field.type_name.rpartition(".")[2]
    if name == "Timestamp":
        kind = "time, RFC 3339"
    elif name:
        kind = f"[{name}](#{name.lower()})"
    else:
        kind = _JSON.get(field.type, "number")
    return f"list of {kind}" if field.label == Field.LABEL_REPEATED else kind


def metrics_page() -> str:
    text = "# Metrics\n\n```sh\ncurl http://127.0.0.1:8002/metrics\n```\n\n"
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
    nothing: Any = None
    idle: Any = _Idle()
    loaded = LoadedModel(nothing, 1, idle, ModelStatistics())
    entry = ModelEntry("m", 1, ModelState.READY, loaded=loaded)
    sources = Sources("", lambda: [entry], [], LaneLatency())
    for family in model_metrics(sources):
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        unit = {"us": "microseconds", "secs": "seconds"}.get(family.name.rpartition("_")[2], "")
        kind = "counter" if family.type == "unknown" else family.type
        yield family.name, kind, " ".join(labels), unit, family.documentation


class _Idle:
    """A scheduler that nothing waits for."""

    def pending(self) -> int:
        return 0


def exit_codes_page() -> str:
    text = "# Exit codes\n\n```sh\nedge-server check --config config.toml; echo $?\n```\n\n"
    text += "## Of the daemon, and of every verb that the next table does not list\n\n"
    codes = ((str(code), meaning) for code, meaning in EXIT_CODE_MEANINGS.items())
    text += _table(("code", "meaning"), codes)
    text += (
        "\nsystemd restarts the daemon after every code but 0, 2 and 78, without a limit of "
        "attempts. [Troubleshooting](../troubleshooting.md) has the remedies.\n\n"
        "## Of single verbs\n\n"
    )
    verbs = ((f"`{verb.name}`", " ".join(verb.codes.split())) for verb in Verb.all_of(COMMANDS))
    rows = ((name, codes.removeprefix("exit codes: ")) for name, codes in verbs if codes)
    return text + _table(("verb, and those below it", "codes"), rows)


def support_page() -> str:
    text = "# Supported systems\n\n```sh\nedge-server doctor --matrix\n```\n\n"
    text += (
        "prints the same on a device. A Jetson runs the Python, CUDA and TensorRT of its JetPack; "
        "nothing here was confirmed on a board ([on a board](../board.md)).\n\n## Jetson Orin\n\n"
    )
    packages = {each.python: each.name for each in TARGETS.values() if each.uses_gpu}
    nvdla = {"yes": "yes, but for Orin Nano", "no": "no", "agx": "AGX Orin, with TensorRT 11.4.1"}
    rows = (
        (
            each.version,
            str(each.since),
            each.python,
            each.cuda,
            each.tensorrt,
            nvdla[each.nvdla],
            f"`{packages[each.python]}`",
        )
        for each in JETPACKS
        if each.since.major != _THORS_L4T
    )
    heads = ("JetPack", "L4T from", "Python", "CUDA", "TensorRT", "NVDLA", "package")
    text += _table(heads, rows)
    text += (
        "\nJetPack 5 has Python 3.8, which is too old. JetPack 7.0 and 7.1 are for Thor.\n\n"
        "## PCs\n\n"
    )
    pcs = (
        (f"`{each.name}`", each.suite, each.python)
        for each in TARGETS.values()
        if not each.uses_gpu
    )
    return (
        text
        + _table(("package", "distribution", "Python"), pcs)
        + ("\nWith pip, edge-server runs on Linux with Python 3.10 to 3.13.\n")
    )


def figures_page() -> str:
    results = [(path.stem, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    oldest = min(result["date"] for _, result in results)
    of_that_day = ", ".join(f"`{name}`" for name, result in results if result["date"] == oldest)
    text = FIGURES.read_text().partition(_FIGURES_BEGIN)[0] + _FIGURES_BEGIN
    text += (
        f"\n\n## Figures\n\nThe oldest are of {oldest}: {of_that_day}. `python BENCHMARK --record "
        "NAME` measures one anew.\n"
    )
    for machine in sorted({result["machine"] for _, result in results}):
        here = [(name, result) for name, result in results if result["machine"] == machine]
        text += f"\n### {machine}\n\n"
        text += _table(("figure", "value", "command", "measured"), _figures(here))
    return text


def _figures(results: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    for name, result in results:
        measured = f"`{name}`, {result['date']}, `{result['commit']}`"
        for row in result["figures"]:
            texts = tuple(row[key].format_map(result["values"]) for key in ("figure", "value"))
            if result["values"] and texts == (row["figure"], row["value"]):
                sys.exit(
                    f"benchmarks/results/{name}.json: no value has a place in “{row['value']}”; "
                    "write the text anew, with {places} of the values"
                )
            yield *texts, f"`{result['command']}`", measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    PAGES.mkdir(exist_ok=True)
    for page, made in (
        (PAGES / "settings.md", settings_page()),
        (PAGES / "flags.md", flags_page()),
        (PAGES / "topics.md", topics_page()),
        (PAGES / "messages.md", messages_page()),
        (PAGES / "metrics.md", metrics_page()),
        (PAGES / "exit_codes.md", exit_codes_page()),
        (PAGES / "support.md", support_page()),
        (FIGURES, figures_page()),
    ):
        if not check:
            page.write_text(made)
        elif not page.exists() or page.read_text() != made:
            sys.exit(f"{page.relative_to(ROOT)} is not current: run scripts/reference_pages.py")


if __name__ == "__main__":
    main()
