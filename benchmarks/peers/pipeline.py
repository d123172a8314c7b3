"""torch.distributed.pipelining on the net that settings.json names; writes times.json."""

import json
import os
import time

import stages
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

with open("settings.json") as file:
    settings = json.load(file)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(0)
job = stages.make(settings)
module = job.stage(rank, ranks)
schedules = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
schedule = schedules[settings["schedule"]](stage, settings["microbatches"], loss_fn=job.loss)
optimizer = job.optimizer(module.parameters())

times, begin = [], time.perf_counter()
for step in range(settings["steps"]):
    if rank == 0:
        schedule.step(job.inputs(step))
    elif rank == ranks - 1:
        losses = []
        schedule.step(target=job.targets(step), losses=losses, return_outputs=False)
        loss = torch.stack(losses).mean()
    else:
        schedule.step()
    job.update(optimizer, step)
    if rank == ranks - 1:
        loss.item()
        times.append(time.perf_counter() - begin)

if rank == ranks - 1:
    with open("times.json", "w") as file:
        json.dump(times, file)
dist.destroy_process_group()
