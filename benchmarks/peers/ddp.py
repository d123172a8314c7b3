"""DistributedDataParallel on the same samples; writes times.json."""

import json
import os
import time
from contextlib import nullcontext

import stages
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

with open("settings.json") as file:
    settings = json.load(file)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
job = stages.make(settings)
model, microbatches = DistributedDataParallel(job.model), settings["microbatches"]
optimizer = job.optimizer(model.parameters())

times, begin = [], time.perf_counter()
for step in range(settings["steps"]):
    inputs, targets = (
        t.chunk(microbatches * ranks)[rank::ranks] for t in (job.inputs(step), job.targets(step))
    )
    total = 0.0
    for i, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        with model.no_sync() if i < microbatches - 1 else nullcontext():
            loss = job.loss(model(x), y) / microbatches
            loss.backward()
        total += loss.detach()
    job.update(optimizer, step)
    dist.all_reduce(total)
    if rank == 0:
        total.item()
        times.append(time.perf_counter() - begin)

if rank == 0:
    with open("times.json", "w") as file:
        json.dump(times, file)
dist.destroy_process_group()
os._exit(0)  # where Python takes DDP apart, it hangs now and then
