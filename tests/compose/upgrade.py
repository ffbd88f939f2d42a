"""The upgrade of deploy/README.md as a fault: its own lines under load, and what ran before is gone."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.compose.account import NOTHING
from tests.compose.faults import Fault
from tests.support.compose import ROOT, ComposeStack

UPGRADED = ("worker", "proxy")


def recipe() -> str:
    """The first block of the section, without the building: that was done."""
    page = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^## Upgrades\n.*?^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    building, *rest = str(block).splitlines(keepends=True)
    assert building == "docker compose build\n"
    return "".join(rest)


def upgraded(time: str) -> Fault:
    """Of a stack of the size that the file says. `time`: first, second ..; every one begins with other names."""

    def begin(stack: ComposeStack, worker: str) -> Callable[[], None]:
        before, wanted = _ids(stack), sum(stack.scale[service] for service in UPGRADED)
        stack.shell(recipe())
        after = _ids(stack)
        assert not before & after, "old ones are left"
        assert len(after) == wanted, f"{len(after)} of {wanted}"
        return lambda: None

    return Fault(name=f"upgrade, the {time}", begin=begin, allowance=NOTHING)


def _ids(stack: ComposeStack) -> set[str]:
    """Stopped ones, too."""
    return {container.id for container in stack.containers() if container.service in UPGRADED}
