"""Start all ranks of gcn:

    torchrun --standalone --nproc-per-node 2 run.py

Each runs the file of its own rank, rank0.py and so on.
"""

import os
import runpy
from pathlib import Path

import torch

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world_size != 2:
    raise SystemExit(f"gcn is compiled for 2 ranks, not {world_size}")
if torch.__version__ < "2.9":
    raise SystemExit(f"gcn needs torch 2.9 or newer; rank {rank} has {torch.__version__}")
runpy.run_path(str(Path(__file__).with_name(f"rank{rank}.py")), run_name="__main__")
