"""From Hydra's composed configuration to a typed one, and back to YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import deepspeed
from .rules import check
from .schema import Config
from .targets import locate, takes
from .values import convert, spell

Tell = Callable[[str, Sequence[Sequence[object]]], None]


def read(
    cfg: DictConfig,
    given: Sequence[str] = (),
    world_size: int | None = None,
    tell: Tell | None = None,
) -> Config:
    """Check a composed configuration and return it typed.

    First what the file `deepspeed` says is put in, then the schema (every key known and of its
    type), then the rules between fields. Rules that need the number of processes are in `settle`.

    Args:
        cfg: as Hydra hands it to a recipe.
        given: the overrides of the command line: `data.microbatch_size` without
            `pipeline.num_microbatches` among them replaces the latter's default, and a
            `model._target_` replaces those keys of the default model that it does not take.
        world_size: the number of processes, for the batch of a `deepspeed` file.
        tell: called with a title and the rows of a table of what the `deepspeed` file says here.

    Raises:
        ValueError: the value, the rule and the way out.
    """
    plain = _plain(cfg)
    names = _keys_of(given)
    file = plain.get("deepspeed")
    if isinstance(file, int | float) and not isinstance(file, bool):
        # Not taken as the path: 1.50 and 2e3 are other texts by now.
        raise ValueError(
            f"deepspeed = {spell(file)} is a number, not the path of a file: "
            f"write ./ before the name"
        )
    if not isinstance(file, str):
        return _typed(plain, names)
    mapped = deepspeed.apply(plain, names, world_size)
    if tell is not None:
        tell(*mapped.table(file))
    try:
        return _typed(plain, names | mapped.claims.keys())
    except ValueError as error:
        raise mapped.explain(error) from None


def _plain(cfg: DictConfig) -> dict[str, Any]:
    try:
        plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {error.msg}") from error
    return dict(plain)


def _keys_of(overrides: Sequence[str]) -> set[str]:
    """The keys that overrides have a value for, those inside of `group={key: value}` too."""
    found: set[str] = set()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = None if override.is_delete() else override.value()
        inner = deepspeed.leaves(value) if isinstance(value, dict) else [("", None)]
        found |= {".".join(filter(None, (override.key_or_group, key))) for key, _ in inner}
    return found


def _typed(plain: dict[str, Any], names: set[str]) -> Config:
    if "model._target_" in names:
        plain["model"] = _taken(plain["model"], names)
    config: Config = _group(Config, plain, ())
    if "data.microbatch_size" in names and "pipeline.num_microbatches" not in names:
        config = replace(config, pipeline=replace(config.pipeline, num_microbatches=None))
    check(config)
    return config


def _taken(model: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The keys of the model group that the user gave or that its target takes."""
    target = locate(model["_target_"], "model._target_")
    return {
        key: value
        for key, value in model.items()
        if key == "_target_" or f"model.{key}" in names or takes(target, key)
    }


def load(path: Path) -> Config:
    """Read the `config.yaml` of a run, which has the values of its `deepspeed` file already."""
    cfg = OmegaConf.load(path)
    if not isinstance(cfg, DictConfig):
        raise ValueError(f"{path} holds no configuration")
    return _typed(_plain(cfg), set())


def to_yaml(config: Config) -> str:
    """The configuration as YAML; `load` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def to_plain(group: Any) -> Any:
    """Nested dicts of a configuration, with `extra` among the other keys."""
    if not is_dataclass(group):
        return list(group) if isinstance(group, tuple) else group
    plain = {item.name: to_plain(getattr(group, item.name)) for item in fields(group)}
    plain |= plain.pop("extra", {})
    if plain.get("_target_", "") is None:
        del plain["_target_"]
    return plain


def _group(kind: Any, plain: Any, path: tuple[str, ...]) -> Any:
    if not isinstance(plain, dict):
        keys = ", ".join(_dotted(path, item.name) for item in fields(kind) if item.name != "extra")
        raise ValueError(f"{'.'.join(path)} = {spell(plain)} is not a group of keys: set {keys}")
    known = {item.name: item for item in fields(kind) if item.name != "extra"}
    extra = {key: value for key, value in plain.items() if key not in known}
    is_open = any(item.name == "extra" for item in fields(kind))
    if extra and not is_open:
        raise ValueError(_unknown(_dotted(path, str(next(iter(extra))))))
    values: dict[str, Any] = {"extra": extra} if is_open else {}
    hints = get_type_hints(kind)
    for key, item in known.items():
        at = _dotted(path, key)
        if key in plain:
            values[key] = _value(plain[key], hints[key], (*path, key))
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{at} is missing: set it, or compose conf/pretrain.yaml")
    return kind(**values)


def _value(value: Any, hint: Any, path: tuple[str, ...]) -> Any:
    if is_dataclass(hint):
        return _group(hint, value, path)
    return convert(value, hint, ".".join(path))


def _unknown(key: str) -> str:
    keys = list(_keys(Config, ()))
    group, _, leaf = key.rpartition(".")
    # A key in the wrong group first (`lr` for `optim.lr`), then a misspelt one.
    misplaced = [each for each in keys if each.rpartition(".")[2] == leaf]
    candidates = [each for each in keys if not key.startswith(f"{each}.")]
    close = misplaced or get_close_matches(key, candidates, n=1, cutoff=0.6)
    beside = [each for each in keys if each.rpartition(".")[0] == group]
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(beside)}"
    return f"{key} is not a key; {hint}"


def _keys(kind: Any, path: tuple[str, ...]) -> Iterator[str]:
    hints = get_type_hints(kind)
    for item in fields(kind):
        if item.name == "extra":
            continue
        yield _dotted(path, item.name)
        if is_dataclass(hints[item.name]):
            yield from _keys(hints[item.name], (*path, item.name))


def _dotted(path: tuple[str, ...], key: str) -> str:
    return ".".join((*path, key))
