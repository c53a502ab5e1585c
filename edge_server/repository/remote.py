"""Models elsewhere, fetched into a repository: what is behind a URL, and archives of models.

Of an archive that may come from anywhere only files and directories come out: no links, no devices,
no path that leaves the model, no more bytes than a model may have, and none that a small archive
could hardly hold. `Incoming.add` checks each path again.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import urlsplit

from edge_server import errors
from edge_server.board.installation import remedy
from edge_server.errors import ModelConfigError, NotFound, SettingsError, Unavailable
from edge_server.model_config.files import CONFIG_NAME
from edge_server.repository.manifest import (
    ABOUT_CONTENT,
    MOST_MANIFEST_BYTES,
    NAME,
    SIGNATURE_NAME,
    Manifest,
)
from edge_server.repository.remote_files import (
    ConnectionCut,
    HttpsStore,
    OciRepository,
    RemoteFile,
    S3Store,
    download,
)
from edge_server.repository.scan import MOST_BYTES, MOST_FILES
from edge_server.repository.transfer import (
    BROKEN,
    LONGEST_PATH_BYTES,
    BrokenArchive,
    Entry,
    read_archive,
    receive,
    write_archive,
    writing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from typing_extensions import Self

    from edge_server.repository.remote_files import Body
    from edge_server.repository.transfer import Delivery


ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".zip")
_IMAGE_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
# Weights hardly shrink, and zeros a thousandfold: a bomb is refused before it is unpacked. Small
# archives of text shrink well.
_MOST_RATIO = 100
_ALWAYS_BYTES = 64 << 20
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    ValueError,
)


@dataclass(frozen=True)
class Origin:
    """A model elsewhere."""

    name: str
    files: tuple[RemoteFile, ...]
    close: Callable[[], object]
    annotations: Mapping[str, str] = field(default_factory=dict)


def open_origin(url: str, sha256: str = "", ca_file: str | None = None) -> Origin:
    """Return what is behind `url`.

    Args:
        url: one that ends with `/` is a directory with a manifest, any other, but for `oci://`, an
            archive.
        sha256: of the archive or of the manifest; empty without.
        ca_file: PEM; the authority of a registry's certificate; None are those of the system.

    Raises: SettingsError: the URL is wrong, or nothing says what the digest of the content is.
        ModelConfigError: the manifest is not as its digest says, or is none. Unavailable."""
    parts = urlsplit(url)
    if parts.scheme not in ("https", "s3", "oci") or not parts.netloc:
        raise SettingsError(
            f"{url}: give it as s3://BUCKET/KEY, https://HOST/PATH or oci://REGISTRY/REPOSITORY:TAG"
        )
    if parts.username or parts.password:
        raise SettingsError(
            f"{parts.scheme}://…@{parts.hostname}: no password in a URL, which others can read; "
            "the store's own files have it (~/.netrc, ~/.aws/credentials, ~/.docker/config.json)"
        )
    store: HttpsStore | S3Store
    try:
        if parts.scheme == "oci":
            store = OciRepository(url.removeprefix("oci://"), ca_file)
        elif parts.scheme == "s3":
            store = S3Store(parts.netloc)
        else:
            store = HttpsStore(f"https://{parts.netloc}")
    except ImportError as error:
        raise Unavailable(
            f"{url}: {error.name} is not installed; {remedy(error.name or '')}"
        ) from error
    except ValueError as error:
        raise SettingsError(f"{url}: {error}; give it as oci://REGISTRY/REPOSITORY:TAG") from error
    path = parts.path.lstrip("/")
    try:
        if isinstance(store, OciRepository):
            return _artifact(store, url, sha256)
        return (_directory if path.endswith("/") else _archive)(store, path, url, sha256)
    except BaseException:
        store.close()
        raise


def _artifact(repository: OciRepository, url: str, sha256: str) -> Origin:
    data = _small_file(partial(repository.manifest, ", ".join(_IMAGE_MANIFESTS)), url)
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    for wanted in (repository.digest, f"sha256:{sha256}" if sha256 else ""):
        if wanted and wanted != found:
            raise ModelConfigError(f"{url}: its manifest has {found}, not {wanted}")
    try:
        manifest = json.loads(data)
        layers = [_layer(repository, layer, url) for layer in manifest["layers"]]
        annotations = {str(k): str(v) for k, v in (manifest.get("annotations") or {}).items()}
    except (
        *(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),
    ) as error:
        raise ModelConfigError(
            f"{url}: is no image manifest ({error}); of an index of several platforms, give the "
            "digest of one"
        ) from error
    return Origin(repository.name, tuple(layers), repository.close, annotations)


def _layer(repository: OciRepository, layer: Mapping[str, Any], url: str) -> RemoteFile:
    algorithm, _, digest = str(layer["digest"]).partition(":")
    if algorithm != "sha256" or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ModelConfigError(f"{url}: a layer has digest {layer['digest']}; only sha256 is known")
    annotations = layer.get("annotations") or {}
    title = str(annotations.get("org.opencontainers.image.title", ""))
    # A single file has the media type of a tar, too; a directory's is compressed.
    unpack = (
        annotations.get("io.deis.oras.content.unpack") == "true"
        or not title
        or str(layer.get("mediaType", "")).endswith("gzip")
    )
    fetch = partial(repository.blob, f"sha256:{digest}")
    return RemoteFile(title or f"{digest[:12]}.tar", digest, int(layer["size"]), fetch, unpack)


def _archive(store: HttpsStore | S3Store, path: str, url: str, sha256: str) -> Origin:
    file = path.rpartition("/")[2]
    suffix = next((s for s in sorted(ARCHIVES, key=len)[::-1] if file.endswith(s)), None)
    if suffix is None:
        raise SettingsError(
            f"{url}: neither an archive ({', '.join(ARCHIVES)}) nor a directory, which ends with /"
        )
    digest = sha256 or store.sha256(path)
    if not digest:
        raise SettingsError(
            f"{url}: nothing says what its content should be; give --sha256 with the digest that "
            "its maker publishes"
        )
    name = file.removesuffix(suffix)
    one = RemoteFile(file, digest, None, partial(store.open, path), unpack=True)
    return Origin(name, (one,), store.close)


def _directory(store: HttpsStore | S3Store, path: str, url: str, sha256: str) -> Origin:
    about, data = _about(store, path, url, NAME)
    if sha256 and about.sha256 != sha256:
        raise ModelConfigError(
            f"{url}{NAME}: has sha256 {about.sha256}, not {sha256}; nothing was taken"
        )
    manifest = Manifest.parse(data)
    files = [about]
    with suppress(NotFound):  # a daemon that wants a signature checks it
        files.append(_about(store, path, url, SIGNATURE_NAME)[0])
    files += [
        RemoteFile(name, file.sha256, file.size, partial(store.open, path + name))
        for name, file in sorted(manifest.files.items())
        if name not in ABOUT_CONTENT
    ]
    return Origin(manifest.model, tuple(files), store.close)


def _about(store: HttpsStore | S3Store, path: str, url: str, name: str) -> tuple[RemoteFile, bytes]:
    """Return the manifest or the signature of the model at `path`, and its bytes."""
    data = _small_file(partial(store.open, path + name, 0, ""), f"{url}{name}")
    digest = hashlib.sha256(data).hexdigest()
    return RemoteFile(name, digest, len(data), partial(store.open, path + name)), data


def _small_file(fetch: Callable[[], Body], what: str) -> bytes:
    """Return the whole file that `fetch` opens, at most as long as a manifest may be."""
    data = bytearray()
    try:
        for piece in fetch().pieces:
            data += piece
            if len(data) > MOST_MANIFEST_BYTES:
                raise ModelConfigError(
                    f"{what}: more than {MOST_MANIFEST_BYTES >> 20} MiB; is it a manifest?"
                )
    except ConnectionCut as error:
        raise Unavailable(f"{what}: {error}; try again") from error
    return bytes(data)


def fetch(
    origin: Origin, cache: Path, progress: Callable[[int], object], name: str
) -> tuple[Path, Delivery]:
    """Return the directory in `cache` that holds the model of `origin`, as the model `name`. What
    has been fetched stays in `cache`, so that another call goes on where this one ends. Under
    another name than the origin's the model has no manifest, which names its model."""
    fetched, unpacked = cache / "fetched", cache / "unpacked"
    with writing(cache):
        fetched.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unpacked, ignore_errors=True)
        unpacked.mkdir()
    # One file each, by number: a path of the origin's means nothing here yet.
    paths = {file: fetched / f"{i}-{file.sha256}" for i, file in enumerate(origin.files)}
    for file, path in paths.items():
        download(file, path, progress)
    entries = _entries(paths, keep_manifest=name == origin.name)
    return unpacked / name, receive(unpacked, entries, name)


def _entries(paths: Mapping[RemoteFile, Path], *, keep_manifest: bool) -> Iterator[Entry]:
    for file in sorted(paths, key=lambda each: each.path != NAME):
        if file.unpack:
            for entry in archive_entries(paths[file]):
                if keep_manifest or entry.path not in ABOUT_CONTENT:
                    yield entry
        elif keep_manifest or file.path not in ABOUT_CONTENT:
            status = paths[file].stat()
            with paths[file].open("rb") as data:
                yield Entry(file.path, data.read, status.st_size, status.st_mtime_ns)


class _Member(NamedTuple):
    path: str
    size: int
    is_directory: bool
    executable: bool
    source: Any


def archive_entries(path: Path) -> Iterator[Entry]:
    """Yield the directories and files of the model in the archive at `path`, the manifest first;
    each is to be read before the next. The model is what lies beside its config.pbtxt, or beside
    version directories; directories above it are left out.
    Raises: ModelConfigError: the archive is damaged, holds anything but one model, or is too large.
    """
    with _naming(path), _opened(path) as (members, read):
        root = _root(path, members)
        for member in sorted(members, key=lambda each: each.path != f"{root}{NAME}"):
            inside = member.path.removeprefix(root)
            if not member.is_directory:
                with read(member) as file:
                    pieces = partial(_read, path, file)
                    yield Entry(inside, pieces, member.size, 0, member.executable)
            elif member.path.startswith(root):
                yield Entry(inside)


def _read(path: Path, file: IO[bytes], size: int) -> bytes:
    with _naming(path):
        return file.read(size)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what a damaged archive raises into an error that names it."""
    try:
        yield
    except _BROKEN as error:
        raise BrokenArchive(f"{path.name}: is damaged: {error}; fetch it again") from error
    except (RuntimeError, NotImplementedError) as error:
        raise ModelConfigError(f"{path.name}: cannot be unpacked: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[_Member], Callable[[_Member], Any]]]:
    """Open the archive; yield its members, checked, and what opens one of them."""
    limit = max(_ALWAYS_BYTES, _MOST_RATIO * path.stat().st_size)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            found = list(_checked(path, limit, map(_of_zip, archive.infolist())))
            yield found, lambda member: archive.open(member.source)
        return
    with tarfile.open(path, tarinfo=_BoundedHeader) as tar:
        yield list(_checked(path, limit, map(_of_tar, tar))), lambda m: tar.extractfile(m.source)


class _BoundedHeader(tarfile.TarInfo):
    """A header of a tar archive. `tarfile` reads one of an extension whole, whatever it claims."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) and info.size > LONGEST_PATH_BYTES:
            raise ModelConfigError(f"a header of it has {info.size} bytes; is it a model?")
        return info


def _of_zip(info: zipfile.ZipInfo) -> _Member:
    mode = info.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ModelConfigError(f"{info.filename[:200]!r} is neither a file nor a directory")
    runs = bool(mode & stat.S_IXUSR)
    return _Member(info.filename, info.file_size, info.is_dir(), runs, info)


def _of_tar(info: tarfile.TarInfo) -> _Member:
    if not (info.isdir() or info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)):
        raise ModelConfigError(f"{info.name[:200]!r} is neither a file nor a directory")
    runs = bool(info.mode & stat.S_IXUSR)
    return _Member(info.name, info.size, info.isdir(), runs, info)


def _checked(path: Path, limit: int, members: Iterator[_Member]) -> Iterator[_Member]:
    """Yield the members, with plain paths, as long as they stay within the limits."""
    size = 0
    for count, member in enumerate(members):
        size += member.size
        if count >= MOST_FILES or size > min(limit, MOST_BYTES) or member.size < 0:
            raise ModelConfigError(
                f"{path.name}: more than {MOST_FILES} files, or {size} bytes of "
                f"{path.stat().st_size}; is it a model?"
            )
        plain = member.path.removeprefix("./").rstrip("/")
        parts = plain.split("/")
        if plain.startswith("/") or ".." in parts or "\\" in plain or "\0" in plain:
            raise ModelConfigError(
                f"{path.name}: {member.path[:200]!r} leads out of the model; nothing was taken"
            )
        if plain and plain != ".":
            yield member._replace(path=plain)


def _root(path: Path, members: list[_Member]) -> str:
    """Return the model's directory in the archive, with a `/`, or "" for the archive itself."""
    folders = {
        member.path.removesuffix(CONFIG_NAME)
        for member in members
        if member.path == CONFIG_NAME or member.path.endswith(f"/{CONFIG_NAME}")
    }
    for member in members:
        parts = member.path.split("/")
        version = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if (
            not folders
            and version is not None
            and (member.is_directory or len(parts) > version + 1)
        ):
            folders = {"".join(f"{part}/" for part in parts[:version])}
    if not folders:
        raise ModelConfigError(f"{path.name}: holds no model: neither {CONFIG_NAME} nor a version")
    root = min(folders, key=len)
    outside = [m for m in members if not f"{m.path}/".startswith(root) and not m.is_directory]
    if outside:
        raise ModelConfigError(
            f"{path.name}: {outside[0].path[:200]!r} lies outside of {root or 'the model'}; an "
            "archive holds one model"
        )
    return root


_SSH_FAILED = 255
_NOT_FOUND = 127
# The class that makes this process end with the code that the one there has ended with.
_ERRORS = {69: errors.Unavailable, 75: errors.AlreadyRunning, 78: errors.ModelConfigError}
_END_S = 10.0
# Precedes the output there, because a login shell may print a greeting before it.
_MARK = b"edge-server-output\n"
_LONGEST_LINE_BYTES = 1 << 20
_LONGEST_OUTPUT_BYTES = 64 << 20
_REMOTE = re.compile(
    r"(?P<user>[^@/\s]+@)?(?P<host>\[[^\]\s]+\]|[^:/@\[\]\s]+):(?P<path>.*)", re.DOTALL
)


def repository_at(text: str, ssh: str) -> Path | RemoteRepository:
    match = _REMOTE.fullmatch(text)
    if match is None:
        return Path(text).expanduser()
    host = f"{match['user'] or ''}{match['host'].strip('[]')}"
    if host.startswith("-") or not match["path"]:
        raise errors.SettingsError(f"{text}: give it as DIRECTORY or [USER@]HOST:DIRECTORY")
    return RemoteRepository(host, match["path"], shlex.split(ssh))


class RemoteRepository:
    def __init__(self, host: str, path: str, ssh: Sequence[str]) -> None:
        self._host = host
        self._ssh = ssh
        self._path = path

    def __str__(self) -> str:
        return f"{self._host}:{self._path}"

    @property
    def directory(self) -> str:
        """The path for the command line there: neither an option nor a host."""
        return self._path if self._path.startswith(("/", "~")) else f"./{self._path}"

    def run(self, *verb: str, entries: Iterator[Entry] | None = None) -> None:
        """Run `edge-server models` with `verb` there, and `entries` as an archive at its standard
        input; what it prints is printed here.
        Raises: EdgeServerError: the verb failed there, with its text. Unavailable: the host cannot
            be reached, or has no edge-server."""
        pipe = subprocess.DEVNULL if entries is None else subprocess.PIPE
        with self._running(verb, stdin=pipe) as process:
            if entries is not None:
                write_archive(cast("BinaryIO", process.stdin), entries)

    def output(self, *verb: str) -> bytes:
        """Return what `edge-server models` with `verb` prints there. Raises: see `run`."""
        with self._running(verb, stdout=subprocess.PIPE) as process:
            return _after_greeting(process).read(_LONGEST_OUTPUT_BYTES)

    def entries(self, name: str, progress: Callable[[int], None] | None = None) -> Generator[Entry]:
        """Return the entries of model `name`; they end only if the process there succeeded."""
        verb = ("pull", name, "--from", self.directory, "--to", "-")
        with self._running(verb, stdout=subprocess.PIPE) as process:
            output = _after_greeting(process)
            yield from read_archive(output, progress)
            while output.read(_LONGEST_LINE_BYTES):
                pass  # what follows the archive, so that the process there can end

    @contextmanager
    def _running(
        self,
        verb: Sequence[str],
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        there = shlex.join(["edge-server", "models", *verb])
        if stdout is not None:
            there = f"echo {_MARK.decode().strip()}; {there}"
        command = [*self._ssh, "--", self._host, there]
        with tempfile.TemporaryFile() as stderr:
            try:
                process = subprocess.Popen(  # noqa: S603 - no shell here, and quoted for the one there
                    command, stdin=stdin, stdout=stdout, stderr=stderr
                )
            except OSError as error:
                raise errors.Unavailable(
                    f"{command[0]}: cannot be run: {error.strerror}; install OpenSSH's client"
                ) from error
            broken: Exception | None = None
            try:
                try:
                    yield process
                except (BrokenPipeError, BrokenArchive) as error:
                    broken = error  # the process there has a better text
                _close(process)
                process.wait()
            except BaseException:
                # At the end of its input the process there discards an incomplete model.
                _close(process)
                _end(process)
                raise
            self._check(process.returncode, stderr)
            if broken is not None:
                raise errors.InternalError(f"{self._host}: {BROKEN}") from broken

    def _check(self, code: int, stderr: IO[bytes]) -> None:
        stderr.seek(0)
        text = stderr.read(_LONGEST_LINE_BYTES).decode(errors="backslashreplace").strip()
        if code in (0, _SSH_FAILED) and text:
            print(text, file=sys.stderr)
        if code == _SSH_FAILED:
            raise errors.Unavailable(f"{self._host}: ssh could not connect, or was refused")
        if code == _NOT_FOUND:
            raise errors.Unavailable(
                f"{self._host}: has no edge-server in its PATH, which takes the model there; "
                "install it, or push to a directory here and copy that"
            )
        if code:
            lines = text.splitlines() or [f"edge-server there ended with {code}, without a reason"]
            raise _ERRORS.get(code, errors.InternalError)(
                "\n".join(f"{self._host}: {line.removeprefix('edge-server: ')}" for line in lines)
            )


def _after_greeting(process: subprocess.Popen[bytes]) -> BinaryIO:
    output = cast("BinaryIO", process.stdout)
    for line in iter(lambda: output.readline(_LONGEST_LINE_BYTES), b""):
        if line.endswith(_MARK):
            return output
    raise BrokenArchive(BROKEN)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
