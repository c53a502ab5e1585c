"""Writes a support bundle: every part redacted, cut to its bound, and accounted for."""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

import msgspec

from edge_server.api.http.scrape import read_metrics
from edge_server.board.board import UNIT, Identity
from edge_server.board.doctor.examination import examine, read_configuration
from edge_server.board.facts import read_within
from edge_server.board.resources import listed, read_text
from edge_server.cameras.source_uri import masked_uri
from edge_server.cli.doctor import as_json
from edge_server.errors import EdgeServerError, Unavailable
from edge_server.process.disk import states_here
from edge_server.process.text import (
    MASK,
    masked_by_place,
    remember_login,
    remember_secret,
    replaced,
    secrets_by_place,
)
from edge_server.repository.store_state import StateFile, stores_here
from edge_server.repository.verdicts import read_report
from edge_server.settings.read import read_text_file

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

    from edge_server.board.doctor.hardware import Configuration
    from edge_server.settings import Settings


# Shorter pieces of base64 would also be parts of other words.
_SHORTEST_PIECE = 8
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
# `password: …`, `"api_key" = "…"`, `Authorization: Bearer …` in logs and foreign output; a file's
# name (`password_file = …`) is none. Shorter words would hide settings like `token_s = 5`.
# Names are looked for in the text in lower case: with (?i), re would try them at every letter.
_NAMES = re.compile(
    r"pass(?:word|wd|phrase)|secret|token|api[-_]?key|access[-_]?key|private[-_]?key"
    r"|credentials?|psk|cookie"
)
_NAMED_VALUE = re.compile(
    r"\\*[\"']?\s*[:=]\s*"
    # In quotes, also those of a JSON text within another: \"password\": \"…\".
    r"(\\+\"[^\"\n]*\"|\"(?:\\.|[^\"\\\n])*\"|'[^'\n]*'|[^\s,;}\])\"']+)"
)
# `--password …` of a command line; the kernel's, and that of a unit, are among the parts.
_FLAGS = re.compile(r"password|passphrase|token|secret")
_FLAG_VALUE = re.compile(r"\s+(?!-)(\S+)")
_IN_FLAG = frozenset("abcdefghijklmnopqrstuvwxyz-")
# The end of a key whose begin the log has no more.
_END_OF_KEY = re.compile(r"\A(?:(?!-----BEGIN )[^\n]*\n)*?[^\n]*-----END [A-Z ]*PRIVATE KEY-----")
_SCHEMES = re.compile(r"basic|bearer|digest")
_CREDENTIALS = re.compile(r"\s+([\w.~+/=-]{4,}(?:\s*(?:,\s*)?\w+=\S+)*)")
# Not `str.lower`, which changes the length of some letters; the last two are a long s and Kelvin.
_LOWER = {
    **{upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)},
    0x17F: ord("s"),
    0x212A: ord("k"),
}
_HIDDEN = "device"


class Redaction:
    """Replaces secrets by `***` in every text that passes.

    Known secrets are those of the settings and of the files that these name; they are found as they
    are, percent-encoded, in hex, and in base64 even as a part of a longer text. Unknown ones are
    found by their place: in URIs, after words like `password`, and as private keys.

    Args:
        hidden: names that are replaced too: the device's and the host's, where nobody shall know.
    """

    def __init__(self, hidden: Iterable[str] = ()) -> None:
        names = sorted({re.escape(name) for name in hidden if name}, key=len, reverse=True)
        self._hidden = re.compile(rf"(?<![\w-])(?:{'|'.join(names)})(?![\w-])") if names else None

    def add(self, secret: str) -> None:
        """Replace `secret` from now on, in all its forms."""
        for each in {secret, secret.strip()}:
            for form in _forms(each):
                remember_secret(form)

    def add_settings(self, settings: Settings) -> None:
        """Add the secrets of the settings, and those in the files that they name."""
        for camera in settings.cameras.values():
            for user, password in secrets_by_place(camera.uri):
                self.add(password)
                if user is not None:
                    remember_login(user, password)
            if camera.credentials_file:
                self.add_file(camera.credentials_file)
        for restriction in (*settings.grpc.restricted, *settings.http.restricted):
            self.add(restriction.value)
        names = [
            settings.grpc.tls.key,
            settings.http.tls.key,
            settings.access.tokens_file or "",
        ]
        if settings.mqtt is not None:
            if settings.mqtt.username:
                self.add(settings.mqtt.username)
            names += [settings.mqtt.password_file or "", settings.mqtt.key_file or ""]
        for name in filter(None, names):
            self.add_file(name)

    def add_file(self, path: str | Path) -> None:
        """Add each line of a file of secrets, and the halves of `user:password`; a file that cannot
        be read here cannot be quoted here either."""
        try:
            text = read_text_file(path, wait_s=1.0)
        except (OSError, UnicodeDecodeError):
            return
        self.add(text)
        for line in text.splitlines():
            if line.startswith("-----"):
                continue
            self.add(line)
            # A token stands behind its scopes.
            self.add((line.split() or [""])[-1])
            user, colon, password = line.partition(":")
            if colon and user and password:
                self.add(password)
                remember_login(user, password)

    def text(self, text: str) -> str:
        """Return `text` without secrets."""
        text = _END_OF_KEY.sub(f"{MASK} private key", _PRIVATE_KEY.sub(f"{MASK} private key", text))
        text = masked_by_place(text)
        text = _without_values(text, _SCHEMES, _CREDENTIALS, _is_word)
        text = _without_values(text, _NAMES, _NAMED_VALUE)
        text = _without_values(text, _FLAGS, _FLAG_VALUE, _is_flag)
        return text if self._hidden is None else self._hidden.sub(_HIDDEN, text)

    def settings(self, settings: Settings) -> str:
        """Return the settings as JSON, with `***` for their secrets."""
        fields: dict[str, Any] = msgspec.to_builtins(settings)
        for restriction in fields["grpc"]["restricted"]:
            restriction["value"] = MASK
        if fields.get("mqtt"):
            fields["mqtt"]["username"] = MASK if fields["mqtt"]["username"] else None
        for camera in fields["cameras"].values():
            camera["uri"] = masked_uri(camera["uri"])
        return self.text(msgspec.json.format(msgspec.json.encode(fields), indent=1).decode())


def _without_values(
    text: str,
    names: re.Pattern[str],
    value: re.Pattern[str],
    fits: Callable[[str, int], bool] = lambda _text, _at: True,
) -> str:
    """Return `text` with `MASK` instead of the first group of `value` behind each of `names`.

    Takes a time that grows with the length of `text` alone.

    Args:
        fits: whether a name counts, by the text in lower case and where the name begins.
    """
    lower = text.translate(_LOWER)

    def changes() -> Iterator[tuple[tuple[int, int], str]]:
        at = 0
        for name in names.finditer(lower):
            if name.start() >= at and fits(lower, name.start()):
                found = value.match(text, name.end())
                if found is not None:
                    at = found.end()
                    yield found.span(1), MASK

    return replaced(text, changes())


def _is_word(text: str, at: int) -> bool:
    """Whether no letter, digit or underscore stands before `at`."""
    return at == 0 or not (text[at - 1].isalnum() or text[at - 1] == "_")


def _is_flag(text: str, at: int) -> bool:
    """Whether the letters and dashes before `at` have a dash."""
    while at > 0 and text[at - 1] in _IN_FLAG:
        at -= 1
        if text[at] == "-":
            return True
    return False


def _forms(secret: str) -> Iterator[str]:
    """Yield what texts may have instead of the secret; `masked` finds percent-encoded forms."""
    if not secret:
        return
    yield secret
    yield from {quote(secret, safe=""), quote_plus(secret)} - {secret}
    data = secret.encode(errors="surrogateescape")
    yield data.hex()
    yield data.hex().upper()
    for piece in _base64_pieces(data):
        yield piece
        yield piece.replace("+", "-").replace("/", "_")


def _base64_pieces(data: bytes) -> Iterator[str]:
    """Yield what base64 has of `data` wherever it begins in a longer text: three characters of
    base64 depend on their neighbours."""
    yield base64.b64encode(data).decode().rstrip("=")
    for before, dependent in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(bytes(before) + data).decode().rstrip("=")
        whole = encoded[dependent : (before + len(data)) * 8 // 6]
        if len(whole) >= _SHORTEST_PIECE:
            yield whole


Part = tuple[str, "Callable[[], str]"]

# A part is cut beyond this: of logs the newest lines stay, of others the first ones.
MOST_BYTES = 2 << 20
_COMMAND_S = 10.0
_SENSORS_S = 5.0
_LOG_LINES = 5000
_MOST_PLANS = 100
_SIDE_CARS = "*/model.plan.json"
_RELEASES = ("etc/os-release", "etc/nv_tegra_release", "proc/version", "proc/cmdline")


class Missing(EdgeServerError):
    """There is no such part here; the text is the reason."""


def parts(configuration: Configuration) -> Iterator[Part]:
    """Yield the name of each part and the function that makes its text.

    No part needs the daemon to run: those that ask it have a reason instead.
    """
    yield "versions.json", _versions
    yield "doctor.json", lambda: as_json(examine(configuration.path))
    yield "board.json", _board
    yield "models.json", lambda: _models(configuration)
    yield "metrics.txt", lambda: _metrics(configuration)
    yield "plans.json", _plans
    yield "unit.txt", _unit
    yield "journal.txt", lambda: _journal("-u", UNIT)
    yield "kernel.txt", lambda: _journal("-k", "-b")
    if configuration.settings is not None and configuration.settings.log.file:
        path = Path(configuration.settings.log.file)
        yield "log.txt", lambda: _tail(path)


def _versions() -> str:
    found: dict[str, Any] = {
        "edge_server": version("edge-server"),
        "python": sys.version,
        "machine": platform.machine(),
        "packages": dict(sorted((each.name, each.version) for each in distributions())),
    }
    for name in _RELEASES:
        found[f"/{name}"] = read_text(Path("/", name))
    try:
        # What JetPack and this package installed; absent where there is no dpkg.
        found["dpkg"] = _run(
            "dpkg-query", "-W", "nvidia-*", "libnvinfer*", "tensorrt*", "edge-server*", "cuda-*"
        ).splitlines()
    except Missing as error:
        found["dpkg"] = str(error)
    return json.dumps(found, indent=1)


def _board() -> str:
    facts = read_within(_SENSORS_S)
    if facts is None:
        raise Missing("a file of the board's sensors cannot be read")
    return json.dumps(asdict(facts), indent=1)


def _models(configuration: Configuration) -> str:
    """What the stores on this machine know of models, and what their daemon reported last."""
    settings, stores = configuration.settings, stores_here()
    if settings is not None and settings.repository.store:
        stores = [Path(settings.repository.store), *stores]
    found: dict[str, dict[str, Any]] = {}
    for store in dict.fromkeys(stores):
        if not store.is_dir():
            continue
        try:
            report, state = read_report(store), StateFile(store).peek()
        except OSError as error:
            found[str(store)] = {"error": str(error)}
            continue
        found[str(store)] = {
            "runs": report is not None and report.runs,
            "repositories": [] if report is None else list(report.repositories),
            "verdicts": {}
            if report is None
            else {name: verdict._asdict() for name, verdict in report.models.items()},
            "kept": {
                name: [kept.digest for kept in history] for name, history in state.models.items()
            },
            "quarantined": state.quarantined,
            "quarantined_as": state.quarantined_as,
        }
    if not found:
        raise Missing("no model store is here; the state of models is among the metrics")
    return json.dumps(found, indent=1)


def _metrics(configuration: Configuration) -> str:
    settings = configuration.settings
    if settings is None or not settings.metrics.enabled or not settings.metrics.port:
        raise Missing("the settings name no port of metrics")
    try:
        return read_metrics(settings.metrics.host, settings.metrics.port)[:MOST_BYTES]
    except Unavailable as error:
        raise Missing(f"{error}; does the daemon run?") from error


def _plans() -> str:
    """What the plans in the caches were built with, and from what."""
    found: dict[str, Any] = {}
    for state in states_here():
        for side_car in listed(state / "plans", _SIDE_CARS)[:_MOST_PLANS]:
            text = read_text(side_car)
            try:
                found[str(side_car)] = json.loads(text or "")
            except ValueError:
                found[str(side_car)] = "is no JSON"
    if not found:
        raise Missing("no plan was built here")
    return json.dumps(found, indent=1)


def _unit() -> str:
    return "\n".join(
        _run("systemctl", *verb, UNIT, "--no-pager") for verb in (("status",), ("cat",), ("show",))
    )


def _journal(*which: str) -> str:
    how = ("--no-pager", "-q", "-o", "short-iso", "-n", str(_LOG_LINES))
    return _run("journalctl", *which, *how)


def _tail(path: Path) -> str:
    try:
        if not path.is_file():
            raise Missing(f"{path}: is no file")
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_BYTES - 1))
            return _end_of(file.read(MOST_BYTES + 1)).decode(errors="replace")
    except OSError as error:
        raise Missing(f"{path}: {error.strerror}") from error


def _end_of(output: bytes) -> bytes:
    """Return the last `MOST_BYTES`, in whole lines: a part of a secret cannot be known for one."""
    return output if len(output) <= MOST_BYTES else output[-MOST_BYTES:].partition(b"\n")[2]


def _run(*command: str) -> str:
    """Return the output of a program of the system; of a long one the end."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed names
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except FileNotFoundError:
        raise Missing(f"{command[0]} is not here") from None
    except subprocess.TimeoutExpired:
        raise Missing(f"{command[0]}: no end within {_COMMAND_S:g} s") from None
    except OSError as error:
        raise Missing(f"{command[0]}: {error}") from error
    if not done.stdout.strip():
        reason = done.stderr.decode(errors="replace").strip()
        raise Missing(f"{' '.join(command[:2])}: {reason or 'no output'}")
    return _end_of(done.stdout).decode(errors="replace")


# Where systemd's LoadCredential= puts files; only root and the daemon may read them.
_CREDENTIAL_FILES = Path("/run/credentials/edge-server.service")
_LOGS = ("journal.txt", "kernel.txt", "log.txt")
_CUT = "\n[cut here]\n"


@dataclass
class Bundle:
    """The files of a bundle, in memory; `missing` has the reason why a part is not there, `cut` the
    names of those that are cut to their bound."""

    files: dict[str, bytes] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        """Add a part, cut to `MOST_BYTES`: a log keeps its end, any other part its begin."""
        data = text.encode(errors="replace")
        if len(data) > MOST_BYTES:
            self.cut.append(name)
            room, mark = MOST_BYTES - len(_CUT), _CUT.encode()
            data = mark + data[-room:] if name in _LOGS else data[:room] + mark
        self.files[name] = data

    def manifest(self) -> bytes:
        sizes = {name: len(data) for name, data in self.files.items()}
        about = {
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": sizes,
            "missing": self.missing,
            "cut": self.cut,
        }
        return json.dumps(about, indent=1).encode()


def gather(configuration: Configuration, redaction: Redaction, found: Iterable[Part]) -> Bundle:
    """Return the bundle of all parts; one that fails costs itself, and the manifest says why.

    The redaction knows all secrets before the first part is made.
    """
    bundle = Bundle()
    if configuration.settings is not None:
        bundle.add("settings.json", redaction.settings(configuration.settings))
    else:
        bundle.missing["settings.json"] = redaction.text(configuration.error)
    for name, make in found:
        try:
            bundle.add(name, redaction.text(make()))
        except Missing as error:
            bundle.missing[name] = redaction.text(str(error))
        except Exception as error:  # noqa: BLE001 - what fails on a sick machine is the bundle's topic
            bundle.missing[name] = redaction.text(f"{type(error).__name__}: {error}")
    return bundle


def write(bundle: Bundle, path: Path) -> int:
    """Write the archive, readable by this user alone; return its size in bytes.

    Raises:
        EdgeServerError: the file cannot be written; nothing of it is left.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in {"manifest.json": bundle.manifest(), **bundle.files}.items():
            entry = tarfile.TarInfo(f"edge-server-support/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Not followed, and not what somebody else has made there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
            file.write(packed.getvalue())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise EdgeServerError(
            f"{path}: cannot be written: {error.strerror}; give another place with -o FILE"
        ) from error
    return len(packed.getvalue())


def names_of(device: str) -> tuple[str, ...]:
    """Return the names of the device and of this host, and the client id at the broker, which has
    the device's within it."""
    return device, socket.gethostname(), Identity.of_this_host(device, "").client_id


def make_bundle(arguments: argparse.Namespace) -> int:
    """Make the bundle that the command line describes; return the exit code."""
    configuration = read_configuration(arguments.config, Path("/"))
    settings = configuration.settings
    device = settings.device.id if settings is not None else ""
    redaction = Redaction(names_of(device) if arguments.anonymous else ())
    if settings is not None:
        redaction.add_settings(settings)
    _add_credentials(redaction)
    bundle = gather(configuration, redaction, _announced(parts(configuration)))
    name = "device" if arguments.anonymous else device or "device"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = arguments.output or Path(f"edge-server-support-{name}-{stamp}.tar.gz")
    size = write(bundle, path)
    for part, reason in bundle.missing.items():
        print(f"without {part}: {reason.partition(chr(10))[0]}")
    print(f"{path}: {size / 1024:.0f} KiB, {len(bundle.files)} parts; read it before you send it")
    return 0


def _announced(found: Iterable[Part]) -> Iterable[Part]:
    for name, make in found:
        if sys.stderr.isatty():
            print(f"{name} …", file=sys.stderr, flush=True)
        yield name, make


def _add_credentials(redaction: Redaction) -> None:
    directories: list[Any] = [_CREDENTIAL_FILES]
    if own := os.environ.get("CREDENTIALS_DIRECTORY"):
        directories.append(Path(own))
    for directory in directories:
        with suppress(OSError):
            for path in directory.iterdir():
                redaction.add_file(path)
