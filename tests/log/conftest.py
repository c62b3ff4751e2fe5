import sys

import pytest

from .records import FakeWandb


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    """A W&B that only remembers, in place of the module `wandb`."""
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # so that it is put back if it is changed
    return module
