"""Whatever call a process dies at, or fails at, its model store is as before or as after it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from support.dropping_disk import TRACED, DroppingDisk

from edge_server.repository.content import content_of
from edge_server.repository.scan import scan_model
from edge_server.repository.store import ModelStore, StagedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("strace")

# Every call that changes what is on disk, or when it gets there.
CHANGES = "write|fsync|fdatasync|rename.*|mkdir.*|unlink.*|rmdir|chmod|fchmod.*|ftruncate|openat"
REFUSED = 3
UNKNOWN = "e" * 64
WRITER = Path(__file__).parents[1] / "support" / "store_writer.py"


class Call(NamedTuple):
    """The `count`-th call of that name, in one process."""

    name: str
    count: int
    text: str

    @property
    def descriptor(self) -> str:
        """The path of the file that its first argument is open on."""
        return self.text.split("<")[1].split(">")[0]


class Bench:
    """A store with a past, to be taken by writers, each its own copy of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = folder / "repository"
        self.base = folder / "base"
        store = ModelStore(self.base, boot="1")
        for content in "abc":
            self.write("m", content * 100)
            self.old = store.stage(scan_model(self.repository, "m"))
            store.commit(self.old)
        self.write("other", "other")
        self.other = store.stage(scan_model(self.repository, "other"))
        store.commit(self.other)
        store.quarantine("1" * 64, "long ago")
        # What a process that died has left: a load, a copy half made, and one that nobody knows.
        with store.loading(StagedModel("slow", "2" * 64, Path(), ())):
            left = (self.base / "state.json").read_bytes()
        store.close()
        (self.base / "state.json").write_bytes(left)
        (self.base / "incoming/half/m").mkdir(parents=True)
        (self.base / "incoming/half/m/config.pbtxt").write_text("x")
        shutil.copytree(self.old.directory.parent, self.base / "copies" / UNKNOWN)
        self.write("m", "new" * 1000)
        command = [sys.executable, WRITER, self.repository]
        pipe = subprocess.PIPE
        self._writers = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.traced = self._trace()

    def write(self, name: str, content: str) -> None:
        directory = self.repository / name
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "1").mkdir(parents=True)
        (directory / "2").mkdir()
        (directory / "config.pbtxt").write_text("")
        (directory / "1/model.py").write_text(content)

    def run(self, name: str, *options: str) -> tuple[Path, int]:
        """The store as a writer that strace treats like that left it, and how that ended."""
        store = self.folder / name
        shutil.copytree(self.base, store)
        to, heard = self._writers.stdin, self._writers.stdout
        assert to is not None
        assert heard is not None
        to.write(f"{store}\n")
        to.flush()
        writer = int(heard.readline())
        command = ["strace", *options, "-p", str(writer)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            assert "attached" in (said := strace.stderr.readline()), said
            os.kill(writer, signal.SIGCONT)
            strace.communicate()
        return store, int(heard.readline())

    def close(self) -> None:
        self._writers.communicate()

    def _trace(self) -> list[Call]:
        log = self.folder / "log"
        options = ["-y", "-s", "9999", "-o", str(log), "-e", f"trace=/^({CHANGES})$"]
        store, status = self.run("traced", *options)
        assert status == 0
        counts: dict[str, int] = {}
        calls = []
        for line in log.read_text().splitlines():
            if match := re.match(r"(\w+)\(", line):
                counts[match[1]] = counts.get(match[1], 0) + 1
                if str(store) in line and (match[1] != "openat" or "O_CREAT" in line):
                    text = line.replace(f"{store}/", "").replace(str(store), "STORE")
                    calls.append(Call(match[1], counts[match[1]], text))
        return calls


@pytest.fixture(scope="module")
def bench(in_memory: Callable[[], Path]) -> Iterator[Bench]:
    made = Bench(in_memory())
    yield made
    made.close()


def everywhere(bench: Bench, calls: list[Call], injected: str) -> list[tuple[Call, Path, int]]:
    """Each of `calls`, the store as a writer to whom this happened there left it, and its end."""
    found = []
    for call in calls:
        inject = f"inject={call.name}:{injected}:when={call.count}"
        options = ["-o", "/dev/null", "-e", f"trace={call.name}", "-e", inject]
        store, status = bench.run(f"{injected[:6]}-{call.name}-{call.count}", *options)
        found.append((call, store, status))
    return found


def require_valid(bench: Bench, directory: Path, at: str) -> str:
    """Open the store anew, and go on with it; what served last of `m`."""
    for place in (directory / "copies").iterdir():
        keys = [content_of(scan_model(place, path.name)).key(path.name) for path in place.iterdir()]
        assert keys == [place.name] or place.name == UNKNOWN, at
    store = ModelStore(directory, boot="1")
    try:
        good = store.last_good()
        serves = (good["m"].directory / "1/model.py").read_text()
        assert serves in {"c" * 100, "new" * 1000}, at
        assert (good["m"].digest == bench.old.digest) == (serves == "c" * 100), at
        if "other" in good:
            assert (good["other"].directory / "1/model.py").read_text() == "other", at
        kept = store.history("m") + store.history("other")
        keys = {staged.directory.parent.name for staged in kept}
        assert {entry.name for entry in (directory / "copies").iterdir()} == keys, at
        assert not list((directory / "incoming").iterdir()), at
        # One death is not two.
        assert not store.quarantined(good["m"].digest), at
        again = store.stage(scan_model(bench.repository, "m"))
        with store.loading(again):
            store.commit(again)
    finally:
        store.close()
    store = ModelStore(directory, boot="1")
    assert store.last_good()["m"] == again, at
    store.close()
    return serves


def is_held(directory: Path) -> bool:
    """Whether the content that the writer put into quarantine is there after a start."""
    store = ModelStore(directory, boot="1")
    try:
        return bool(store.quarantined("0" * 64))
    finally:
        store.close()


def test_a_process_that_dies_at_any_call_leaves_a_store_that_goes_on(bench: Bench) -> None:
    killed = everywhere(bench, bench.traced, "signal=SIGKILL")
    served = []
    for call, directory, status in killed:
        assert status == -signal.SIGKILL, f"it was not killed at {call.text}"
        served.append(require_valid(bench, directory, call.text))
    # In the order of the calls: the quarantine is there from one of them on, and for good.
    held = [is_held(directory) for _, directory, _ in killed]
    begun = held.index(True)
    assert held == [False] * begun + [True] * (len(held) - begun)
    assert "rename" in bench.traced[begun - 1].text
    # Likewise the new model, and the old one before.
    commit = served.index("new" * 1000)
    assert served == ["c" * 100] * commit + ["new" * 1000] * (len(served) - commit)
    assert "rename" in bench.traced[commit - 1].text


def test_a_call_that_fails_leaves_a_store_that_goes_on(bench: Bench) -> None:
    fallible = re.compile("write|fsync|mkdir|openat|rename")
    calls = [call for call in bench.traced if fallible.match(call.name)]
    failed = [
        *everywhere(bench, calls[::3], "error=ENOSPC"),
        *everywhere(bench, calls[1::3], "error=EIO"),
    ]
    for call, directory, status in failed:
        assert status in {0, REFUSED}, call.text
        require_valid(bench, directory, call.text)
    assert sum(status == REFUSED for _, _, status in failed) > 5


@pytest.mark.parametrize("names_last", [True, False])
def test_a_power_cut_that_drops_what_was_not_synced_leaves_a_store_that_goes_on(
    bench: Bench, names_last: bool
) -> None:
    store = bench.folder / f"dropped-{names_last}"
    log = bench.folder / "dropped.log"
    options = ["-y", "-xx", "-s", "99999", "-o", str(log), "-e", f"trace=/^({TRACED})$"]
    disk = DroppingDisk(bench.base, names_last=names_last)
    _, status = bench.run(store.name, *options)
    assert status == 0
    served = []
    for number, line in enumerate(log.read_text().splitlines()):
        if disk.replay(line, str(store)):
            left = bench.folder / f"left-{names_last}-{number}"
            disk.write_to(left)
            served.append(require_valid(bench, left, line))
            shutil.rmtree(left)
    # In the order of the calls: the old model up to one of them, the new one from there on.
    commit = served.index("new" * 1000)
    assert served == ["c" * 100] * commit + ["new" * 1000] * (len(served) - commit)
    assert 3 < commit < len(served)


def test_what_a_name_stands_for_is_on_the_disk_before_the_name(bench: Bench) -> None:
    """A power cut keeps no more than was asked for, in no order but the one that was asked for."""
    dirty: set[str] = set()
    renamed = 0
    for call in bench.traced:
        names = call.text.split('"')[1::2]
        if " = -1 " in call.text or "lock" in names:
            continue  # it changed nothing
        match call.name:
            case "fsync":
                dirty.discard(call.descriptor)
            case "write" | "fchmod":
                dirty.add(call.descriptor)
            case "chmod" | "fchmodat" | "fchmodat2":
                dirty.add(names[0])
            case "mkdir" | "mkdirat" | "openat":
                dirty |= {names[0], _above(names[0])}
            case "rename" | "renameat" | "renameat2":
                source, target = names
                if target.startswith("incoming/"):
                    assert "STORE" not in dirty, "what the state on disk speaks of is removed"
                else:
                    assert not {path for path in dirty if f"{path}/".startswith(f"{source}/")}
                    renamed += 1
                if target == "state.json":
                    assert "copies" not in dirty, "it may speak of a copy that is not there"
                dirty.add(_above(target))
    assert renamed > 10
    assert "STORE" not in dirty


def _above(path: str) -> str:
    return path.rpartition("/")[0] or "STORE"
