"""The alert rules: promtool finds them right, each fires and does not where it should, and the runbook has each."""

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import ALERTS, ROOT, TARGET_LABELS, Told

RUNBOOK = ROOT / "docs" / "runbook.md"
UNIT_TESTS = sorted(Path(__file__).parent.glob("*.yaml"))
NAME = re.compile(r"\bheadrace_\w+")
SELECTOR = re.compile(r"\b(headrace_\w+)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPED = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
OF_ALERT = re.compile(r"\$labels\.(\w+)")


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def test_rules_are_right(promtool: str) -> None:
    run(promtool, "check", "rules", str(ALERTS))


@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda file: file.stem)
def test_rules_fire_when_they_should(promtool: str, file: Path) -> None:
    run(promtool, "test", "rules", str(file))


def test_each_alert_is_shown_firing_and_not_firing(alerts: list[dict[str, Any]]) -> None:
    shown: dict[str, set[bool]] = defaultdict(set)
    for file in UNIT_TESTS:
        for case in yaml.safe_load(file.read_text())["tests"]:
            for told in case["alert_rule_test"]:
                shown[told["alertname"]].add(bool(told["exp_alerts"]))
    assert {alert["alert"] for alert in alerts} == set(shown)
    assert {name for name, outcomes in shown.items() if outcomes != {True, False}} == set()


def test_each_alert_says_what_is_wrong_and_where_to_read_on(alerts: list[dict[str, Any]]) -> None:
    headings = [line[3:] for line in RUNBOOK.read_text().splitlines() if line.startswith("## ")]
    assert headings == [alert["alert"] for alert in alerts]
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["for"]
        notes = alert["annotations"]
        assert notes["summary"]
        assert notes["description"]
        assert notes["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"


async def test_rules_ask_for_what_gateways_tell(told: Told) -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        recorded = {rule["record"] for rule in group["rules"] if "record" in rule}
        for rule in group["rules"]:
            expression = rule["expr"]
            for name in recorded:
                expression = expression.replace(name, "")
            check_expression(told, expression)
            of_alert = set(OF_ALERT.findall(rule.get("annotations", {}).get("description", "")))
            assert of_alert <= labels_in(told, expression) | TARGET_LABELS, rule


def check_expression(told: Told, expression: str) -> None:
    """Every metric and every label in it is there."""
    names = set(NAME.findall(expression))
    for name in names:
        told.labels_of(plain(name))
    for name, selector in SELECTOR.findall(expression):
        assert set(LABEL.findall(re.sub(r'"[^"]*"', "", selector))) <= told.labels_of(plain(name)) | TARGET_LABELS | {
            "le"
        }, f"{name}{{{selector}}}"
    grouped = {label.strip() for labels in GROUPED.findall(expression) for label in labels.split(",")}
    assert grouped - {""} <= labels_in(told, expression) | TARGET_LABELS | {"le"}, expression


def labels_in(told: Told, expression: str) -> set[str]:
    return set().union(*(told.labels_of(plain(name)) for name in NAME.findall(expression)))


def plain(name: str) -> str:
    """Of a histogram's parts, the one that has all of its labels but the bound."""
    return re.sub(r"_(bucket|count)$", "_sum", name)
