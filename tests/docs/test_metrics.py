"""The page of metrics, the Grafana dashboard and the alert rules name the metrics that there are."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from typing import Any

import pytest
import yaml

from iris_ray.goodput.metrics import METRICS, MetricKind
from tests.docs.pages import REPOSITORY

GRAFANA = REPOSITORY / "examples" / "grafana" / "iris_ray.json"
ALERTS = REPOSITORY / "examples" / "prometheus" / "alerts.yaml"
PLAYED = REPOSITORY / "tests" / "data" / "alerts-played.yaml"
PROMTOOL = os.environ.get("IRIS_TEST_PROMTOOL") or shutil.which("promtool")


def test_page_has_a_line_for_every_metric() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    lines = re.findall(r"^\| `(iris_\w+)` \| (\w+) \| ([\w, ]+) \| (.+) \|$", page, re.MULTILINE)
    assert lines == [(one.name, one.kind.value, ", ".join(one.labels) or "none", one.meaning) for one in METRICS]


def test_every_panel_asks_for_metrics_and_labels_that_exist() -> None:
    assert asked_for(queries(json.loads(GRAFANA.read_text()))) == {f"ray_{metric.name}" for metric in METRICS}


def asked_for(expressions: Iterable[str]) -> set[str]:
    """Return the metrics for which expressions of PromQL ask; their names and labels must exist."""
    suffixes = {MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    others = {"le", "SessionName"}  # Prometheus's, and Ray's
    labels_of = {
        f"ray_{m.name}{suffix}": {*m.labels, *others} for m in METRICS for suffix in suffixes.get(m.kind, ("",))
    }
    asked: set[str] = set()
    for query in expressions:
        (name,) = set(re.findall(r"ray_iris_\w+", query))
        grouped_by = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
        selected = set(re.findall(r"[{,]\s*(\w+)\s*(?:=|!=|=~|!~)", query))
        assert grouped_by | selected <= labels_of[name]
        asked.add(name)
    return {re.sub("_bucket$", "", name) for name in asked}


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_every_alert_asks_for_metrics_and_labels_that_exist() -> None:
    assert asked_for(rule["expr"] for rule in rules())


def test_every_alert_has_its_remedy_on_the_page() -> None:
    page = (REPOSITORY / "docs" / "alerts.md").read_text()
    names = [rule["alert"] for rule in rules()]
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == names
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Prometheus; or its path in IRIS_TEST_PROMTOOL")
def test_promtool_plays_every_alert() -> None:
    assert PROMTOOL is not None
    subprocess.run([PROMTOOL, "check", "rules", str(ALERTS)], check=True, capture_output=True, timeout=60)
    done = subprocess.run([PROMTOOL, "test", "rules", str(PLAYED)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    played = {
        test["alertname"] for one in yaml.safe_load(PLAYED.read_text())["tests"] for test in one["alert_rule_test"]
    }
    assert played == {rule["alert"] for rule in rules()}
