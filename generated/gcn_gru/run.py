"""Start all ranks of gcn_gru:

    torchrun --standalone --nproc-per-node 4 run.py

Each runs the file of its own rank, rank0.py and so on.
"""

import os
import runpy
from pathlib import Path

import torch

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world_size != 4:
    raise SystemExit(f"gcn_gru is compiled for 4 ranks, not {world_size}")
if torch.__version__ < "2.9":
    raise SystemExit(f"gcn_gru needs torch 2.9 or newer; rank {rank} has {torch.__version__}")
runpy.run_path(str(Path(__file__).with_name(f"rank{rank}.py")), run_name="__main__")
