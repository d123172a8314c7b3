"""Rank 1 of 2, written by hand as a compiled script is: the last stage of test_observe's model."""

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RANK, WORLD_SIZE = 1, 2
MICROBATCHES, MICROBATCH_SIZE, STEPS = 3, 4, 4


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(8, 2)

    def forward(self, x, y):
        return F.mse_loss(self.down(x), y)


def init_weights():
    for name, p in stage.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        p.data.copy_(torch.randn(p.shape, generator=generator) / 2)


def get_batch(step):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(MICROBATCHES, MICROBATCH_SIZE, 2, generator=generator)


def run_microbatches(y):
    received, total = [], torch.zeros(())
    for _ in range(MICROBATCHES):
        received.append(torch.empty(MICROBATCH_SIZE, 8))
        dist.recv(received[-1], 0)
    for x, target in zip(received, y, strict=True):
        loss = stage(x.requires_grad_(), target) / MICROBATCHES
        loss.backward()
        dist.send(x.grad, 0)
        total += loss.detach()
    return total.item()


dist.init_process_group("gloo", timeout=timedelta(minutes=10))
stage = Stage()
init_weights()
optimizer = torch.optim.AdamW(stage.named_parameters(), lr=0.01)

metrics = Path(__file__).with_name("metrics.jsonl").open("a")
for step in range(STEPS):
    loss = run_microbatches(get_batch(step))
    square = nn.utils.get_total_norm([p.grad for p in stage.parameters()]) ** 2
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(stage.parameters(), 0.1, square.sqrt())
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank 1 | step {step} | loss {loss:.4f}")  # noqa: T201
    metrics.write(json.dumps({"step": step, "loss": loss}) + "\n")

metrics.close()
torch.save(stage.state_dict(), Path(__file__).with_name("weights-rank1.pt"))
dist.destroy_process_group()
