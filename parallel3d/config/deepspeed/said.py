"""What a file says: its fields by dotted name, and what each claims of our keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .keys import NO_SWITCH, whole

AUTO = "auto"


class Claim(NamedTuple):
    """What a field says of a key, or why it says nothing.

    `implied`: DeepSpeed's default, or of no weight; gives way to whatever else is said.
    """

    field: str
    key: str | None
    value: Any = None
    why: str = ""
    implied: bool = False


@dataclass(frozen=True)
class Said:
    """What a file says, by dotted name, beside what the configuration has without it."""

    name: str
    fields: Mapping[str, Any]
    config: Mapping[str, Any]
    world_size: int | None

    def get(self, field: str) -> Any:
        """The value; None where the file is silent or leaves it open (`"auto"`)."""
        value = self.fields.get(field)
        return None if value == AUTO else value

    def whole(self, field: str) -> int | None:
        """The value, which must be a whole number."""
        value = self.turned(field, whole)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.refuse(field, "is not a whole number")
        return value

    def turned(self, field: str, turn: Callable[[Any], Any]) -> Any:
        """The value as `turn` makes it; what that refuses is refused by the field's name."""
        try:
            return turn(self.get(field))
        except ValueError as error:
            raise self.refuse(field, str(error)) from None

    def spell(self, field: str) -> str:
        """The field and its value, as the file has them."""
        return f"{field} = {json.dumps(self.fields[field])} in {self.name}"

    def refuse(self, field: str, reason: str) -> ValueError:
        """An error about one field."""
        return ValueError(f"{self.spell(field)} {reason}")

    def require(self, field: str, *values: Any, why: str = "") -> None:
        """Refuse a value that is none of these; 0 and null are not false."""
        value, switch = self.fields[field], isinstance(values[0], bool)
        if value == AUTO or (value is None and not switch):
            return
        # True == 1, so the type counts as well.
        if value not in values or isinstance(value, bool) != switch:
            reason = NO_SWITCH if switch and not isinstance(value, bool) else "has no counterpart"
            because = f" ({why})" if why else ""
            ways = " or ".join(json.dumps(value) for value in values)
            raise self.refuse(field, f"{reason}{because}: write {ways}")


def parse(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; a field may be there once."""
    try:
        read = json.loads(path.read_text(), object_pairs_hook=_once)
    except OSError as error:
        raise ValueError(
            f"deepspeed = {str(path)!r} cannot be read ({error.strerror}): it is the path of a "
            f"JSON file, relative to the working directory"
        ) from error
    except ValueError as error:
        raise ValueError(f"deepspeed = {str(path)!r} is not plain JSON: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"deepspeed = {str(path)!r} holds no object of fields: it starts with {{")
    return read


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key, value in pairs:
        if key in read:
            both = f"{json.dumps(read[key])} and {json.dumps(value)}"
            raise ValueError(f"{key} is there twice, {both}: take one away")
        read[key] = value
    return read


def leaves(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by dotted name; an empty section is one with the value `{}`.

    A name that has a dot itself is in quotes: it is not the field that nested names would be.
    """
    for key, value in section.items():
        name = f"{path}{json.dumps(key)}" if "." in str(key) else f"{path}{key}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{name}.")
        else:
            yield name, value
