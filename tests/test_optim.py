"""The optimizers against torch's."""

import pytest
import torch
from torch import nn

import optim


@pytest.mark.parametrize("shapes", [[(16, 16)] * 3 + [(48, 16)] * 2 + [(16, 48)], [(8, 24)]])
def test_muon_in_batches_is_torchs_muon(shapes):
    flags = dict(lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = optim.BatchedMuon(ours, **flags), torch.optim.Muon(theirs, **flags)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4)  # an update is 0.016, and orthogonal in bfloat16
        state = optimizers[0].state[p]["momentum_buffer"]
        torch.testing.assert_close(state, optimizers[1].state[q]["momentum_buffer"])
