"""Open sets: a `_target_` names any callable, and its signature says which keys it takes."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, get_type_hints

from .values import NAMES, convert, spell

SIMPLE = {*NAMES, int | None, float | None, str | None, bool | None}


def locate(path: Any, key: str) -> Callable[..., Any]:
    """The callable at a dotted path, for example `models.gpt.build`.

    Raises:
        ValueError: cannot be imported, or is not callable; names key, path and the reason.
    """
    rule = "it must be module.name, importable from the working directory"
    if not isinstance(path, str) or "." not in path:
        raise ValueError(f"{key} = {spell(path)} names no callable: {rule}")
    try:
        found = pydoc.locate(path)
    except pydoc.ErrorDuringImport as error:
        reason = f"{type(error.value).__name__}: {error.value}"
        raise ValueError(f"{key} = {path!r} cannot be imported ({reason}): {rule}") from error
    if found is None:
        raise ValueError(f"{key} = {path!r} does not exist: {rule}")
    if not callable(found):
        raise ValueError(f"{key} = {path!r} is a {type(found).__name__}, not a callable: {rule}")
    return found


def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What can be given by name; `**` stands for anything, where the target takes that."""
    try:
        found = list(inspect.signature(target).parameters.values())
    except ValueError:  # some C functions have no signature
        return {"**": inspect.Parameter("rest", inspect.Parameter.VAR_KEYWORD)}
    by_name = {p.name: p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    rest = [p for p in found if p.kind is p.VAR_KEYWORD]
    return {**by_name, "**": rest[0]} if rest else by_name


def path_of(target: Callable[..., Any]) -> str:
    """Where the target is, dotted."""
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def takes(target: Callable[..., Any], name: str) -> bool:
    """Whether the target can be given `name`."""
    return not parameters(target).keys().isdisjoint((name, "**"))


def check_keys(
    group: str,
    target: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    known: Collection[str] = (),
    supplied: Collection[str] = (),
    partial: bool = False,
) -> None:
    """Check the keys of a group against the signature of its target.

    Args:
        group: the group's name, for messages.
        target: what `_target_` names.
        given: keys and values that are meant for it.
        known: other keys of the group, candidates for what a misspelt key meant.
        supplied: names that the program gives; they need not be among the keys.
        partial: whether what is missing may come later, at each call.

    Raises:
        ValueError: a key that the target does not take, lacks, or takes with another type.
    """
    allowed = parameters(target)
    hints = _hints(target)
    for key, value in given.items():
        if key not in allowed and "**" not in allowed:
            names = sorted({name for name in allowed if name not in supplied} | set(known))
            raise ValueError(_unknown(group, key, names, path_of(target)))
        if hints.get(key) in SIMPLE and not (value is None and key in supplied):
            convert(value, hints[key], f"{group}.{key}")
    missing = [
        name
        for name, parameter in allowed.items()
        if name != "**" and parameter.default is parameter.empty and name not in {*given, *supplied}
    ]
    if missing and not partial:
        raise ValueError(f"{group}.{missing[0]} is missing: {group}._target_ needs it")


def call(group: Mapping[str, Any], key: str, **offered: Any) -> Any:
    """Call the group's `_target_` with its keys, and with what it takes of `offered`.

    Keys of `offered` win over the group's. Nested `_target_`s are built first, as Hydra does.
    """
    from hydra.utils import instantiate

    target = locate(group["_target_"], f"{key}._target_")
    wanted = {name: value for name, value in offered.items() if takes(target, name)}
    keys = {name: value for name, value in group.items() if name not in wanted}
    return instantiate({**keys, "_partial_": True, "_convert_": "all"})(**wanted)


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):
        return {}


def _unknown(group: str, key: str, names: list[str], where: str) -> str:
    close = get_close_matches(key, names, n=1, cutoff=0.5)
    rest = f"it takes {', '.join(names)}; ~{group}.{key} takes the key away"
    hint = f"did you mean {group}.{close[0]}?" if close else rest
    return f"{group}.{key} is not a key of {where}; {hint}"
