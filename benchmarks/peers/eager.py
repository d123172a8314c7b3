"""The loop that a user would write for one process; writes times.json."""

import json
import time

import stages
import torch

with open("settings.json") as file:
    settings = json.load(file)
torch.manual_seed(0)
job = stages.make(settings)
model, microbatches = job.model, settings["microbatches"]
optimizer = job.optimizer(model.parameters())

times, begin = [], time.perf_counter()
for step in range(settings["steps"]):
    inputs, targets = (t.chunk(microbatches) for t in (job.inputs(step), job.targets(step)))
    total = 0.0
    for x, y in zip(inputs, targets, strict=True):
        loss = job.loss(model(x), y) / microbatches
        loss.backward()
        total += loss.detach()
    job.update(optimizer, step)
    total.item()
    times.append(time.perf_counter() - begin)

with open("times.json", "w") as file:
    json.dump(times, file)
