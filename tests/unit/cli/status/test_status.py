"""The screen shows what the daemon reports, and what it does not report is no zero."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.http.scrape import Scrape
from edge_server.board.board import Board, read_board
from edge_server.cli.status import screen
from edge_server.cli.status_report import DaemonReport, DaemonSample, make_report
from edge_server.inference.registry import IDLE
from edge_server.proto.edge.lanes.v1 import lane_service_pb2, lanes_pb2
from edge_server.settings import Mqtt, RecorderSection, Settings

METRICS = """
edge_build_info{{version="{version}"}} 1.0
edge_uptime_seconds 3700.0
edge_frames_total{{camera="front"}} {frames}
edge_frames_dropped_total{{camera="front",stage="capture",reason="stale"}} 3.0
edge_frames_dropped_total{{camera="front",stage="infer",reason="failed"}} 4.0
edge_end_to_end_latency_seconds_count{{camera="front"}} {frames}
edge_end_to_end_latency_seconds_sum{{camera="front"}} {sum_s}
edge_camera_last_frame_age_seconds{{camera="front"}} 0.021
edge_mqtt_connected {connected}
edge_mqtt_queue_depth 2.0
edge_mqtt_dropped_total 5.0
edge_model_memory_bytes{{model="seg",version="1",kind="file"}} 1048576.0
edge_model_memory_bytes{{model="seg",version="1",kind="contexts"}} 3145728.0
edge_settings_reloaded {reloaded}
edge_settings_restart_needed {waiting}
edge_board_condition{{reason="throttled"}} {throttled}
edge_board_clock_state{{state="synchronized"}} 1.0
edge_disk_free_bytes{{directory="/var/lib/edge_server"}} 1073741824.0
nv_cpu_utilization 0.5
"""


def metrics(more: str = "", **values: object) -> Scrape:
    usual = {
        "version": "9.0",
        "frames": 100,
        "sum_s": 2.0,
        "connected": 1,
        "throttled": 0,
        "reloaded": 1,
        "waiting": 0,
    }
    return Scrape(METRICS.format(**{**usual, **values}) + more)


def statistics(count: int, ns: int, version: str = "1") -> Any:
    stats = pb.ModelStatistics(name="seg", version=version)
    stats.inference_stats.success.count = count
    stats.inference_stats.success.ns = ns
    stats.inference_stats.queue.ns = ns // 10
    stats.inference_stats.compute_infer.ns = ns // 2
    return stats


def sample(at_s: float, count: int, scrape: Scrape | None, **more: Any) -> DaemonSample:
    entry = pb.RepositoryIndexResponse.ModelIndex
    camera = lane_service_pb2.Camera(name="front", state="ok", model="lane_detection")
    frame = lanes_pb2.LaneFrame(status=lanes_pb2.FRAME_STATUS_DEGRADED)
    frame.lanes.add()
    return DaemonSample(
        at_s,
        ready=True,
        metrics=scrape,
        **{
            "index": [
                entry(name="seg", version="1", state="READY"),
                entry(name="other", version="2", state="UNAVAILABLE", reason="no such\nfile"),
                entry(name="gone", version="1", state="UNAVAILABLE", reason="unloaded"),
                entry(name="rare", version="1", state="UNAVAILABLE", reason=IDLE),
            ],
            "statistics": [statistics(count, count * 10_000_000)],
            "backends": {"seg": "tensorrt"},
            "cameras": [camera],
            "lanes": {"front": frame},
            **more,
        },
    )


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return read_board(tmp_path_factory.mktemp("board"))


def report(
    board: Board, settings: Settings | None = None, **changes: Any
) -> tuple[DaemonReport, str]:
    before = sample(10.0, 100, metrics())
    now = replace(sample(12.0, 120, metrics(frames=160, sum_s=5.0)), **changes)
    found = make_report(before, now, settings or Settings(mqtt=Mqtt("10.0.0.2")), board)
    return found, "\n".join(screen(found))


def test_rates_and_means_are_those_between_the_samples(board: Board) -> None:
    found, text = report(board)
    (seg,) = (each for each in found.models or () if each.name == "seg")
    assert (seg.per_s, seg.mean_ms, seg.queue_ms, seg.infer_ms) == (10.0, 10.0, 1.0, 5.0)
    assert seg.memory_bytes == {"file": 1 << 20, "contexts": 3 << 20}
    assert "≥4\n" in text
    (front,) = found.cameras or ()
    assert (front.fps, front.lanes_per_s, front.mean_ms) == (30.0, 30.0, 50.0)
    assert (front.lanes, front.status, front.dropped) == (1, "degraded", 7)
    assert "edge-server 9.0, up 1 h 1 min, ready" in text


def test_a_model_that_is_not_ready_has_its_reason_and_an_unloaded_one_no_line(
    board: Board,
) -> None:
    _, text = report(board)
    assert "✔ seg" in text
    assert "✘ other" in text
    # One that its next request loads is as it should be.
    assert "✔ rare" in text
    assert "\n    no such file\n" in text
    assert "gone" not in text


def test_no_rate_is_made_of_a_version_that_was_loaded_anew(board: Board) -> None:
    found, text = report(board, statistics=[statistics(3, 30)])
    seg = next(each for each in found.models or () if each.name == "seg")
    assert (seg.requests, seg.per_s, seg.mean_ms) == (3, None, None)
    assert "3       0      -        -" in text


def test_no_rate_is_made_of_a_camera_of_a_daemon_that_was_restarted(board: Board) -> None:
    found, _ = report(board, metrics=metrics(frames=2, sum_s=0.1))
    (front,) = found.cameras or ()
    assert (front.fps, front.age_ms) == (None, 21.0)


def test_without_metrics_their_facts_are_unknown_and_the_fault_is_shown(board: Board) -> None:
    found, text = report(board, metrics=None, faults=("http://x: Connection refused",))
    (front,) = found.cameras or ()
    assert found.version is found.uptime_s is front.fps is None
    assert "✘ http://x: Connection refused" in text
    assert "‼ broker 10.0.0.2:1883: not known" in text
    assert "‼ recorder: not known" in text
    _, text = report(board, Settings(recorder=RecorderSection(mode="events")), metrics=Scrape(""))
    assert "  broker: none\n" in text
    assert "  recorder: off" in text


@pytest.mark.parametrize(
    ("ready", "head"),
    [(True, "‼ edge-server 9.0, up 1 h 1 min, ready;"), (None, "1 min, not known whether it is")],
)
def test_models_and_cameras_that_grpc_refuses_to_list_are_unknown_not_gone(
    board: Board, ready: bool | None, head: str
) -> None:
    refused = DaemonSample(12.0, ready=ready, metrics=metrics(), faults=("gRPC at x: no token",))
    found = make_report(sample(10.0, 100, metrics()), refused, Settings(), board)
    text = "\n".join(screen(found))
    assert head in text
    assert "‼ models: not known\n‼ cameras: not known\n" in text
    assert "no model" not in text.split("plans:")[0]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"connected": 1}, "✔ broker 10.0.0.2:1883: connected, 2 wait"),
        ({"connected": 0}, "✘ broker 10.0.0.2:1883: not connected; 2 wait, 5 lane messages"),
        ({"reloaded": 0}, "✘ settings: the last reload was refused"),
        ({"waiting": 2}, "‼ settings: 2 wait for a restart; `systemctl status edge-server`"),
        (
            {"throttled": 1},
            "✘ board: no Jetson, CPU ▮▮▮▮▮▯▯▯▯▯ 50%, clock synchronized\n    throttled; ",
        ),
        ({"throttled": 0}, "disk: free 1.0 GiB in /var/lib/edge_server"),
    ],
)
def test_each_part_is_judged_in_its_line(board: Board, changed: dict[str, int], line: str) -> None:
    assert line in report(board, metrics=metrics(**changed))[1]


def test_what_the_daemon_reports_does_not_steer_the_terminal(board: Board) -> None:
    _, text = report(
        board, faults=("http://x: \x1b[2J", "gone\x9b2J"), metrics=metrics(version="\x1b[31m")
    )
    assert text.replace("\n", "").isprintable()
    assert "✘ http://x: \\x1b[2J" in text


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_what_is_no_number_is_unknown(value: str, board: Board) -> None:
    text = METRICS.format(
        version="9.0", frames=1, sum_s=1, connected=1, reloaded=1, waiting=0, throttled=0
    )
    numbers = text.replace("3700.0", value).replace("1073741824.0", value).replace("5.0", value)
    found, text = report(board, metrics=Scrape(numbers))
    assert found.uptime_s is None
    assert "✘ edge-server 9.0, ready" not in text
    assert "disk" not in text


def test_labels_of_another_program_are_unknown(board: Board) -> None:
    found, _ = report(board, metrics=Scrape("edge_build_info 1\nedge_board_clock_state 1\n"))
    assert found.version is None


def test_another_version_than_the_installed_one_waits_for_a_restart(board: Board) -> None:
    found, text = report(board)
    assert f"‼ edge-server 9.0, up 1 h 1 min, ready; {found.installed} is installed" in text
    _, text = report(board, metrics=metrics(version=found.installed))
    assert f"✔ edge-server {found.installed}, up 1 h 1 min, ready\n" in text


def test_the_recorder_and_the_plans_have_lines(board: Board) -> None:
    settings = Settings(recorder=RecorderSection(mode="events"))
    recorder = metrics(
        "edge_recorder_ok 1.0\nedge_recorder_bytes_total 1048576.0\n"
        "edge_recorder_dropped_total 0.0\nedge_recorder_lost_total 2.0\n"
    )
    found, text = report(board, settings, metrics=recorder)
    assert "✔ recorder: events, 1.0 MiB written, 2 lost, 0 not encoded" in text
    # The daemon has a broker that these settings do not name; and so it is with the recorder.
    assert "✔ broker: connected, 2 wait" in text
    assert "✔ recorder: on, 1.0 MiB" in report(board, Settings(), metrics=recorder)[1]
    assert found.plans.models == ("seg",)
    assert "  plans: seg" in text


def test_the_json_is_the_whole_report(board: Board) -> None:
    found = asdict(report(board)[0])
    assert found["models"][0]["state"] == "UNAVAILABLE"
    assert found["broker"] == {
        "address": "10.0.0.2:1883",
        "connected": True,
        "waiting": 2,
        "dropped": 5,
    }


def test_a_model_that_serves_without_what_was_wanted_is_marked(board: Board) -> None:
    index = list(sample(0.0, 0, metrics()).index or ())
    (seg,) = (entry for entry in index if entry.name == "seg")
    seg.reason = "refused: the new content is no ONNX file"
    _, text = report(board, index=index)
    assert "‼ seg" in text
    assert "\n    refused: the new content is no ONNX file\n" in text


@pytest.mark.parametrize(
    ("state", "trouble", "line"),
    [
        ("on_trial", "", "✔ channel lanes: serial 7, on trial"),
        ("good", "unreachable", "✘ channel lanes: serial 7, good, unreachable"),
        ("rolled_back", "rolled_back", "✘ channel lanes: serial 7, rolled back\n"),
    ],
)
def test_a_channel_has_a_line(board: Board, state: str, trouble: str, line: str) -> None:
    scrape = Scrape(
        'edge_channel_serial{channel="lanes"} 7.0\n'
        f'edge_channel_state{{channel="lanes",state="{state}",trouble="{trouble}"}} 1.0\n'
    )
    _, text = report(board, metrics=scrape)
    assert line in f"{text}\n"
