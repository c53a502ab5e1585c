"""examples/observability in a real Prometheus that scrapes a real daemon."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.free_ports import free_ports
from support.waiting import wait_until

from edge_server.api.http.metric_table import TABLE
from edge_server.api.http.metrics import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import tritonclient.grpc as triton
    from support.daemon_process import Process

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/observability"
TIMEOUT_S = 30.0
# What Prometheus itself and prometheus_client add.
OTHERS = {"up", "process_resident_memory_bytes"}
# No board, recorder, change of a model, fault or event is in this test, and so no number of them.
ABSENT = re.compile(r"edge_(board|recorder|model_reload|camera_faults|events|request_failed)_")

pytestmark = pytest.mark.skipif(
    not shutil.which("promtool"), reason="no Prometheus on this machine: apt install prometheus"
)


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def dashboard_queries() -> list[str]:
    found = json.loads((EXAMPLE / "dashboard.json").read_text())
    return [target["expr"] for panel in found["panels"] for target in panel.get("targets", ())]


def metric_names(text: str) -> set[str]:
    return set(re.findall(r"\b((?:edge|nv|process)_\w+|up)\b(?=[ {\[=)])", text))


def test_the_rules_and_the_configuration_are_valid_and_the_rules_alert() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")


def test_rules_and_dashboard_ask_for_nothing_that_is_not_exported() -> None:
    rules = (EXAMPLE / "alerts.yml").read_text()
    exprs = re.findall(r"expr: (?:>-\n)?((?:.|\n)*?)\n +(?:for|labels):", rules)
    asked = metric_names("\n".join([*exprs, *dashboard_queries()]) + " ")
    exported = {*TABLE, *COUNTERS, *OTHERS}
    exported |= {name + end for name in TABLE for end in ("_bucket", "_sum", "_count")}
    exported |= {"nv_cpu_utilization", "nv_cpu_memory_used_bytes", "nv_cpu_memory_total_bytes"}
    assert len(asked) > 30
    assert asked <= exported


class Prometheus:
    """A real one, with the example's configuration but for the daemon's port and the intervals."""

    def __init__(self, folder: Path, target: int) -> None:
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        text = (EXAMPLE / "prometheus.yml").read_text()
        assert "127.0.0.1:8002" in text
        config = folder / "prometheus.yml"
        config.write_text(
            text.replace("127.0.0.1:8002", f"127.0.0.1:{target}").replace("15s", "200ms")
        )
        shutil.copy(EXAMPLE / "alerts.yml", folder)
        with (folder / "prometheus.log").open("w") as log:
            self._popen = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stderr=log,
            )

    def get(self, path: str, **query: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310
            return json.load(answer)["data"]

    def wait_for(self, query: str) -> None:

        def has_a_result() -> bool:
            try:
                return bool(self.get("query", query=query)["result"])
            except OSError:
                return False

        wait_until(has_a_result, TIMEOUT_S, otherwise=f"no result of {query}", every_s=0.2)

    def stop(self) -> None:
        self._popen.terminate()
        self._popen.wait(TIMEOUT_S)


@pytest.fixture
def scraping(tmp_path: Path) -> Iterator[Callable[[int], Prometheus]]:
    made: list[Prometheus] = []

    def make(target: int) -> Prometheus:
        made.append(Prometheus(tmp_path, target))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_a_real_prometheus_scrapes_the_daemon_and_answers_the_dashboard(
    *,
    scraping: Callable[[int], Prometheus],
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    road_image: object,
    road_input: triton.InferInput,
    tmp_path: Path,
    mosquitto: Any,
) -> None:
    process = start(
        "--model-repository",
        str(ROOT / "models"),
        f"--camera=front=file://{tmp_path}/road?loop=true&fps=5",
        f"--mqtt=127.0.0.1:{mosquitto.port}",
    )
    client(process).infer("lane_detection", [road_input])
    prometheus = scraping(process.metrics_port)
    prometheus.wait_for('up{job="edge-server"} == 1')
    client(process).infer("lane_detection", [road_input])
    for query in (
        'edge_request_duration_seconds_count{model="lane_detection", protocol="grpc"} > 1',
        'rate(edge_end_to_end_latency_seconds_count{camera="front"}[10s]) > 0',
        'rate(edge_publish_latency_seconds_count{camera="front"}[10s]) > 0',
        "edge_ready == 1",
    ):
        prometheus.wait_for(query)

    def faults() -> list[str]:
        return [each["lastError"] for each in prometheus.get("targets")["activeTargets"]]

    # One scrape or another of a busy machine takes longer than the 200 ms.
    wait_until(lambda: faults() == [""], otherwise=faults)
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 10
    assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
    for query in dashboard_queries():
        asked = query.replace("$instance", ".*").replace("[1m]", "[10s]")
        if ABSENT.search(asked):
            prometheus.get("query", query=asked)
        else:
            prometheus.wait_for(asked)
    assert process.terminate() == 0
