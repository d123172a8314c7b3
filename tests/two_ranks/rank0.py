"""Rank 0 of 2, written by hand as a compiled script is: the first stage of test_observe's model."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

RANK, WORLD_SIZE = 0, 2
MICROBATCHES, MICROBATCH_SIZE, STEPS = 3, 4, 4


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.up(self.norm(self.embed(x))))


def init_weights():
    for name, p in stage.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        p.data.copy_(torch.randn(p.shape, generator=generator) / 2)


def get_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(MICROBATCHES, MICROBATCH_SIZE, 5, generator=generator)


def run_microbatches(x):
    live = {}
    for mb in range(MICROBATCHES):
        live[mb] = stage(x[mb])
        dist.send(live[mb].detach(), 1)
    for mb in range(MICROBATCHES):
        grad = torch.empty_like(live[mb])
        dist.recv(grad, 1)
        live.pop(mb).backward(grad)


dist.init_process_group("gloo", timeout=timedelta(minutes=10))
stage = Stage()
init_weights()
optimizer = torch.optim.AdamW(
    [(n, p) for n, p in stage.named_parameters() if p.requires_grad], lr=0.01
)

for step in range(STEPS):
    run_microbatches(get_batch(step))
    square = nn.utils.get_total_norm([p.grad for p in stage.parameters() if p.requires_grad]) ** 2
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(stage.parameters(), 0.1, square.sqrt())
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank 0 | step {step}")  # noqa: T201

torch.save(stage.state_dict(), Path(__file__).with_name("weights-rank0.pt"))
dist.destroy_process_group()
