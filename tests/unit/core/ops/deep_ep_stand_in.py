"""A stand-in for DeepEP's package deep_ep 1.2.1 with its signatures, on torch.distributed; tests install it as that.

It rejects what the kernels reject. On a CPU the results of an asynchronous call are garbage until the wait, and on CUDA
they are written on another stream. float64 is accepted too, with weights in float64.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__version__ = "1.2.1"
topk_idx_t = torch.int64
calls: list[str] = []
"""Names of the calls in their order; (cached) for a dispatch with a handle, (weights) for a combine with weights."""
SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
WEIGHTS = {torch.bfloat16: torch.float32, torch.float64: torch.float64}


class Config:
    def __init__(self, num_sms, nvl_send, nvl_recv, rdma_send, rdma_recv):
        assert num_sms >= 0
        assert 0 < nvl_send < nvl_recv
        assert 0 < rdma_send <= rdma_recv / 2
        self.num_sms, self.nvl_recv, self.rdma_recv = num_sms, nvl_recv, rdma_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        assert num_ranks < 8 or num_ranks % 8 == 0
        return self.num_sms // 2 * min(num_ranks, 8) * self.nvl_recv * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0 if num_ranks <= 8 else self.num_sms // 2 * (num_ranks // 8) * self.rdma_recv * hidden_bytes * 2


class EventOverlap:
    def __init__(self, event=None, extra_tensors=None):
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self):
        assert self.event is not None, "there is an event only with async_finish"
        self.event()


class Handle(tuple):
    """Opaque contents of a handle, usable after the wait for the dispatch that returned it."""

    is_complete = False


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        use_fabric=False,
        explicitly_destroy=False,
        enable_shrink=False,
        comm=None,
    ):
        assert not low_latency_mode
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        of_ranks = [None] * self.group_size
        dist.all_gather_object(of_ranks, (num_nvl_bytes, num_rdma_bytes), group)
        assert set(of_ranks) == {(num_nvl_bytes, num_rdma_bytes)}
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        calls.append("Buffer")

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        assert num_ranks in SIZES, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 6, 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks):
        assert num_ranks in SIZES, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 4, 256, 6, 128)

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        assert previous_event is None
        assert not async_finish
        assert not allocate_on_comm_stream
        calls.append("layout")
        self._check_indices(topk_idx, num_experts)

        def compute():
            experts = torch.arange(num_experts, device=topk_idx.device)
            is_chosen = (topk_idx.unsqueeze(-1) == experts).any(dim=1)
            is_sent = is_chosen.view(len(topk_idx), self.group_size, -1).any(dim=-1)
            return is_sent.sum(dim=0).int(), is_chosen.sum(dim=0).int(), is_sent

        (per_rank, per_expert, is_sent), _ = self._run(compute, (topk_idx,), False)
        per_rdma_rank = None if self.group_size <= 8 else per_rank.view(-1, 8).sum(dim=1).int()
        return per_rank, per_rdma_rank, per_expert, is_sent, EventOverlap()

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert (expert_alignment, num_worst_tokens, config, previous_event) == (1, 0, None, None)
        assert not allocate_on_comm_stream
        self._check_rows(x)
        if handle is not None:
            given = (num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert)
            assert all(each is None for each in (*given, topk_idx, topk_weights)), "the handle has the layout"
            sent, received, source = self._unpack(handle)
            assert len(x) == self._num_tokens(handle)
            calls.append("dispatch (cached)")
            (rows,), event = self._run(lambda: (self._send(x[source], sent, received),), (x, source), async_finish)
            return rows, None, None, None, None, event
        calls.append("dispatch")
        for counts, size in ((num_tokens_per_rank, self.group_size), (num_tokens_per_expert, None)):
            assert counts.dtype is torch.int32
            assert counts.is_contiguous()
            assert size in (None, len(counts))
        assert (num_tokens_per_rdma_rank is not None) == (self.group_size > 8)
        assert is_token_in_rank.dtype is torch.bool
        assert is_token_in_rank.shape == (len(x), self.group_size)
        num_experts = len(num_tokens_per_expert)
        self._check_indices(topk_idx, num_experts)
        assert topk_weights.shape == topk_idx.shape
        assert len(topk_idx) == len(x)
        assert topk_weights.is_contiguous()
        assert topk_weights.dtype is WEIGHTS[x.dtype]
        num_local = num_experts // self.group_size
        outcome = []

        def compute():
            chosen = topk_idx[topk_idx >= 0].bincount(minlength=num_experts)
            assert torch.equal(chosen.int(), num_tokens_per_expert)
            assert torch.equal(is_token_in_rank.sum(dim=0).int(), num_tokens_per_rank)
            rank, source = is_token_in_rank.t().nonzero(as_tuple=True)
            going = num_tokens_per_rank.long()
            coming = torch.empty_like(going)
            dist.all_to_all_single(coming, going, group=self.group)
            sent, received = going.tolist(), coming.tolist()
            local = topk_idx[source] - rank.unsqueeze(1) * num_local
            is_there = (topk_idx[source] >= 0) & (local >= 0) & (local < num_local)
            assert is_there.any(dim=1).all()
            indices = self._send(local.masked_fill(~is_there, -1), sent, received)
            weights = self._send(topk_weights[source].masked_fill(~is_there, 0.0), sent, received)
            counts = indices[indices >= 0].bincount(minlength=num_local).tolist()
            outcome.extend((sent, received, source, len(x), topk_idx.shape[1], counts))
            return self._send(x[source], sent, received), indices, weights

        inputs = (x, topk_idx, topk_weights, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        results, event = self._run(compute, inputs, async_finish, lambda: setattr(handle, "is_complete", True))
        *contents, counts = outcome
        handle = Handle((*contents, self))
        handle.is_complete = not async_finish
        return *results, counts, handle, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert (bias, config, previous_event) == (None, None, None)
        assert not allocate_on_comm_stream
        self._check_rows(x)
        sent, received, source = self._unpack(handle)
        assert len(x) == sum(received)
        calls.append("combine" if topk_weights is None else "combine (weights)")
        if topk_weights is not None:
            assert topk_weights.shape == (len(x), handle[4])
            assert topk_weights.dtype is WEIGHTS[x.dtype]
            assert topk_weights.is_contiguous()

        def add(rows):
            back = self._send(rows, received, sent).to(WEIGHTS[x.dtype])
            total = back.new_zeros(self._num_tokens(handle), rows.shape[1])
            return total.index_add_(0, source, back).to(rows.dtype)

        given = (x,) if topk_weights is None else (x, topk_weights)
        results, event = self._run(lambda: tuple(add(rows) for rows in given), (*given, source), async_finish)
        return results[0], None if topk_weights is None else results[1], event

    def _unpack(self, handle):
        assert handle[-1] is self, "the handle is of another buffer"
        assert handle.is_complete, "the dispatch has not been waited for"
        return handle[:3]

    def _num_tokens(self, handle):
        return handle[3]

    def _check_indices(self, topk_idx, num_experts):
        assert topk_idx.dtype is topk_idx_t
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert topk_idx.shape[1] <= 32
        assert num_experts % self.group_size == 0
        assert bool(((topk_idx >= -1) & (topk_idx < num_experts)).all())

    def _check_rows(self, x):
        assert x.dtype in WEIGHTS
        assert x.dim() == 2
        assert x.is_contiguous()
        row_bytes = x.shape[1] * x.element_size()
        assert row_bytes % 32 == 0
        for config in (self.get_dispatch_config(self.group_size), self.get_combine_config(self.group_size)):
            assert config.get_nvl_buffer_size_hint(row_bytes, self.group_size) <= self.num_nvl_bytes

    def _send(self, rows, sent, received):
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=self.group)
        return output

    def _run(self, compute, inputs, async_finish, on_wait=lambda: None):
        """Return the results of a kernel, and the event after it."""
        if self.stream is None:
            results = compute()
            if not async_finish:
                return results, EventOverlap()
            garbage = tuple(torch.full_like(each, -77 if each.dtype is torch.int64 else torch.nan) for each in results)

            def fill():
                for into, result in zip(garbage, results):
                    into.copy_(result)
                on_wait()

            return garbage, EventOverlap(fill)
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            results = compute()
        for each in results:
            each.record_stream(current)
        for each in inputs:
            each.record_stream(self.stream)
        if not async_finish:
            current.wait_stream(self.stream)
            return results, EventOverlap()
        done = self.stream.record_event()

        def wait():
            torch.cuda.current_stream().wait_event(done)
            on_wait()

        return results, EventOverlap(wait)
