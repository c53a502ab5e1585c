"""The recorder: which frames are in which file, what it costs the pipeline, what a disk may do."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from foxglove_schemas_protobuf.ImageAnnotations_pb2 import ImageAnnotations
from mcap.reader import make_reader
from support.mcap_drive import EPOCH_NS, PERIOD_NS, Drive, camera_jpeg, content, is_whole

from edge_server.cameras.frame import Frame
from edge_server.cameras.mcap_file import cameras_in
from edge_server.errors import Unavailable
from edge_server.lanes.types import LaneFrame
from edge_server.pipeline.perception import Detections, NetworkFrame, TensorList
from edge_server.pipeline.recorder import mcap_writer
from edge_server.pipeline.recorder.mcap_writer import RECORDING, Ring
from edge_server.pipeline.recorder.recording_writer import RecordingFiles
from edge_server.pixels import Image
from edge_server.proto.edge.perception.v1 import perception_pb2

if TYPE_CHECKING:
    from pathlib import Path


def test_a_continuous_recording_has_each_frame_once_in_order(tmp_path: Path) -> None:
    drive = Drive(tmp_path, file_s=1.0)
    drive.frames(100)
    drive.stop()

    files = drive.files()
    assert len(files) == 4  # 3.3 s
    assert all(is_whole(path) for path in files)
    assert [each for path in files for each in content(path).frame_ids] == list(range(100))
    assert drive.recorder.lost == drive.recorder.dropped == 0


def test_times_are_of_the_capture_and_of_the_arrival(tmp_path: Path) -> None:
    drive = Drive(tmp_path)
    drive.frames(3)
    drive.stop()

    found = content(drive.files()[0])
    assert found.publish_ns == [EPOCH_NS + i * PERIOD_NS for i in range(3)]
    assert found.log_ns == sorted(found.log_ns)
    assert found.log_ns[0] != found.publish_ns[0]  # Unix time of the test itself
    assert found.topics[:3] == ["/front/lanes", "/front/image", "/front/annotations"]


def test_the_lanes_are_drawn_in_the_picture_with_its_time_and_at_its_size(tmp_path: Path) -> None:
    drive = Drive(tmp_path, width=160)
    drive.frames(1)
    drive.stop()

    with drive.files()[0].open("rb") as file:
        reader = make_reader(file)
        ((schema, _, message),) = reader.iter_messages("/front/annotations")
        ((_, images, image),) = reader.iter_messages("/front/image")
    assert schema is not None
    assert schema.name == "foxglove.ImageAnnotations"
    (line,) = ImageAnnotations.FromString(message.data).points
    assert [(each.x, each.y) for each in line.points] == [(50, 90), (60, 45)]
    assert message.publish_time == image.publish_time == EPOCH_NS
    assert line.timestamp.seconds * 10**9 + line.timestamp.nanos == EPOCH_NS
    assert (images.metadata["width"], images.metadata["height"]) == ("320", "192")


def test_the_jpeg_of_a_camera_is_recorded_as_it_came(tmp_path: Path) -> None:
    drive = Drive(tmp_path)
    drive.frames(2, jpeg=True)
    drive.stop()
    assert content(drive.files()[0]).images == [camera_jpeg(0), camera_jpeg(1)]
    assert camera_jpeg(0) != camera_jpeg(1)


def test_an_event_s_file_has_the_seconds_before_and_after_it(tmp_path: Path) -> None:
    drive = Drive(tmp_path, mode="events", before_s=1.0, after_s=0.5)
    drive.frames(100)
    assert drive.names() == []
    drive.event()
    drive.frames(100)
    drive.stop()

    (path,) = drive.files()
    assert path.name.endswith("-event-lane_departure-1.mcap")
    found = content(path)
    assert found.frame_ids[0] in (70, 71)  # 1 s at 29.97 Hz
    assert found.frame_ids[-1] in (114, 115)
    assert found.frame_ids == list(range(found.frame_ids[0], found.frame_ids[-1] + 1))
    assert "/events" in found.topics
    with path.open("rb") as file:
        about = {each.name: each.metadata for each in make_reader(file).iter_metadata()}
    assert about[RECORDING]["event_id"] == "1"
    assert about[RECORDING]["event_log"] == drive.events.id
    assert about[RECORDING]["event_cause"] == "left"


def test_events_of_one_moment_share_a_file_and_no_frame_is_in_two(tmp_path: Path) -> None:
    drive = Drive(tmp_path, mode="events", before_s=2.0, after_s=1.0)
    drive.frames(60)
    drive.event()
    drive.frames(15)
    drive.event("camera", "stalled")
    drive.frames(90)
    drive.event()
    drive.frames(90)
    drive.stop()

    first, second = (content(path).frame_ids for path in drive.files())
    assert first[-1] in (104, 105)  # 1 s after the second event
    assert not set(first) & set(second)


def test_a_kind_of_event_that_is_not_chosen_begins_no_file(tmp_path: Path) -> None:
    drive = Drive(tmp_path, mode="events", events=("camera",))
    drive.frames(10)
    drive.event("lane_departure")
    drive.frames(10)
    drive.stop()
    assert drive.names() == []


def test_an_event_pins_the_running_file_and_the_one_before(tmp_path: Path) -> None:
    drive = Drive(tmp_path, file_s=1.0, before_s=0.9, after_s=0.1)
    drive.frames(75)  # the third file has 0.5 s
    drive.event()
    drive.frames(45)
    drive.stop()
    causes = [name.split("Z-")[1] for name in drive.names()]
    pinned = "event-lane_departure-1.mcap"
    assert causes == ["drive.mcap", pinned, pinned, "drive.mcap"]


def test_the_newest_frames_are_dropped_and_counted_where_the_encoder_is_late(
    tmp_path: Path,
) -> None:
    drive = Drive(tmp_path)
    for _ in range(10):
        drive.give()
    drive.stop()
    assert content(drive.files()[0]).frame_ids == [0, 1, 2, 3]
    assert drive.recorder.dropped == 6


def test_memory_is_bounded_whatever_the_seconds(tmp_path: Path) -> None:
    drive = Drive(tmp_path, mode="events", before_s=60, memory_bytes=1 << 20)
    drive.frames(100)
    assert 1 << 19 < drive.recorder._ring.size_bytes <= 1 << 20
    drive.stop()


def test_the_disk_budget_holds_at_every_moment(tmp_path: Path) -> None:
    budget = 6 << 20
    drive = Drive(tmp_path, most_bytes=budget, file_s=1.0)
    for _ in range(30):
        drive.frames(15, jpeg=True)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= budget
    drive.stop()
    files = drive.files()
    assert sum(path.stat().st_size for path in files) > budget // 2
    assert content(files[-1]).frame_ids[-1] == 449
    assert not files[0].name.startswith("00000001")


def test_files_of_events_outlive_others_up_to_half_of_the_space(tmp_path: Path) -> None:
    budget = 8 << 20
    drive = Drive(tmp_path, most_bytes=budget, file_s=1.0, before_s=0, after_s=0)
    drive.frames(10, jpeg=True)
    drive.event()
    drive.frames(500, jpeg=True)
    assert any("event-lane_departure-1" in name for name in drive.names())

    for _ in range(15):
        drive.event()
        drive.frames(31, jpeg=True)
    names = drive.names()
    assert not any("event-lane_departure-1." in name for name in names)
    assert any("event-lane_departure-16." in name for name in names)
    drive.stop()


def test_recordings_that_somebody_moved_away_take_no_space(tmp_path: Path) -> None:
    for number, mib in enumerate((1, 3, 3), 1):
        path = tmp_path / f"{number:08}-0123abcd-20261122T173335Z-event-camera-{number}.mcap"
        path.touch()
        os.truncate(path, mib << 20)
    files = RecordingFiles(
        tmp_path, "0123abcd", most_bytes=8 << 20, reserve_bytes=0, free=lambda _: 1 << 40
    )
    kept, *moved = sorted(tmp_path.iterdir())
    for path in moved:
        path.unlink()
    assert files.make_room(0, 3 << 20) == ""
    assert kept.exists()
    assert files.used_bytes == 1 << 20
    files.close()


def test_a_full_disk_stops_the_recording_alone_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    drive = Drive(tmp_path)
    drive.frames(60)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    drive.frames(450)  # 15 s, with three attempts
    assert "No space left" in drive.recorder.failure
    with pytest.raises(Unavailable, match="No space left"):
        request_now(drive)
    monkeypatch.setattr(os, "write", write)
    drive.frames(300)
    drive.stop()

    said = [each.message for each in caplog.records if each.levelno == logging.ERROR]
    assert said == ["recorder: nothing is recorded: the disk: No space left on device; lanes go on"]
    assert drive.recorder.failure == ""
    assert drive.recorder.lost > 0
    assert all(is_whole(path) for path in drive.files())
    assert not list(tmp_path.glob("*.part"))


def test_a_disk_with_room_again_is_no_failure_though_nothing_is_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = Drive(tmp_path, mode="events")
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    drive.frames(60)
    drive.event()
    drive.frames(900)  # the event is over
    assert "No space left" in drive.recorder.failure
    monkeypatch.setattr(os, "write", write)
    drive.frames(300)
    assert drive.recorder.failure == ""
    assert not (tmp_path / ".try").exists()
    drive.stop()


def test_a_full_disk_stays_a_failure_while_no_camera_gives_a_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    drive = Drive(tmp_path)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        drive.frames(6)
        drive.recorder._ring = drive.recorder._writer._ring = Ring(1.0, 1)  # all is forgotten
        for _ in range(3):
            drive.now_ns += 6_000_000_000
            drive.recorder.write()
        assert "No space left" in drive.recorder.failure
    drive.now_ns += 6_000_000_000
    drive.recorder.write()
    drive.stop()
    assert drive.recorder.failure == ""
    assert [each.message for each in caplog.records] == [
        "recorder: nothing is recorded: the disk: No space left on device; lanes go on",
        "recorder: the disk takes recordings again",
    ]


def test_what_a_full_disk_broke_off_is_whole_once_there_is_room_though_nothing_is_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = Drive(tmp_path, mode="events")
    drive.frames(60)
    drive.event()
    drive.frames(90)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        drive.frames(900)  # the event is over
        assert len(list(tmp_path.glob("*.part"))) == 1
    drive.frames(300)
    assert drive.recorder.failure == ""
    (path,) = drive.files()
    assert is_whole(path)
    assert not list(tmp_path.glob("*.part"))
    drive.stop()


def request_now(drive: Drive) -> str:
    """Request a file while the writer's thread is this one."""
    recorder = drive.recorder
    wake = recorder._wake.set
    recorder._wake.set = lambda: (wake(), recorder.write())
    try:
        return recorder.request("Test run!", 0.5, 0.5)
    finally:
        recorder._wake.set = wake


def test_too_little_free_space_keeps_what_others_need(tmp_path: Path) -> None:
    drive = Drive(tmp_path, free=lambda _: 1 << 20)
    drive.frames(60)
    drive.stop()
    assert "free" in drive.recorder.failure
    assert drive.names() == []


def test_a_request_names_its_file(tmp_path: Path) -> None:
    drive = Drive(tmp_path, mode="events")
    drive.frames(60)
    name = request_now(drive)
    drive.frames(60)
    drive.stop()
    assert drive.names() == [name]
    assert name.endswith("Z-request-test-run.mcap")
    assert 28 <= len(content(tmp_path / name).frame_ids) <= 32


def test_only_the_chosen_cameras_are_recorded(tmp_path: Path) -> None:
    drive = Drive(tmp_path, cameras=("rear",))
    drive.frames(10)
    drive.frames(10, camera="rear")
    drive.stop()
    assert set(content(drive.files()[0]).topics) == {
        "/rear/lanes",
        "/rear/image",
        "/rear/annotations",
    }


def test_numbers_go_on_after_a_restart_whatever_the_clock_says(tmp_path: Path) -> None:
    for _ in range(2):
        drive = Drive(tmp_path)
        drive.frames(2)
        drive.stop()
    assert [name[:8] for name in drive.names()] == ["00000001", "00000002"]


def test_another_daemon_s_directory_is_refused(tmp_path: Path) -> None:
    drive = Drive(tmp_path)
    with pytest.raises(Unavailable, match="another daemon records there"):
        Drive(tmp_path)
    drive.stop()


@pytest.mark.parametrize("share", [0.02, 0.3, 0.55, 0.8, 0.999])
def test_what_a_crash_leaves_is_recovered_to_its_last_chunk(tmp_path: Path, share: float) -> None:
    drive = Drive(tmp_path)
    drive.frames(60)
    drive.stop()
    (whole,) = drive.files()
    data = whole.read_bytes()
    whole.unlink()
    part = tmp_path / f"{whole.name}.part"
    part.write_bytes(data[: int(len(data) * share)])
    readable = content(part).frame_ids

    drive = Drive(tmp_path)
    drive.stop()
    if not readable:
        assert drive.names() == []
        return
    assert drive.names() == [whole.name]
    assert is_whole(whole)
    found = content(whole)
    assert found.frame_ids == readable == list(range(len(readable)))
    of_a_chunk = 2 + (256 << 10) * 60 // len(data)
    assert len(readable) >= 60 * share - of_a_chunk


def left_by_a_crash(directory: Path, *, frames: int = 120, file_s: float = 1.0) -> Path:
    """Record into several files, and leave the last one as a crash does."""
    drive = Drive(directory, file_s=file_s)
    drive.frames(frames, jpeg=True)
    drive.stop()
    whole = drive.files()[-1]
    return whole.rename(whole.with_name(f"{whole.name}.part"))


def test_the_disk_budget_holds_while_what_a_crash_left_is_recovered(tmp_path: Path) -> None:
    """The part and the whole file made of it take space at the same time: older ones go first."""
    part = left_by_a_crash(tmp_path)
    older = sorted(tmp_path.glob("*.mcap"))
    frame_ids, size = content(part).frame_ids, part.stat().st_size
    used = sum(path.stat().st_size for path in (*older, part))
    budget = used + (1 << 20)
    # What was there while the second file was written, seen when the disk was asked for its space.
    seen = []

    def free(directory: Path) -> int:
        seen.append(sum(path.stat().st_size for path in directory.glob("*.mcap*")))
        return 1 << 40

    Drive(tmp_path, most_bytes=budget, free=free).stop()
    assert seen[-1] + size <= budget
    left = sorted(tmp_path.glob("*.mcap"))
    assert not set(left) >= set(older)
    assert left[-1].name == part.name.removesuffix(".part")
    assert content(left[-1]).frame_ids == frame_ids


def test_what_a_crash_left_waits_where_its_recovery_would_take_the_disk_s_reserve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = left_by_a_crash(tmp_path, frames=30, file_s=60.0)
    data = part.read_bytes()
    Drive(tmp_path, free=lambda _: len(data)).stop()
    assert f"recorder: {part.name}: not recovered now: the disk has less than" in caplog.text
    assert [path.read_bytes() for path in tmp_path.glob("*.mcap*")] == [data]
    Drive(tmp_path).stop()
    assert is_whole(tmp_path / part.name.removesuffix(".part"))


def test_damage_in_the_middle_costs_what_follows(tmp_path: Path) -> None:
    drive = Drive(tmp_path)
    drive.frames(60)
    drive.stop()
    (whole,) = drive.files()
    data = bytearray(whole.read_bytes())
    data[len(data) // 2] ^= 0xFF
    part = tmp_path / f"{whole.name}.part"
    part.write_bytes(data)
    whole.unlink()
    Drive(tmp_path).stop()
    assert is_whole(whole)
    assert 15 <= len(content(whole).frame_ids) < 35


def test_a_file_that_is_not_named_closes_nobody_else_s_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def fail(_written: Path, _path: Path) -> None:
        taken.append(os.open(tmp_path, os.O_RDONLY))  # has the number that is free now
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(mcap_writer, "atomic_replace", fail)
    writer = mcap_writer.McapWriter(tmp_path / "a.mcap", {})
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        writer.finish()
    writer.abandon()
    os.fstat(taken[0])
    os.close(taken[0])


def test_what_networks_find_is_recorded_and_drawn_in_the_picture_of_its_frame(
    tmp_path: Path,
) -> None:
    drive = Drive(tmp_path, width=160)
    result = Detections(
        np.array([[100.0, 20, 140, 60]]), np.array([1]), np.array([0.9]), ("stop", "yield")
    )
    found = NetworkFrame(
        "front", 0, 0, drive.now_ns, EPOCH_NS, 320, 192, "signs",
        network="signs", task="detection", result=result,
    )  # fmt: skip
    drive.recorder(found)  # its picture was dropped: nobody knows its size
    drive.frames(1)
    drive.recorder(found)
    drive.stop()

    (path,) = drive.files()
    assert content(path).topics[1:] == [
        *("/front/lanes", "/front/image", "/front/annotations"),
        *("/front/networks/signs/results", "/front/networks/signs/annotations"),
    ]
    assert list(cameras_in(path)) == ["front"]
    with path.open("rb") as file:
        messages = list(make_reader(file).iter_messages())
    *_, (schema, _, result_message), (_, _, drawn) = messages
    assert schema is not None
    assert schema.name == "edge.perception.v1.NetworkFrame"
    message = perception_pb2.NetworkFrame.FromString(result_message.data)
    assert (message.network, message.detections[0].label) == ("signs", "yield")
    assert drawn.publish_time == result_message.publish_time == EPOCH_NS
    annotations = ImageAnnotations.FromString(drawn.data)
    (box,), (text,) = annotations.points, annotations.texts
    # The picture is half as large as the camera's.
    assert [(each.x, each.y) for each in box.points] == [
        (50, 10), (70, 10), (70, 30), (50, 30), (50, 10)
    ]  # fmt: skip
    assert (text.text, text.position.x) == ("yield 0.90", 50)


def test_a_camera_without_lanes_has_pictures_alone(tmp_path: Path) -> None:
    drive = Drive(tmp_path)
    pixels = np.zeros((192, 320, 3), np.uint8)
    frame = Frame(0, Image.of_bgr(pixels), drive.now_ns, EPOCH_NS)
    drive.recorder(LaneFrame("rear", 0, 0, drive.now_ns, EPOCH_NS, 320, 192, ""), frame)
    drive.recorder.encode(0.0)
    drive.stop()
    (path,) = drive.files()
    assert content(path).topics == ["/rear/image"]
    assert list(cameras_in(path)) == ["rear"]


def test_results_of_networks_take_no_place_of_frames(tmp_path: Path) -> None:
    drive = Drive(tmp_path)
    found = NetworkFrame("front", 0, 0, 0, 0, 320, 192, "m", network="n", result=TensorList(()))
    for _ in range(20):
        drive.recorder(found)
    for _ in range(4):
        drive.give()
    drive.stop()
    recorded = content(drive.files()[0])
    assert recorded.frame_ids == [0, 1, 2, 3]
    assert recorded.topics.count("/front/networks/n/results") == 16
    assert drive.recorder.dropped == 4
