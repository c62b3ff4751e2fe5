"""From the fields of a file to keys, and a table that says how."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..values import spell
from . import rules, training
from .alone import alone
from .keys import KEYS
from .said import AUTO, Claim, Said, leaves, parse

OF_A_FIELD = (alone, rules.switch, rules.loss_scale, training.parameter, training.curve)
OF_SEVERAL = (
    *(rules.precision, rules.batch, rules.budget, rules.path, rules.recomputing, rules.others),
    *(training.optimizer, training.scheduler),
)
LEFT = "left to this configuration"
TITLES = ("field", "value", "key", "value", "")


class Mapped(NamedTuple):
    """The claims that hold, by key, and all of them as a table: field, value, key, value, why."""

    said: Said
    claims: dict[str, Claim]
    rows: list[tuple[str, ...]]

    def table(self, path: str) -> tuple[str, list[tuple[str, ...]]]:
        """A title and the rows; only a line for a file that says nothing."""
        if not self.said.fields:
            return f"{path} says nothing: all keys are as configured here", []
        return f"{path} as keys of this configuration", self.rows

    def explain(self, error: ValueError) -> ValueError:
        """The error, with the file's spelling of the keys that it names."""
        named = [key for key in self.claims if _names(str(error), key)]
        origins = ", ".join(
            f"{key} comes from {_source(self.said, self.claims[key])}" for key in named
        )
        way = "make the change in the file"
        return ValueError(f"{error} ({origins}: {way})") if named else error


def apply(plain: dict[str, Any], given: Set[str], world_size: int | None = None) -> Mapped:
    """Write what the file at `plain["deepspeed"]` says into `plain`.

    Args:
        plain: the composed configuration, changed here.
        given: the keys of the command line.
        world_size: the number of processes, where `topology.dp` is inferred from it.

    Raises:
        ValueError: the file cannot be read, has an unknown field or a value without a counterpart,
            or disagrees with itself or the command line; names both sides and the way out.
    """
    path = Path(plain["deepspeed"])
    said = Said(path.name, dict(leaves(parse(path))), plain, world_size)
    claims = _claims(said)
    held = _held(said, claims)
    for key, claim in list(held.items()):
        found = _get(plain, key)
        if key not in given:
            _set(plain, key, claim.value)
        elif found != claim.value:
            if not claim.implied:
                raise _disagreement(said, f"{key} = {spell(found)} on the command line", claim)
            del held[key]
    target = _get(plain, "optim._target_")
    if target is not None and "optim.name" in held:
        raise _disagreement(said, f"optim._target_ = {target}", held["optim.name"])
    return Mapped(said, held, [TITLES, *_rows(said, claims, held)])


def _claims(said: Said) -> list[Claim]:
    """What all rules claim; what they refuse is told at once, to be mended in one go."""
    rules = [partial(rule, said, field) for field in said.fields for rule in OF_A_FIELD]
    rules += [partial(rule, said) for rule in OF_SEVERAL]
    claims: list[Claim] = []
    refused: list[str] = []
    for rule in rules:
        try:
            claims += rule()
        except ValueError as error:
            refused.append(str(error))
    if refused := list(dict.fromkeys(refused)):
        title = [f"{said.name} has {len(refused)} faults:"] if len(refused) > 1 else []
        raise ValueError("\n  ".join([*title, *refused]))
    return claims


def _held(said: Said, claims: Sequence[Claim]) -> dict[str, Claim]:
    """One claim for each key: said before implied; refuses two that differ."""
    held: dict[str, Claim] = {}
    for claim in sorted(claims, key=lambda claim: claim.implied):
        before = held.setdefault(claim.key, claim) if claim.key else claim
        if not claim.implied and before.value != claim.value:
            raise ValueError(
                f"{_source(said, before)} and {_source(said, claim)} disagree, both are "
                f"{claim.key}: take one of them away, or make them equal"
            )
    return held


def _disagreement(said: Said, ours: str, claim: Claim) -> ValueError:
    return ValueError(
        f"{ours}, but {_source(said, claim)} gives {claim.key} = {spell(claim.value)}: take one "
        f'of them away, or write "{AUTO}" in the file'
    )


def _rows(
    said: Said, claims: Sequence[Claim], held: Mapping[str, Claim]
) -> Iterator[tuple[str, ...]]:
    """In the order of the file, then what is implied; fields left open show the key's value."""
    order = {field: at for at, field in enumerate(said.fields)}
    told = {claim.field for claim in claims}
    left = [Claim(field, _decides(field), why=LEFT) for field in order if field not in told]

    def place(claim: Claim) -> tuple[int, bool]:
        return order.get(claim.field, len(order)), claim.implied

    for claim in sorted([*claims, *left], key=place):
        absent = claim.field not in order and claim.implied
        shown = "-" if absent else json.dumps(said.fields.get(claim.field, claim.value))
        ours = spell(_get(said.config, claim.key)) if claim.key else ""
        why = _overruled(claim, held) or claim.why or ("DeepSpeed's default" if absent else "")
        yield (claim.field, shown, claim.key or "-", ours, why)


def _overruled(claim: Claim, held: Mapping[str, Claim]) -> str:
    """By what an implied claim does not hold; empty if it does."""
    if claim.key is None or not claim.implied or held.get(claim.key) is claim:
        return ""
    return "said elsewhere" if claim.key in held else "the command line says it"


def _decides(field: str) -> str | None:
    alone = KEYS[field].key if field in KEYS else None
    return alone or rules.DECIDES.get(field) or training.decides(field)


def _source(said: Said, claim: Claim) -> str:
    if claim.field in said.fields:
        return said.spell(claim.field)
    return f"{claim.field} = {json.dumps(claim.value)} of {said.name}"


def _names(text: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\.?\w)", text) is not None


def _get(plain: Any, key: str) -> Any:
    for name in key.split("."):
        plain = plain.get(name) if isinstance(plain, dict) else None
    return plain


def _set(plain: dict[str, Any], key: str, value: Any) -> None:
    *groups, name = key.split(".")
    for group in groups:
        plain = plain.setdefault(group, {})
    plain[name] = value
