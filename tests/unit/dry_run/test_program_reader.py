"""Programs that are read without Triton leave no trace in the process, also if one of them cannot be imported."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

import pytest

from megatron.core.ops import triton as triton_kernels
from megatron.planner.simulation import fake_triton

NAMES = [f"{triton_kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(triton_kernels.__path__)]
WATCHED = (*NAMES, "triton", "triton.language", "triton.errors")


def loaded() -> dict[str, ModuleType]:
    return {name: sys.modules[name] for name in WATCHED if name in sys.modules}


def test_a_program_that_cannot_be_imported_leaves_the_others_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = importlib.import_module
    own = ModuleType(NAMES[0])
    monkeypatch.setitem(sys.modules, NAMES[0], own)
    monkeypatch.setattr(triton_kernels, NAMES[0].rpartition(".")[2], own, raising=False)
    before = loaded()

    def import_all_but_the_last(name: str) -> ModuleType:
        if name == NAMES[-1]:
            raise ImportError(name)
        return imported(name)

    monkeypatch.setattr("megatron.planner.simulation.fake_triton.importlib.import_module", import_all_but_the_last)
    with pytest.raises(ImportError, match=NAMES[-1]), fake_triton.readable_programs():
        raise AssertionError("the programs are not readable")
    assert loaded() == before
    assert getattr(triton_kernels, NAMES[0].rpartition(".")[2]) is own
    monkeypatch.undo()
    before = loaded()
    with fake_triton.readable_programs():
        assert {*NAMES} <= sys.modules.keys()
    assert loaded() == before
