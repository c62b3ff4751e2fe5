"""Fields one by one: what stands alone is claimed here, what is not known is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches

from . import rules, training
from .keys import GIVES_WAY, KEYS
from .said import AUTO, Claim, Said
from .silent import NEEDS_NONE, OFF, ONLY, UNBUILT

KNOWN = (*KEYS, *rules.DECIDES, *training.FIELDS, *ONLY, *NEEDS_NONE, *(f"{s}.*" for s in OFF))


def alone(said: Said, field: str) -> Iterator[Claim]:
    """The claim of a field that stands alone; what is not known is refused here."""
    section, _, rest = field.partition(".")
    if '"' in field and not field.startswith(training.PARAMS):
        raise _flat(said, field)
    if section in UNBUILT:
        raise ValueError(
            f"{section} in {said.name} is not built here ({UNBUILT[section]}): take the section "
            f"out of the file"
        )
    if said.fields[field] == {} and _inside(field):
        return
    if field in KEYS:
        if said.fields[field] != AUTO:
            yield _turned(said, field)
    elif field in ONLY:
        said.require(field, ONLY[field][0], why=ONLY[field][1])
        yield Claim(field, None, why=ONLY[field][1])
    elif rest and section in OFF:
        if rest.endswith("enabled"):
            said.require(field, False)
        yield Claim(field, None, why="off")
    elif why := NEEDS_NONE.get(field) or (NEEDS_NONE.get(f"{section}.*") if rest else None):
        yield Claim(field, None, why=why)
    elif field not in KNOWN and not field.startswith(training.PARAMS):
        raise _unknown(said, field)


def _turned(said: Said, field: str) -> Claim:
    key, turn, why = KEYS[field]
    value = said.turned(field, turn)
    # What leaves a choice automatic, and what is logged, contradicts nobody who makes a choice.
    return Claim(field, key, value, why, implied=value is None or key in GIVES_WAY)


def _flat(said: Said, field: str) -> ValueError:
    nested = said.fields[field]
    for name in reversed(field.replace('"', "").split(".")):
        nested = {name: nested}
    way = json.dumps(nested)[1:-1]
    return ValueError(f"{field} in {said.name} is not a field that is known; nest it: write {way}")


def _unknown(said: Said, field: str) -> ValueError:
    if inside := _inside(field):
        return said.refuse(field, f"is no section: write its fields, such as {inside}")
    names = [known.removesuffix(".*") for known in KNOWN]
    misplaced = [known for known in names if known.endswith(f".{field}")]
    close = misplaced or get_close_matches(field, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "take it away"
    return ValueError(f"{field} in {said.name} is not a field that is known; {hint}")


def _inside(section: str) -> str | None:
    return next((known for known in KNOWN if known.startswith(f"{section}.")), None)
