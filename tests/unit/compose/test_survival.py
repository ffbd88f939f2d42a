"""What is told of a fault: nothing is left out, and what is not allowed is a problem."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest

from tests.compose import faults, survival
from tests.compose.account import DOOR, NO_DOOR, NOTHING, STREAMS, Account, Allowance, Outcome
from tests.compose.faults import Fault, alone, cut_off, flushed, killed, paused, restarted, scaled
from tests.compose.findings import Findings
from tests.compose.load import SteadyLoad
from tests.compose.recovery import WINDOW, Recovery
from tests.compose.survival import BACK_WITHIN_S, Survival, Survived
from tests.compose.upgrade import recipe, upgraded
from tests.support.compose import ROOT, ComposeStack, stack_of
from tests.support.containers import Container

GOOD = Recovery(before=0.9, lowest=0.5, last=0.9, low_until_s=3.0, is_back=True)
RIGHT = Account(
    is_stream=True, asked_at=1.0, ended_at=4.0, outcome=Outcome.RIGHT, first_token_s=0.5, longest_gap_s=2.0, worker="a"
)


def survived(
    *accounts: Account, recovery: Recovery = GOOD, allowance: Allowance = NOTHING, name: str = "kill -9 worker"
) -> Survived:
    fault = Fault(name=name, begin=lambda stack, worker: lambda: None, allowance=allowance)
    return Survived(fault=fault, accounts=accounts, whole_s=5.0, recovery=recovery)


def test_a_row_counts_every_request_once() -> None:
    accounts = [replace(RIGHT, outcome=outcome) for outcome in Outcome]
    row = survived(*accounts, replace(RIGHT, failed_attempts=("503",)), replace(RIGHT, is_stream=False)).row()
    assert row["requests"] == len(Outcome) + 2 == sum(cast(int, row[outcome]) for outcome in Outcome)
    assert row["client asked again"] == 1
    assert (row["longest TTFT s"], row["longest gap s"], row["whole after s"]) == (0.5, 2.0, 5.0)


def test_problems_name_the_fault() -> None:
    assert survived(RIGHT).problems == []
    cut = replace(RIGHT, outcome=Outcome.CUT, why="reset")
    [problem] = survived(RIGHT, cut).problems
    assert problem.startswith("kill -9 worker: ") and "reset" in problem
    assert survived(RIGHT, cut, allowance=STREAMS).problems == []


@pytest.mark.parametrize("worse", [{"is_back": False}, {"low_until_s": BACK_WITHIN_S + 1}])
def test_a_hit_rate_that_is_not_back_is_a_problem(worse: dict[str, Any]) -> None:
    [problem] = survived(RIGHT, recovery=replace(GOOD, **worse)).problems
    assert "hit rate" in problem


def test_findings_are_written_and_nothing_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Findings().show()
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())
    findings = Findings(survived=[survived(replace(RIGHT, outcome=Outcome.WRONG, why="so"))])
    findings.image_sizes["prefixcache-proxy"] = (488_000_000, 57_000_000)
    findings.show()
    said = capsys.readouterr().out
    assert "FAILURE kill -9 worker: WRONG: so" in said and "MISSED" in said and "488" in said
    assert (tmp_path / ".bench" / "compose.json").exists()


class HeldUp(SteadyLoad):
    """Misses that the fault held up end after a whole window of hits, and hits follow, one a look."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), cast(Any, None))
        self._is_over = False

    def is_over(self, at: float) -> bool:
        was_over, self._is_over = self._is_over, True
        if not was_over:
            self.answered(0, 3)
        return was_over

    def since(self, began_at: float) -> list[Account]:
        if self._is_over:
            self.answered(100, 1)
        return super().since(began_at)

    def answered(self, cached_tokens: int, number: int) -> None:
        now = time.monotonic()
        answer = replace(RIGHT, asked_at=now, ended_at=now, prompt_tokens=100, cached_tokens=cached_tokens)
        self.accounts += [answer] * number


async def test_what_a_fault_held_up_is_waited_for_before_it_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(stack: object) -> None:
        load.answered(100, WINDOW)

    monkeypatch.setattr(survival, "whole", at_once)
    load = HeldUp()
    load.answered(100, 2 * WINDOW)
    fault = Fault(name="f", begin=lambda stack, worker: lambda: None, allowance=NOTHING)
    found = (await Survival(cast(Any, None), load).undergo(fault)).recovery
    assert found.is_back and found.low_until_s > 0


def inspected(service: str, *, container_id: str = "ab" * 32, running: bool = True, pid: int = 7) -> dict[str, Any]:
    labels = {"com.docker.compose.service": service, "com.docker.compose.container-number": "2"}
    state = {
        "Pid": pid,
        "Running": running,
        "Restarting": False,
        "Paused": False,
        "StartedAt": "2026-01-01T00:00:00Z",
        "Health": {"Status": "healthy"},
    }
    networks = {"net": {"Aliases": [service, container_id[:12]]}, "other": {"Aliases": None}}
    return {
        "Id": container_id,
        "Config": {"Labels": labels},
        "State": state,
        "NetworkSettings": {"Networks": networks},
    }


def test_a_container_is_read_from_what_docker_says() -> None:
    container = Container.of(inspected("worker"))
    assert (container.name, container.pid, container.is_running, container.is_healthy) == ("worker-2", 7, True, True)
    assert container.networks == {"net": ["worker", "ab" * 6], "other": ()}
    without = inspected("redis")
    del without["State"]["Health"]
    assert not Container.of(without).is_healthy


class Recorded:
    """A stack of containers that only note what is done to them."""

    def __init__(self, *found: dict[str, Any]) -> None:
        self.found = list(map(Container.of, found))
        self.scaled: dict[str, int] = {}

    def containers(self, service: str | None = None) -> list[Container]:
        return [each for each in self.found if service in (None, each.service)]

    def up(self, **scale: int) -> None:
        self.scaled |= scale


def begun(fault: Fault, stack: Recorded, monkeypatch: pytest.MonkeyPatch, worker: str) -> list[str]:
    """What was done, to whom, as `pause id`."""
    done: list[str] = []

    def noted(name: str) -> Callable[[Container, Any], None]:
        def note(container: Container, *_: Any) -> None:
            done.append(f"{name} {container.id[:1]}")

        return note

    for name in ("kill", "pause", "unpause", "disconnect", "connect", "restart", "execute"):
        monkeypatch.setattr(Container, name, noted(name))
    monkeypatch.setattr(faults, "_await_restart", lambda stack, victim: done.append(f"awaited {victim.id[:1]}"))
    fault.begin(cast(ComposeStack, stack), worker)()
    return done


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (killed("worker"), ["kill b", "awaited b"]),
        (paused("worker"), ["pause b", "unpause b"]),
        (cut_off("worker"), ["disconnect b", "connect b"]),
        (restarted("redis"), ["restart r"]),
        (flushed(), ["execute r"]),
    ],
)
def test_the_busiest_worker_is_hit(fault: Fault, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Recorded(
        inspected("worker", container_id="0" * 64, running=False),
        inspected("worker", container_id="a" * 64),
        inspected("worker", container_id="b" * 64),
        inspected("redis", container_id="r" * 64),
    )
    assert begun(fault, stack, monkeypatch, worker="b" * 12 + "-7-c0de") == expected


def test_a_stopped_container_is_no_victim_and_the_first_one_is_where_no_name_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack = Recorded(
        inspected("proxy", container_id="0" * 64, running=False), inspected("proxy", container_id="1" * 64)
    )
    assert begun(killed("proxy"), stack, monkeypatch, worker="b" * 12) == ["kill 1", "awaited 1"]


def test_scaling_is_no_fault_and_a_proxy_may_cut_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Recorded()
    assert begun(scaled("proxy", 3), stack, monkeypatch, worker="") == []
    assert stack.scaled == {"proxy": 3}
    assert scaled("proxy", 3).allowance is restarted("redis").allowance is killed("redis").allowance is NOTHING
    assert alone(restarted("proxy"), DOOR).allowance is DOOR and restarted("proxy").allowance is NOTHING
    assert (
        Outcome.FAILED in restarted("edge").allowance.outcomes
        and Outcome.CUT not in restarted("edge").allowance.outcomes
    )
    assert alone(killed("proxy")).name == "kill -9 proxy, the only one"
    assert killed("proxy").allowance is paused("edge").allowance is cut_off("proxy").allowance is STREAMS
    assert killed("edge").allowance is NO_DOOR


@pytest.mark.parametrize(
    ("left", "problem"),
    [("cd", None), ("ad", "old ones are left"), ("d", "1 of 2"), ("cde", "3 of 2")],
    ids=["all new", "one old", "one too few", "one too many"],
)
def test_an_upgrade_leaves_as_many_as_there_were_and_none_of_them(left: str, problem: str | None) -> None:
    class Upgraded(Recorded):
        scale = MappingProxyType({"worker": 1, "proxy": 1, "redis": 1})

        def shell(self, script: str) -> None:
            assert script == recipe()
            self.found = [Container.of(inspected("worker", container_id=letter * 64)) for letter in left]

    stack = cast(Any, Upgraded(*(inspected("worker", container_id=letter * 64) for letter in "ab")))
    with nullcontext() if problem is None else pytest.raises(AssertionError, match=problem):
        upgraded("first").begin(stack, "")()


def test_the_recipe_names_no_container() -> None:
    """As names count on."""
    lines = recipe().splitlines()
    assert lines[0].startswith("old=$(") and "docker stop -t 45 $old" in lines
    assert not re.search(r"prefixcache-\w+-\d", recipe())


def test_a_stack_keeps_the_scale_that_it_was_told() -> None:
    stack = stack_of("test", scale={"worker": 2, "redis": 1}, files=[Path("/over.yml")])
    assert "--scale=worker=2" in stack.up_arguments() and "--wait" in stack.up_arguments()
    assert stack.project.startswith("prefixcache-test-") and stack.url.endswith(str(stack.port))
    told = stack.shell("echo $COMPOSE_PROJECT_NAME $COMPOSE_FILE $WORKERS ${REDISS-}").split()
    assert told == [stack.project, f"{ROOT}/docker-compose.yml:/over.yml", "2"]
    with pytest.raises(subprocess.CalledProcessError):
        stack.shell("false | true; echo on")


def test_the_busiest_worker_is_that_of_most_recent_answers() -> None:
    load = SteadyLoad(cast(Any, SimpleNamespace()), cast(Any, None))
    load.accounts = [replace(RIGHT, worker=name) for name in "aaaaa" * 20 + "bbb" + "a" + "b" * 30]
    load.accounts.append(replace(RIGHT, worker=""))
    assert load.busiest_worker() == "b"
