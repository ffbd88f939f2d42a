"""A change of a few bytes in a body that else goes as it came, made without a copy of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyEdit:
    """`new` stands in place of body[begin:end]."""

    begin: int
    end: int
    new: bytes

    def length(self, body: bytes) -> int:
        """Of the changed body."""
        return len(body) + len(self.new) - (self.end - self.begin)

    def parts(self, body: bytes) -> tuple[memoryview, bytes, memoryview]:
        """What the changed body consists of; the views hold on to the old one."""
        whole = memoryview(body)
        return whole[: self.begin], self.new, whole[self.end :]
