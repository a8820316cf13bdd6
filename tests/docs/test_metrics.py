"""The page of metrics and the Grafana dashboard name the metrics that there are."""

import json
import re
from typing import Any

from iris_ray.actors.controller.metrics import METRICS, Kind
from tests.docs.pages import REPOSITORY

GRAFANA = REPOSITORY / "examples" / "grafana" / "iris_ray.json"


def test_page_has_a_line_for_every_metric() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    lines = re.findall(r"^\| `(iris_\w+)` \| (\w+) \| ([\w, ]+) \| (.+) \|$", page, re.MULTILINE)
    assert lines == [(one.name, one.kind.value, ", ".join(one.labels), one.meaning) for one in METRICS]


def test_every_panel_asks_for_metrics_and_labels_that_exist() -> None:
    suffixes = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    labels_of = {f"ray_{m.name}{suffix}": {*m.labels, "le"} for m in METRICS for suffix in suffixes.get(m.kind, ("",))}
    asked: set[str] = set()
    for query in queries(json.loads(GRAFANA.read_text())):
        (name,) = set(re.findall(r"ray_iris_\w+", query))
        grouped_by = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
        assert grouped_by <= labels_of[name]
        asked.add(name)
    assert {re.sub("_bucket$", "", name) for name in asked} == {f"ray_{metric.name}" for metric in METRICS}


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
