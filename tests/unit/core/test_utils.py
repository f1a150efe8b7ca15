"""Functions of megatron-core's ``utils``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.core import utils
from megatron.core.jit import jit_fuser


def test_division_without_remainder() -> None:
    assert utils.divide(12, 4) == 3
    with pytest.raises(AssertionError, match="12 is not divisible by 5"):
        utils.divide(12, 5)


def test_attributes_of_wrapped_models() -> None:
    inner = SimpleNamespace(config="settings", model_type=None)
    wrapped = SimpleNamespace(module=SimpleNamespace(module=inner, config=None))
    assert utils.get_model_config(wrapped) == "settings"
    assert utils.get_model_type(wrapped) is None
    assert utils.get_attr_wrapped_model(wrapped, "model_type", return_model_obj=True) is inner
    assert not utils.get_model_xattn(wrapped)
    with pytest.raises(RuntimeError, match="couldn't find attribute missing"):
        utils.get_attr_wrapped_model(wrapped, "missing")
    with pytest.raises(RuntimeError, match="list of models"):
        utils.get_model_config([inner])


@pytest.mark.parametrize("keep_graph", [True, False])
def test_views_become_tensors_of_their_own(keep_graph: bool) -> None:
    x = torch.arange(6.0, requires_grad=True)
    view = (x * 2).view(2, 3)
    alone = utils.make_viewless_tensor(view, requires_grad=True, keep_graph=keep_graph)
    assert alone._base is None
    assert alone.data_ptr() == view.data_ptr()
    assert torch.equal(alone, view)
    assert utils.make_viewless_tensor(alone, True, keep_graph) is alone
    if keep_graph:
        alone.sum().backward()
        assert torch.equal(x.grad, torch.full((6,), 2.0))
    assert utils.assert_viewless_tensor([alone, "no tensor"]) == [alone, "no tensor"]
    for check in (
        utils.assert_viewless_tensor,
        lambda each: utils.safely_set_viewless_tensor_data(each, torch.ones(1)),
    ):
        with pytest.raises(AssertionError, match="is a view of another"):
            check(view)
    utils.safely_set_viewless_tensor_data(alone, torch.ones(1))
    assert alone.tolist() == [1.0]


def test_versions_and_groups_of_one_process() -> None:
    assert utils.is_torch_min_version("2.0.0")
    assert not utils.is_torch_min_version("99.0")
    version = torch.__version__.split("+")[0]
    assert utils.is_torch_min_version(version) != utils.is_torch_min_version(version, check_equality=False)
    assert (utils.get_pg_size(), utils.get_pg_rank()) == (1, 0)
    assert utils.get_tensor_model_parallel_group_if_none(None) is None
    group = object()
    assert utils.get_tensor_model_parallel_group_if_none(group) is group
    assert jit_fuser(utils.divide) is utils.divide
