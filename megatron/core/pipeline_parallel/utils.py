"""megatron-core's questions about a stage's position in a pipeline, whose group is a ``Group`` or torch's."""

from __future__ import annotations

from typing import Any

from megatron.core.process_state import resolve_group


def is_pp_first_stage(pp_group: Any) -> bool:
    """Return whether this rank has the first stage."""
    return resolve_group(pp_group, "pp").is_first


def is_pp_last_stage(pp_group: Any) -> bool:
    """Return whether this rank has the last stage."""
    return resolve_group(pp_group, "pp").is_last


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether a virtual stage is the first of its rank.

    Raises:
        AssertionError: ``vp_stage`` is neither 0 nor None, but the rank has one stage.
    """
    return _vp_stage(vp_stage, vp_size) == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether a virtual stage is the last of its rank; see `is_vp_first_stage`."""
    return _vp_stage(vp_stage, vp_size) == max(vp_size or 1, 1) - 1


def get_pp_first_rank(pp_group: Any) -> int:
    """Return the global rank of the first stage."""
    return resolve_group(pp_group, "pp").ranks[0]


def get_pp_last_rank(pp_group: Any) -> int:
    """Return the global rank of the last stage."""
    return resolve_group(pp_group, "pp").ranks[-1]


def get_pp_next_rank(pp_group: Any) -> int | None:
    """Return the global rank of the next stage; None on the last stage."""
    pp = resolve_group(pp_group, "pp")
    return None if pp.is_last else pp.ranks[pp.rank + 1]


def get_pp_prev_rank(pp_group: Any) -> int | None:
    """Return the global rank of the previous stage; None on the first stage."""
    pp = resolve_group(pp_group, "pp")
    return None if pp.is_first else pp.ranks[pp.rank - 1]


def _vp_stage(vp_stage: int | None, vp_size: int | None) -> int:
    if vp_size is None or vp_size <= 1:
        assert vp_stage in (None, 0), f"vp_stage is {vp_stage}, but vp_size {vp_size} has one stage; pass 0 or None"
        return 0
    assert vp_stage is not None, f"vp_stage is None; pass a number below vp_size {vp_size}"
    return vp_stage
