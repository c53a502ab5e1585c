"""The model store: private copies of the loaded and the last known good models, by content."""

from __future__ import annotations

import errno
import logging
import os
import re
import tempfile
import threading
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from edge_server.board.board import boot_id
from edge_server.errors import InternalError, ModelConfigError, ModelLoadError
from edge_server.process.disk import error_of_place, floor_bytes, free_bytes, sync
from edge_server.process.threads import run_parallel
from edge_server.repository.content import (
    TornModel,
    content_of,
    copy_model,
    manifest_and_signature,
    remove,
    seal,
)
from edge_server.repository.scan import scan_model
from edge_server.repository.store_state import (
    ChannelMark,
    KeptCopy,
    StateFile,
    StoreState,
    lock_store,
)
from edge_server.repository.verdicts import QuarantineReleases

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from edge_server.repository.manifest import SignaturePolicy
    from edge_server.repository.scan import Fingerprint, ModelTree, SeenFile

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}\Z")
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class StagedModel:
    """A copy in the store, without manifest and signature in its `digest`; its files stay unchanged
    as long as this object is referenced. `source`: the files in the repository when copied."""

    name: str
    digest: str
    directory: Path
    source: tuple[SeenFile, ...]

    @property
    def key(self) -> str:
        return self.directory.parent.name

    @cached_property
    def fingerprint(self) -> Fingerprint:
        try:
            tree = scan_model(self.directory.parent, self.name)
        except OSError as error:
            raise ModelLoadError(f"{self.directory}: {error.strerror or error}") from error
        if tree.fault:
            raise ModelLoadError(tree.fault)
        return content_of(tree).fingerprint


class Copies:
    """Keeps complete copies as `copies/<key>/<model>` below `directory`, never a partial copy.
    Unfinished copies are in `incoming` and are removed at the next start. The time of `<key>` is
    the turn of the copy in seconds, see `mark`. The caller locks all methods but `is_whole`."""

    def __init__(self, directory: Path) -> None:
        self._lent = weakref.WeakValueDictionary[int, StagedModel]()
        self._finished = directory / "copies"
        self._incoming = directory / "incoming"
        for folder in (self._finished, self._incoming):
            folder.mkdir(mode=0o700, exist_ok=True)
        for left in self._incoming.iterdir():
            remove(left)
        # Keyed by the name in either directory.
        finished = (entry for entry in self._finished.iterdir() if _KEY.match(entry.name))
        self._sizes = {entry.name: _size_bytes(entry) for entry in finished}

    @property
    def keys(self) -> set[str]:
        return {name for name in self._sizes if _KEY.match(name)}

    @property
    def size_bytes(self) -> int:
        """Of all copies, unfinished ones included."""
        return sum(self._sizes.values())

    def lend(self, name: str, kept: KeptCopy) -> StagedModel:
        """Return the copy of model `name`, which stays as long as the result is referenced."""
        directory = self._finished / kept.key / name
        staged = StagedModel(name, kept.digest, directory, kept.source)
        self._lent[id(staged)] = staged
        return staged

    def oldest(self, spare: Iterable[str], size_bytes: int) -> set[str] | None:
        """Return the first copies of `spare` that are not in use and together have `size_bytes`;
        None if all of them have less."""
        found: set[str] = set()
        in_use = self._in_use()
        for key in spare:
            if size_bytes > 0 and key not in in_use | found:
                found.add(key)
                size_bytes -= self._sizes[key]
        return None if size_bytes > 0 else found

    def is_whole(self, kept: KeptCopy, name: str) -> bool | None:
        """Return whether the copy is unchanged, byte by byte. None means that the copy cannot be
        read now, for example because the disk fails or too many files are open; the copy may be
        intact."""
        try:
            tree = scan_model(self._finished / kept.key, name)
            if tree.fault:
                return None if tree.directory.is_dir() else False
            content = content_of(tree)
        except (FileNotFoundError, TornModel):
            return False
        except (OSError, ModelConfigError):
            return None
        return (content.key(name), content.digest) == (kept.key, kept.digest)

    def make_place(self, size_bytes: int) -> Path:
        place = Path(tempfile.mkdtemp(dir=self._incoming))
        self._sizes[place.name] = size_bytes
        return place

    def give_up(self, place: Path) -> None:
        del self._sizes[place.name]
        remove(place)

    def finish(self, place: Path, key: str) -> None:
        """Make the contents of `place` the copy of `key`, durably. An existing copy of the same key
        is kept, because its content is the same."""
        if key in self._sizes:
            return
        os.utime(place, (0, 0))
        sync(place)
        place.rename(self._finished / key)
        self._sizes[key] = self._sizes[place.name]
        try:
            sync(self._finished)
        except OSError:
            self.drop(key)
            raise

    def mark(self, state: StoreState) -> None:
        """Mark the copies that serve after a restart, so that `marked` finds them without the
        state; as far as the file system allows."""
        good = (kept for history in state.models.values() for kept in history)
        turns = {kept.key: kept.turn for kept in good if kept.digest not in state.quarantined}
        for key in self.keys:
            place, turn = self._finished / key, turns.get(key, 0)
            with suppress(OSError):
                if place.stat().st_mtime_ns != turn * 10**9:
                    os.utime(place, (turn, turn))

    def marked(self) -> StoreState:
        """Return the state that the marks show; its copies have no `source`."""
        found: list[tuple[str, KeptCopy]] = []
        for key in self.keys:
            try:
                turn = int((self._finished / key).stat().st_mtime)
                for directory in (self._finished / key).iterdir() if turn else ():
                    content = content_of(scan_model(directory.parent, directory.name))
                    found.append((directory.name, KeptCopy(content.digest, key, (), turn)))
            except (OSError, ModelConfigError, ModelLoadError) as error:
                log.warning("model store: copy %s is not used: %s", key, error)
        state = StoreState()
        for name, kept in sorted(found, key=lambda each: each[1].turn):
            state = replace(state, turn=kept.turn - 1).committed(name, kept)
        return state

    def keep_only(self, keys: set[str]) -> None:
        """Remove the copies that are neither those of `keys` nor in use, as far as the file system
        allows."""
        for key in self.keys - keys - self._in_use():
            try:
                self.drop(key)
            except OSError as error:
                log.warning("model store: copy %s cannot be removed: %s", key, error)

    def drop(self, key: str) -> None:
        aside = self._incoming / key
        remove(aside)
        # Renamed first, so that `copies` never holds a partial copy.
        with suppress(FileNotFoundError):
            (self._finished / key).rename(aside)
        del self._sizes[key]
        remove(aside)

    def _in_use(self) -> set[str]:
        return {staged.key for staged in self._lent.values()}


def _size_bytes(directory: Path) -> int:
    """Return the size of the files below `directory`, as far as they can be read."""
    size_bytes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                size_bytes += Path(folder, name).lstat().st_size
    return size_bytes


class ModelStore:
    """Keeps private copies of models, and their state, safe from a power cut. Thread-safe.

    A process that is killed at any moment leaves a store that opens again, with the last known
    good models as they were before or after the interrupted operation. Copies of different models
    are made in parallel.

    Args:
        directory: of the store alone; created if missing.
        most_bytes: the limit of all copies together. Copies that served earlier are removed first,
            oldest first.
        reserve_bytes: free space that copies leave on the disk, or a twentieth of a smaller disk.
        signatures: checks every model when it is copied, and again at every start.
        boot: distinguishes one start of the board from another; empty uses the kernel's boot ID.
        repositories: those whose models the store keeps. For others than the last ones it starts
            without models; the state of the last ones is kept until the store is opened for them
            again, or the space is needed. Empty means the last ones.
    """

    def __init__(
        self,
        directory: Path,
        *,
        most_bytes: int = 8 << 30,
        reserve_bytes: int = 0,
        signatures: SignaturePolicy | None = None,
        boot: str = "",
        repositories: Collection[Path] = (),
    ) -> None:
        """Open the store, and remove the unfinished work of a process that died.
        Raises: AlreadyRunning, SettingsError, Unavailable: as `lock_store`."""
        self.directory = directory
        self._most_bytes = most_bytes
        self._reserve_bytes = reserve_bytes
        self._signatures = signatures
        self._boot = boot or boot_id()
        self._lock = threading.Lock()
        lock = lock_store(directory)
        self._quarantine_releases = QuarantineReleases(directory)
        try:
            self._copies = Copies(directory)
            self._quarantine_releases.make()
        except OSError as error:
            os.close(lock)
            raise error_of_place(
                error, f"model store {directory}: {error}; repair or replace it"
            ) from error
        self._locked: int | None = lock
        self._file = StateFile(directory)
        state = self._file.read()
        self._state = StoreState() if state is None else state
        if state is None:
            state = self._copies.marked()
            log.error(
                "model store %s: its state is lost: %d models are loaded from the copies that "
                "served last; content that was quarantined may be loaded again",
                directory,
                len(state.models),
            )
        # Not resolved: a repository that is a link stays the same when its target changes.
        paths = tuple(sorted({os.path.abspath(path) for path in repositories}))  # noqa: PTH100
        before = state.repositories
        recovered = state.recovered(self._copies.keys, self._boot).followed(paths)
        if before and recovered.repositories != before:
            log.warning(
                "model store %s: was last used for %s, now for %s: the models and the quarantine "
                "of those are not used, but kept until they are followed again; of these %d models "
                "are known",
                directory,
                ", ".join(before),
                ", ".join(paths),
                len(recovered.models),
            )
        self._note(lambda _: recovered)
        self._tidy()
        self.release_noted()

    def close(self) -> None:
        """Release the lock of the store, and clear the loads in progress so that none counts as a
        crash. A second call does nothing."""
        self._note(StoreState.stopped)
        with self._lock:
            lock, self._locked = self._locked, None
        if lock is not None:
            os.close(lock)

    def stage(self, tree: ModelTree) -> StagedModel:
        """Copy the model that `tree` describes; return once the copy is durable.
        Raises: TornModel: the model changed. ModelConfigError: the model is unusable, differs from
            its manifest, is not signed as the policy requires, or larger than the store.
            InternalError: the store has no space, or cannot be written."""
        if tree.size_bytes > self._most_bytes:
            raise ModelConfigError(
                f"{tree.directory}: {tree.size_bytes} bytes, more than the model store may hold "
                f"({self._most_bytes})"
            )
        with self._writing(), self._place(tree.size_bytes) as place:
            content = copy_model(tree, place / tree.name)
            self._check_signature(tree.name, place / tree.name)
            kept = KeptCopy(content.digest, content.key(tree.name), tree.files)
            with self._lock:
                staged = self._copies.lend(tree.name, kept)
                is_known = kept.key in self._copies.keys
            if is_known:
                if self._copies.is_whole(kept, tree.name):
                    return staged
                log.warning("model %s: its copy %s is damaged: replaced", tree.name, kept.key)
                with self._lock:
                    self._copies.drop(kept.key)
            seal(place / tree.name)
            with self._lock:
                self._copies.finish(place, kept.key)
        return staged

    # What only reads the state needs no lock, as a state never changes.

    def has_served(self, name: str, digest: str) -> bool:
        return any(kept.digest == digest for kept in self._state.models.get(name, ()))

    def commit(self, staged: StagedModel) -> None:
        """Make `staged` the last known good copy of its model; return once that is durable. The
        predecessor stays in the store for a rollback, and counts where this raises InternalError.
        """
        kept = KeptCopy(staged.digest, staged.key, staged.source)
        with self._lock, self._writing():
            self._save(self._state.committed(staged.name, kept))
            self._tidy()

    def forget(self, name: str) -> None:
        """Remove all copies of `name`, which was removed from the repository. On a full disk the
        copies go first, to make room for the state: a copy that the state mentions and that is not
        there is one that is dropped at the next start."""
        with self._lock, self._writing():
            state = self._state.forgotten(name)
            try:
                self._save(state)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._state = state
                self._tidy()
                self._save(state)
            self._tidy()

    def last_good(self) -> dict[str, StagedModel]:
        """Return model name → last known good copy, each verified byte by byte. A damaged copy is
        dropped. If the newest copy is damaged, quarantined or not signed as the policy requires
        now, the copy before it counts."""
        # Hashing 200 MB takes 0.1 to 0.4 s on one core.
        models = self._state.models.items()
        found = run_parallel("verify", 4, lambda model: self._newest_good(*model), models)
        return {staged.name: staged for staged in found if staged is not None}

    def history(self, name: str) -> list[StagedModel]:
        """Return the copies of `name` that served, newest first, without verifying them."""
        with self._lock:
            return [self._copies.lend(name, kept) for kept in self._state.models.get(name, ())]

    @contextmanager
    def loading(self, staged: StagedModel, part: str = "") -> Iterator[None]:
        """Record on disk, inside the block, that `staged` is loading, in case the process dies. The
        end of the block, even by an exception, clears the record; an end without an exception
        clears earlier deaths, too. A death counts against the digest `part`, if given; a block for
        `staged` itself goes on after it."""
        name = staged.name
        around = self._state.loading.get(name)
        self._note(lambda state: state.began(name, part or staged.digest, self._boot))
        loaded = False
        try:
            yield
            loaded = True
        finally:
            self._note(lambda state: state.ended(name, loaded=loaded))
            if around is not None:
                self._note(lambda state: state.began(name, around.digest, around.boot))

    def suspected(self, digest: str) -> bool:
        return digest in self._state.deaths

    def quarantine(self, digest: str, reason: str, name: str = "") -> None:
        """Quarantine the content: it is not loaded, even after a restart, until its release."""
        self._note(lambda state: state.quarantine(digest, reason, name))

    def quarantined(self, digest: str) -> str:
        """Return the reason of the quarantine of `digest`, or "" if it is not quarantined."""
        return self._state.quarantined.get(digest, "")

    def quarantined_as(self, digest: str) -> str:
        """Return the model that had this content when it was quarantined; "" if not known."""
        return self._state.quarantined_as.get(digest, "")

    def channel(self, name: str) -> ChannelMark:
        return self._state.channels.get(name, ChannelMark())

    def mark_channel(self, name: str, mark: ChannelMark) -> None:
        """Return once `mark` is durable; raises InternalError where the store cannot be written."""
        with self._lock, self._writing():
            self._save(replace(self._state, channels={**self._state.channels, name: mark}))

    def release(self, digest: str) -> None:
        self._note(lambda state: state.released(digest))

    def release_noted(self) -> dict[str, str]:
        """Release the digests noted in `QuarantineReleases`; return each with its model's name."""
        released = {}
        for digest in self._quarantine_releases.pop_all():
            name = self.quarantined_as(digest)
            log.info("model %s: %.12s is released from quarantine", name or "?", digest)
            self.release(digest)
            released[digest] = name
        return released

    def _newest_good(self, name: str, history: Sequence[KeptCopy]) -> StagedModel | None:
        for kept in history:
            if self.quarantined(kept.digest):
                continue
            with self._lock:
                staged = self._copies.lend(name, kept)
            whole = self._copies.is_whole(kept, name)
            if whole is None:
                log.warning("model %s: its copy %s cannot be read now: not used", name, kept.key)
                continue
            if not whole:
                log.warning("model %s: its copy %s is damaged: dropped", name, kept.key)
                self._note(partial(StoreState.without, keys={kept.key}))
                continue
            try:
                self._check_signature(name, staged.directory)
            except ModelConfigError as error:
                log.warning("model %s: its copy %s is not used: %s", name, kept.key, error)
                continue
            return staged
        return None

    def _check_signature(self, name: str, directory: Path) -> None:
        if self._signatures is not None:
            self._signatures.check(name, manifest_and_signature(directory))

    @contextmanager
    def _place(self, size_bytes: int) -> Iterator[Path]:
        """Make room for a copy and yield its directory; remove an unfinished copy at the end."""
        with self._lock:
            self._make_room(size_bytes)
            place = self._copies.make_place(size_bytes)
        try:
            yield place
        finally:
            with self._lock:
                self._copies.give_up(place)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "make room there" if error.errno in _FULL else "check the disk"
            raise InternalError(
                f"model store {self.directory}: {error.strerror or error}; {remedy}, or give it "
                "another directory"
            ) from error

    def _note(self, change: Callable[[StoreState], StoreState]) -> None:
        """Change the state as `_save` does; if it cannot be written, keep it in memory and log."""
        with self._lock:
            before, self._state = self._state, change(self._state)
            if self._state == before or self._locked is None:
                return
            try:
                self._file.write(self._state)
            except OSError as error:
                log.warning(
                    "model store %s: %s; a restart will not know of it", self.directory, error
                )

    # The caller of the methods below holds the lock.

    def _save(self, state: StoreState) -> None:
        if self._locked is None:
            raise OSError("it is closed")
        self._file.write(state)
        self._state = state

    def _tidy(self) -> None:
        """Remove the copies that are neither recorded in the state nor in use; mark the rest."""
        self._copies.keep_only({kept.key for kept in self._state.kept})
        self._copies.mark(self._state)

    def _make_room(self, size_bytes: int) -> None:
        """Drop copies until there is space for `size_bytes`: copies that served before,
        oldest first."""
        self._tidy()
        beyond = self._copies.size_bytes + size_bytes - self._most_bytes
        lacking = size_bytes + self._floor_bytes() - free_bytes(self.directory)
        spare = [kept.key for kept in self._state.spare]
        going = self._copies.oldest(spare, max(beyond, lacking))
        if going is None and beyond >= lacking:
            raise InternalError(
                f"model store {self.directory}: no room for {size_bytes} bytes beside what "
                f"serves, of {self._most_bytes} in all; let it take more, or serve less"
            )
        if going is None:
            raise InternalError(
                f"model store {self.directory}: no room for {size_bytes} bytes: the disk has "
                f"{free_bytes(self.directory)} left, of which {self._floor_bytes()} stay free "
                "(repository.disk_reserve_bytes); make room there, or serve less"
            )
        if going:
            self._save(self._state.without(going))
            self._tidy()

    def _floor_bytes(self) -> int:
        return floor_bytes(self.directory, self._reserve_bytes) if self._reserve_bytes else 0
