"""Runs an emitted script and counts the bytes that its autograd keeps, to be seen from outside.

    python tests/kept.py FOLDER SCRIPT      leaves FOLDER/RANK.kept, the most bytes at once

Each storage once, for as long as something kept lies in it; not parameters and buffers, and not
what was received, which the plan counts among the messages. The hooks of torch.utils.checkpoint
hide what a second forward keeps from those around it: they are wrapped.
"""

import os
import runpy
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

receive: Any = dist.irecv


class Counter:
    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self.state: set[int] | None = None
        self.received: dict[int, weakref.ref[Tensor]] = {}
        self.now = self.peak = 0

    def see(self, module: nn.Module, _inputs: Any) -> None:
        """The first module that a script calls is its stage."""
        if self.state is None:
            held = [*module.parameters(), *module.buffers()]
            self.state = {tensor.untyped_storage().data_ptr() for tensor in held}

    def irecv(self, tensor: Tensor, *arguments: Any) -> Any:
        self.received[tensor.untyped_storage().data_ptr()] = weakref.ref(tensor)
        return receive(tensor, *arguments)

    def pack(self, tensor: Tensor) -> "Kept":
        return Kept(self, tensor)

    def add(self, storage: torch.UntypedStorage, sign: int) -> None:
        address = storage.data_ptr()
        received = self.received.get(address)
        if address in (self.state or set()) or (received and received() is not None):
            return
        before = self.holders.get(address, 0)
        self.holders[address] = before + sign
        if not before or not self.holders[address]:
            self.now += sign * storage.nbytes()
        self.peak = max(self.peak, self.now)


class Kept:
    """A tensor that autograd keeps."""

    def __init__(self, counter: Counter, tensor: Tensor) -> None:
        self.counter, self.tensor = counter, tensor
        counter.add(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.counter.add(self.tensor.untyped_storage(), -1)


def count_again(counter: Counter) -> None:
    """Count what a checkpoint's second forward keeps until its backward has read it."""
    library: Any = torch.utils.checkpoint
    original = library._recomputation_hook.__init__

    def init(self: Any, target: Any, graph: int) -> None:
        original(self, target, graph)
        inner = self.pack_hook

        def pack(tensor: Tensor) -> Any:
            recomputed = target().recomputed[graph]
            before = set(recomputed.keys())
            try:
                return inner(tensor)
            finally:  # the last one raises, to stop early
                for handle in set(recomputed.keys()) - before:
                    handle.kept = counter.pack(tensor.detach())

        self.pack_hook = pack

    library._recomputation_hook.__init__ = init


def main() -> None:
    folder, script, *arguments = sys.argv[1:]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).absolute().parent)
    counter = Counter()
    register_module_forward_pre_hook(counter.see)
    count_again(counter)
    dist.irecv = counter.irecv
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda kept: kept.tensor):
        runpy.run_path(script, run_name="__main__")
    (Path(folder) / f"{os.environ['RANK']}.kept").write_text(str(counter.peak))


if __name__ == "__main__":
    main()
