"""Former names of modules work, and say the present ones."""

from __future__ import annotations

import importlib
import sys

import pytest

from megatron.moved_modules import MOVED


@pytest.mark.parametrize("former", MOVED)
def test_a_former_name_works_with_a_warning(former: str) -> None:
    sys.modules.pop(former, None)
    with pytest.warns(FutureWarning, match=MOVED[former].split()[0]):
        module = importlib.import_module(former)
    for name in MOVED[former].split():
        present = importlib.import_module(name)
        public = [key for key in vars(present) if not key.startswith("_")]
        assert public
        assert all(hasattr(module, key) for key in public)


def test_other_names_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megatron.training.process.absent")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megatron.corpus")
