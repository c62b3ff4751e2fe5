"""The configuration: typed schema, the rules between fields, and the targets it names.

The only room that imports omegaconf; the rooms below take plain values.
"""

from .compose import allow_new_keys, compose, explain
from .optimizer import optimizer_class, optimizer_keys
from .origins import naming_fields
from .read import load, read, to_plain, to_yaml
from .rules import check_resume, settle
from .schema import Config
from .targets import call, locate, takes

__all__ = [
    "Config",
    "allow_new_keys",
    "call",
    "check_resume",
    "compose",
    "explain",
    "load",
    "locate",
    "naming_fields",
    "optimizer_class",
    "optimizer_keys",
    "read",
    "settle",
    "takes",
    "to_plain",
    "to_yaml",
]
