"""A real Prometheus on this machine, with the project's settings and rules, whose targets are processes.

The names of services are replaced by addresses, and waits are shortened; all else is what deploy/monitoring says.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from prefixcache.cli.children import end, spawn
from tests.support.monitoring import PROMETHEUS, RULES, read_yaml
from tests.support.ports import free_port

SCRAPE_S = 1
HOLD_S = 1
"""In place of the `for` of every alert that has one."""
_ANSWER_TIMEOUT_S = 10.0
_STOP_S = 10.0

missing = None if shutil.which("prometheus") and shutil.which("promtool") else "no Prometheus (Debian: prometheus)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One that fires."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.labels["alertname"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """One that runs, asked over its HTTP API."""

    url: str

    def query(self, expression: str) -> Sequence[Sample]:
        """An instant query. Raises urllib.error.HTTPError for what is no PromQL."""
        data = self._get("query", query=expression)
        if data["resultType"] == "scalar":
            return [Sample(labels={}, value=float(data["result"][1]))]
        return [Sample(labels=each["metric"], value=float(each["value"][1])) for each in data["result"]]

    def targets(self) -> Sequence[Any]:
        found: Sequence[Any] = self._get("targets", state="active")["activeTargets"]
        return found

    def alerts(self) -> Sequence[Alert]:
        """Those that fire."""
        return [
            Alert(labels=each["labels"], annotations=each["annotations"])
            for each in self._get("alerts")["alerts"]
            if each["state"] == "firing"
        ]

    def firing(self) -> set[str]:
        """Their names."""
        return {each.name for each in self.alerts()}

    def fired(self) -> set[str]:
        """Names of all that fire, or did within the last hour."""
        past = self.query('count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[1h]))')
        return {each.labels["alertname"] for each in past}

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=_ANSWER_TIMEOUT_S) as answer:
            body = json.loads(answer.read())
        assert body["status"] == "success", body
        return body["data"]


@contextmanager
def running_prometheus(folder: Path, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """`targets`: addresses by job. It may not answer yet; its log is prometheus.log in the folder."""
    config = write_settings(folder, targets)
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = spawn(command, stdout=subprocess.DEVNULL, stderr=log, niceness=5)
        try:
            yield Prometheus(url=f"http://{address}")
        finally:
            end(process, patience_s=_STOP_S)


def _of_service(job: str, targets: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    """With the label that the name of a service is in the compose file."""
    return {"targets": list(targets[job]), "labels": {"service": job}}


def write_settings(folder: Path, targets: Mapping[str, Sequence[str]]) -> Path:
    """The project's prometheus.yml and rules, changed as said above."""
    config = read_yaml(PROMETHEUS)
    config["global"] = {
        "scrape_interval": f"{SCRAPE_S}s",
        "scrape_timeout": f"{SCRAPE_S}s",
        "evaluation_interval": f"{SCRAPE_S}s",
    }
    config["scrape_configs"] = [
        {"job_name": job["job_name"], "static_configs": [_of_service(job["job_name"], targets)]}
        for job in config["scrape_configs"]
        if job["job_name"] in targets
    ]
    (folder / RULES.name).write_text(
        re.sub(r"\bfor: \w+", f"for: {HOLD_S}s", RULES.read_text(encoding="utf-8")), encoding="utf-8"
    )
    path = folder / PROMETHEUS.name
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path
