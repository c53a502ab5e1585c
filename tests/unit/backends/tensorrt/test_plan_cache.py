"""Plans are cache, the ONNX file is truth: found by what they were built of, for and on."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edge_server.backends.tensorrt import plan_cache
from edge_server.backends.tensorrt.plan_cache import (
    PlanCache,
    PlanOrder,
    build_lock,
    ensure_plan,
    make_plan,
)
from edge_server.backends.tensorrt.plan_options import (
    BuildOptions,
    DeviceFacts,
    plan_faults,
    read_side_car,
    side_car_path,
)
from edge_server.backends.tensorrt.plan_process import (
    BuildEvent,
    BuildJob,
    PlanBuilt,
    Progressed,
    Step,
)
from edge_server.errors import Cancelled, InternalError, ModelConfigError, Unavailable
from edge_server.process.threads import GivenUp, while_wanted

if TYPE_CHECKING:
    from collections.abc import Callable

ORIN = DeviceFacts("10.3.0.30", "8.7", "Orin", 16, "36.4.3", 2)
OPTIONS = BuildOptions()


class Builds:
    """Builds a plan of its own count, on `facts`."""

    def __init__(self, facts: DeviceFacts = ORIN) -> None:
        self.facts = facts
        self.jobs: list[BuildJob] = []
        self.fails = False
        self.on_build: Callable[[], None] = lambda: None

    def __call__(self, job: BuildJob, on_event: Callable[[BuildEvent], None]) -> PlanBuilt:
        self.jobs.append(job)
        on_event(Progressed(0.5, "Building engine"))
        Path(job.out).write_bytes(b"plan %d" % len(self.jobs))
        self.on_build()
        if self.fails:
            raise InternalError("TensorRT built nothing")
        return PlanBuilt(self.facts, "fp32", (), (), None, 1.0)


@pytest.fixture
def onnx(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"onnx")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> PlanCache:
    return PlanCache(tmp_path / "plans")


def ignore(event: BuildEvent) -> None:
    del event


def ensure(
    onnx: Path,
    cache: PlanCache,
    build: Builds,
    options: BuildOptions = OPTIONS,
    *,
    on_event: Callable[[BuildEvent], None] = ignore,
) -> Path:
    return ensure_plan(PlanOrder(onnx, options, ORIN, "m"), cache, build, on_event)[0]


def test_a_plan_is_built_once(onnx: Path, cache: PlanCache) -> None:
    build = Builds()
    events: list[BuildEvent] = []
    plan = ensure(onnx, cache, build, on_event=events.append)
    assert plan.read_bytes() == b"plan 1"
    assert events == [Progressed(0.5, "Building engine")]
    assert ensure(onnx, cache, build) == plan
    assert len(build.jobs) == 1
    assert build.jobs[0].timing_cache == str(cache.timing_cache)
    assert plan_faults(plan, onnx, ORIN, "m") == []


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (BuildOptions("fp16"), ORIN),
        (OPTIONS, replace(ORIN, tensorrt="10.16.2.1")),
        (OPTIONS, replace(ORIN, compute_capability="9.0")),
        (BuildOptions("fp16", dla_core=0), replace(ORIN, l4t="36.4.7")),
    ],
)
def test_another_wish_or_device_is_another_plan(
    options: BuildOptions, facts: DeviceFacts, onnx: Path, cache: PlanCache
) -> None:
    other = replace(options, precision="fp32") if options != OPTIONS else OPTIONS
    before = cache.place(PlanOrder(onnx, other, ORIN, "m"))
    assert cache.place(PlanOrder(onnx, options, facts, "m")) != before


@pytest.mark.parametrize("facts", [{"multiprocessors": 8}, {"l4t": "36.5.0"}])
def test_a_power_mode_or_an_update_costs_no_build(
    facts: dict[str, Any], onnx: Path, cache: PlanCache
) -> None:
    build = Builds()
    plan = ensure(onnx, cache, build)
    assert cache.find(PlanOrder(onnx, OPTIONS, replace(ORIN, **facts), "m")) == plan


def test_another_onnx_file_is_another_plan(onnx: Path, cache: PlanCache) -> None:
    before = cache.place(PlanOrder(onnx, OPTIONS, ORIN, "m"))
    onnx.write_bytes(b"another")
    assert cache.place(PlanOrder(onnx, OPTIONS, ORIN, "m")) != before


@pytest.mark.parametrize("harm", ["flip", "cut", "no side-car", "no plan", "bad side-car"])
def test_what_is_damaged_is_built_anew(harm: str, onnx: Path, cache: PlanCache) -> None:
    build = Builds()
    plan = ensure(onnx, cache, build)
    {
        "flip": lambda: plan.write_bytes(b"plan 0"),
        "cut": lambda: os.truncate(plan, 3),
        "no side-car": lambda: side_car_path(plan).unlink(),
        "no plan": plan.unlink,
        "bad side-car": lambda: side_car_path(plan).write_text("{"),
    }[harm]()
    assert ensure(onnx, cache, build).read_bytes() == b"plan 2"


def test_a_build_that_fails_leaves_what_was_there(onnx: Path, tmp_path: Path) -> None:
    build = Builds()
    plan = tmp_path / "model.plan"
    before = make_plan(onnx, plan, OPTIONS, build, ignore)
    build.fails = True
    with pytest.raises(InternalError, match="built nothing"):
        make_plan(onnx, plan, OPTIONS, build, ignore)
    assert plan.read_bytes() == b"plan 1"
    assert read_side_car(plan) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model.onnx",
        "model.plan",
        "model.plan.json",
    ]


def test_a_place_that_cannot_be_written_to_is_told_before_anything_is_built(
    onnx: Path, tmp_path: Path
) -> None:
    build = Builds()
    with pytest.raises(InternalError, match="cannot be written: No such file or directory"):
        make_plan(onnx, tmp_path / "none" / "model.plan", OPTIONS, build, ignore)
    assert build.jobs == []


def test_a_read_only_file_system_is_told(
    onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(InternalError, match="cannot be written: Read-only file system"):
        make_plan(onnx, tmp_path / "model.plan", OPTIONS, Builds(), ignore)


def test_a_plan_whose_use_cannot_be_noted_is_used(
    onnx: Path, cache: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    build = Builds()
    plan = ensure(onnx, cache, build)
    monkeypatch.setattr(os, "utime", refuse)
    assert ensure(onnx, cache, build) == plan
    assert len(build.jobs) == 1


def test_what_a_killed_build_left_is_removed_by_the_next(onnx: Path, tmp_path: Path) -> None:
    left = tmp_path / ".model.plan.12345.tmp"
    left.write_bytes(b"half")
    make_plan(onnx, tmp_path / "model.plan", OPTIONS, Builds(), ignore)
    assert not left.exists()


def test_an_onnx_file_that_changes_meanwhile_is_no_truth(onnx: Path, tmp_path: Path) -> None:
    build = Builds()
    build.on_build = lambda: onnx.write_bytes(b"changed") and None
    with pytest.raises(ModelConfigError, match="was changed while it was built"):
        make_plan(onnx, tmp_path / "model.plan", OPTIONS, build, ignore)
    assert not (tmp_path / "model.plan").exists()


def test_a_plan_that_does_not_fit_after_all_is_no_plan(onnx: Path, cache: PlanCache) -> None:
    with pytest.raises(InternalError, match=r"just built does not fit: built with TensorRT 10\.16"):
        ensure(onnx, cache, Builds(replace(ORIN, tensorrt="10.16.2")))


def test_the_plans_of_longest_ago_go_first(onnx: Path, tmp_path: Path) -> None:
    build = Builds()
    plans = []
    for index in range(3):
        plan = ensure(
            onnx, PlanCache(tmp_path / "plans"), build, BuildOptions(workspace_mib=index + 1)
        )
        os.utime(plan.parent, (index, index))
        plans.append(plan)
    two_bytes = 2 * sum(file.stat().st_size for file in plans[0].parent.iterdir())
    cache = PlanCache(tmp_path / "plans", two_bytes + 9)
    # Used again, so that the second goes with the third.
    ensure(onnx, cache, build, BuildOptions(workspace_mib=1))
    ensure(onnx, cache, build, BuildOptions(workspace_mib=4))
    assert [plan.exists() for plan in plans] == [True, False, False]


def test_a_plan_larger_than_the_cache_is_kept_alone(onnx: Path, tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "plans", max_bytes=1)
    assert ensure(onnx, cache, Builds()).exists()


def test_a_plan_nobody_vouches_for_is_told_with_the_remedy(tmp_path: Path, onnx: Path) -> None:
    plan = tmp_path / "model.plan"
    plan.write_bytes(b"plan")
    (said,) = plan_faults(plan, onnx, ORIN, "m")
    assert said.startswith("model.plan has no model.plan.json beside it")
    assert said.endswith("run `edge-server plan build m`")


def test_one_build_runs_at_a_time_and_who_waited_takes_its_plan(
    onnx: Path, cache: PlanCache
) -> None:
    build = Builds()
    waiting = threading.Event()
    found: list[Path] = []

    def on_event(event: BuildEvent) -> None:
        if event == Step("waiting for another build"):
            waiting.set()

    def second() -> None:
        found.append(ensure(onnx, cache, build, on_event=on_event))

    thread = threading.Thread(target=second)

    def during_the_first() -> None:
        build.on_build = lambda: None
        thread.start()
        assert waiting.wait(30)

    build.on_build = during_the_first
    first = ensure(onnx, cache, build)
    thread.join(30)
    assert found == [first]
    assert len(build.jobs) == 1


def test_what_nobody_wants_any_more_does_not_wait_for_another_build() -> None:
    with (
        build_lock(lambda: pytest.fail("no build holds it")),
        while_wanted(lambda: "the server ends"),
        pytest.raises(GivenUp, match="the server ends"),
        build_lock(lambda: None),
    ):
        pytest.fail("two builds at once")


def test_a_lock_that_the_kernel_refuses_is_an_error_and_no_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Refused, but not because another build holds it: as under a security profile.
    monkeypatch.setattr(
        "edge_server.backends.tensorrt.plan_cache.LOCK_NAME", str(tmp_path / "none" / "lock")
    )
    with (
        pytest.raises(InternalError, match=r"the lock of plan builds.*No such file"),
        build_lock(lambda: pytest.fail("no build holds it")),
    ):
        pass


def test_a_disk_near_its_floor_gives_up_the_plans_that_were_used_longest_ago(
    tmp_path: Path,
) -> None:
    entries = []
    for number in range(4):
        entry = tmp_path / f"plan{number}"
        entry.mkdir()
        (entry / "model.plan").write_bytes(b"x" * 1000)
        (entry / "model.plan.json").write_bytes(b"")
        os.utime(entry, (number, number))
        entries.append(entry)
    PlanCache(tmp_path, free=lambda _: -1500).prune(keep=entries[0] / "model.plan")
    assert [entry.exists() for entry in entries] == [True, False, False, True]
    PlanCache(tmp_path, free=lambda _: 0).prune(keep=entries[0] / "model.plan")
    assert [entry.exists() for entry in entries] == [True, False, False, True]


def test_a_full_disk_is_told_before_anything_is_built_once_old_plans_have_gone(
    onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Builds()
    old = ensure(onnx, PlanCache(tmp_path / "plans"), build)
    left = old.parent.with_name("given up") / ".model.plan.12345.tmp"
    left.parent.mkdir()
    left.write_bytes(b"half")
    monkeypatch.setattr(plan_cache, "free_bytes", lambda _: 3)
    onnx.write_bytes(b"another")
    cache = PlanCache(tmp_path / "plans", free=lambda _: -1)
    with pytest.raises(Unavailable, match=r"the disk has 0 MiB left, and a plan of model\.onnx"):
        ensure(onnx, cache, build)
    assert (len(build.jobs), old.exists(), left.exists()) == (1, False, False)
    # It is built as soon as there is room.
    monkeypatch.setattr(plan_cache, "free_bytes", lambda _: 7)
    assert ensure(onnx, cache, build).read_bytes() == b"plan 2"


@pytest.fixture
def failing(onnx: Path, cache: PlanCache) -> Builds:
    """Builds that have failed once."""
    build = Builds()
    build.fails = True
    with pytest.raises(InternalError, match="TensorRT built nothing"):
        ensure(onnx, cache, build)
    return build


def test_a_build_that_failed_is_not_repeated_at_each_start(
    onnx: Path, cache: PlanCache, failing: Builds
) -> None:
    with pytest.raises(Unavailable, match=r"failed: TensorRT built nothing\nit is built .* 30 min"):
        ensure(onnx, cache, failing)
    assert len(failing.jobs) == 1
    # Another set of options is another build.
    with pytest.raises(InternalError):
        ensure(onnx, cache, failing, BuildOptions("fp16"))


def test_a_build_that_failed_is_repeated_on_request_and_its_success_is_for_all(
    onnx: Path, cache: PlanCache, failing: Builds
) -> None:
    failing.fails = False
    with pytest.raises(Unavailable):
        ensure(onnx, cache, failing)
    asked = ensure_plan(PlanOrder(onnx, OPTIONS, ORIN, "m"), cache, failing, ignore, retry=True)
    assert asked == (ensure(onnx, cache, failing), True)
    asked[0].unlink()
    assert ensure(onnx, cache, failing).read_bytes() == b"plan 3"


@pytest.mark.parametrize("later", ["time", "boot", "damage"])
def test_a_build_that_failed_for_what_may_pass_is_repeated_later(
    later: str, onnx: Path, cache: PlanCache, failing: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing.fails = False
    if later == "time":
        monkeypatch.setattr(plan_cache, "RETRY_S", 0.0)
    elif later == "boot":
        monkeypatch.setattr(plan_cache, "boot_id", lambda: "another boot")
    else:
        (note,) = cache.place(PlanOrder(onnx, OPTIONS, ORIN, "m")).parent.glob("*.json")
        note.write_bytes(b"{")
    assert ensure(onnx, cache, failing).read_bytes() == b"plan 2"


def test_an_onnx_file_that_tensorrt_refused_is_refused_until_it_changes(
    onnx: Path, cache: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Builds()
    build.on_build = refuse = _raiser(ModelConfigError("cannot read it"))
    with pytest.raises(ModelConfigError):
        ensure(onnx, cache, build)
    monkeypatch.setattr(plan_cache, "RETRY_S", 0.0)
    with pytest.raises(ModelConfigError, match="failed: cannot read it\nit is built again when"):
        ensure(onnx, cache, build)
    assert (len(build.jobs), build.on_build) == (1, refuse)
    onnx.write_bytes(b"another")
    build.on_build = lambda: None
    assert ensure(onnx, cache, build)


def test_a_build_that_was_stopped_has_not_failed(onnx: Path, cache: PlanCache) -> None:
    build = Builds()
    build.on_build = _raiser(Cancelled("the service stops"))
    with pytest.raises(Cancelled):
        ensure(onnx, cache, build)
    build.on_build = lambda: None
    assert ensure(onnx, cache, build)


def _raiser(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
