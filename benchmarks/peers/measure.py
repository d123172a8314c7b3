"""What the simulator wants to know of this machine; writes measured.json.

One rank: seconds of a sleeping layer's forward and backward, Python and autograd included. Two: of
a message from rank to rank, small and large.
"""

import json
import os
import time
from statistics import median

import net
import torch
import torch.distributed as dist

with open("settings.json") as file:
    settings = json.load(file)


def op_times():
    """Of a layer between two others."""
    layer = net.Layer(settings["width"])
    forward_s, backward_s = [], []
    for _ in range(settings["rounds"]):
        x = torch.ones(1, settings["width"]).requires_grad_()
        grad = torch.ones(1, settings["width"])
        times = [time.perf_counter()]
        out = layer(x)
        times.append(time.perf_counter())
        out.backward(grad)
        times.append(time.perf_counter())
        forward_s.append(times[1] - times[0])
        backward_s.append(times[2] - times[1])
    return {"forward_s": median(forward_s), "backward_s": median(backward_s)}


def exchange(elements, rounds):
    """Seconds from rank 0 to rank 1 and of a short answer."""
    taken = []
    for _ in range(rounds):
        answer = torch.zeros(1)
        if rank == 0:
            message = torch.ones(elements)
            dist.barrier()
            time.sleep(0.005)  # the receive is posted by then, as it is in the scripts
            start = time.perf_counter()
            dist.isend(message, 1, group=there).wait()
            dist.recv(answer, 1, group=back)
            taken.append(time.perf_counter() - start)
        else:
            message = torch.empty(elements)
            work = dist.irecv(message, 0, group=there)
            dist.barrier()
            work.wait()
            dist.isend(answer, 0, group=back).wait()
    return median(taken) if rank == 0 else 0.0


if int(os.environ["WORLD_SIZE"]) == 1:
    found = op_times()
else:
    dist.init_process_group("gloo")
    rank, there, back = dist.get_rank(), dist.new_group([0, 1]), dist.new_group([0, 1])
    exchange(1024, 20)
    small = exchange(1024, settings["rounds"])
    found = {"latency_s": small / 2}
    if settings["elements"] > 1024:
        exchange(settings["elements"], 2)
        large = exchange(settings["elements"], settings["rounds"])
        found["transfer_s"] = max(0.0, large - small)
    dist.destroy_process_group()
if int(os.environ["RANK"]) == 0:
    with open("measured.json", "w") as file:
        json.dump(found, file)
