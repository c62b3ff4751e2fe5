"""Errors about keys that a DeepSpeed file gave, with the file's names for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import deepspeed
from .read import to_plain
from .schema import Config


@contextmanager
def naming_fields(config: Config, world_size: int) -> Iterator[None]:
    """ValueErrors inside name the fields of the `deepspeed` file that their keys come from.

    For the rules that need the number of ranks; those of `read` are told so already.
    """
    try:
        yield
    except ValueError as error:
        if config.deepspeed is None:
            raise
        raise _explained(error, config, world_size) from None


def _explained(error: ValueError, config: Config, world_size: int) -> ValueError:
    plain = to_plain(config)
    try:
        given = dict(deepspeed.leaves(plain)).keys()
        return deepspeed.apply(plain, given, world_size).explain(error)
    except ValueError:  # the file is gone, or another by now
        return error
