"""What the simulator wants to know of this machine; writes measured.json.

One rank: seconds of a sleeping layer's forward and backward, Python and autograd included. Two: of
a message from rank to rank, small and large, and of large ones that go both ways at once.
"""

import json
import os
import time
from statistics import median

import net
import torch
import torch.distributed as dist

SMALL = 1024
IN_A_ROW = 16  # as values follow each other in a step; one alone is faster

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


def exchange(elements, rounds, in_a_row=1):
    """Seconds of a message from rank 0 to rank 1, one receive ahead, with a short answer after the
    last in a row. Large ones go as broadcasts, as the scripts send them."""
    taken = []
    for _ in range(rounds):
        messages = [torch.ones(elements) for _ in range(in_a_row)]  # written, as used memory is
        answer, waiting = torch.zeros(1), []
        dist.barrier()
        start = time.perf_counter()
        for message in messages:
            if elements > SMALL:
                work = dist.broadcast(message, 0, group=there, async_op=True)
            elif rank == 0:
                work = dist.isend(message, 1, group=there)
            else:
                work = dist.irecv(message, 0, group=there)
            waiting.append(work)
            if rank == 1 and len(waiting) > 1:
                waiting.pop(0).wait()
        for work in waiting:
            work.wait()
        if rank == 0:
            dist.recv(answer, 1, group=back)
        else:
            dist.send(answer, 0, group=back)
        taken.append(time.perf_counter() - start)
    return median(taken) / in_a_row if rank == 0 else 0.0


def exchange_both_ways(elements, rounds):
    """Seconds of a message from each rank to the other at once, as the scripts send large ones."""
    taken = []
    groups = [there, back] if rank == 0 else [back, there]
    for _ in range(rounds):
        message, answer = torch.ones(elements), torch.empty(elements)
        receive = dist.broadcast(answer, 1 - rank, group=groups[1], async_op=True)
        dist.barrier()
        time.sleep(0.005)
        start = time.perf_counter()
        send = dist.broadcast(message, rank, group=groups[0], async_op=True)
        for work in (receive, send):
            work.wait()
        taken.append(time.perf_counter() - start)
    return median(taken)


if int(os.environ["WORLD_SIZE"]) == 1:
    found = op_times()
else:
    dist.init_process_group("gloo")
    rank, there, back = dist.get_rank(), dist.new_group([0, 1]), dist.new_group([0, 1])
    exchange(SMALL, 20)
    small = exchange(SMALL, settings["rounds"])
    found = {"latency_s": small / 2}
    if settings["elements"] > SMALL:
        exchange(settings["elements"], 2, in_a_row=IN_A_ROW)
        large = exchange(settings["elements"], settings["rounds"], in_a_row=IN_A_ROW)
        found["transfer_s"] = large
        exchange_both_ways(settings["elements"], 2)
        found["both_ways_s"] = exchange_both_ways(settings["elements"], 2 * settings["rounds"])
    dist.destroy_process_group()
if int(os.environ["RANK"]) == 0:
    with open("measured.json", "w") as file:
        json.dump(found, file)
