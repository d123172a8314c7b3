"""Let the quickstart's model write: load what the ranks saved into the model itself, and sample.

    python specs/sample.py FOLDER [PROMPT]

FOLDER is where the scripts ran. Nothing here knows of pipelines: the union of the ranks' files is
the model's state_dict.
"""

import json
import sys
from pathlib import Path

import torch
from models.gpt import build

folder, prompt = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "    def "
model = build(layers=4, width=128, heads=4, vocab=256, context=128, tied=False).eval()
weights = {}
for path in sorted(folder.glob("weights-rank*.pt")):
    weights |= torch.load(path)
model.load_state_dict(weights, strict=True)

rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
last = [row["loss"] for row in rows[-20:]]
print(f"loss: {rows[0]['loss']:.2f} -> {sum(last) / len(last):.2f}, the mean of the last 20 steps")

torch.manual_seed(0)
text = torch.tensor([list(prompt.encode())])
with torch.no_grad():
    while text.shape[1] < 100 and text[0, -1] != ord("\n"):
        logits = model(text)[:, -1] / 0.6
        text = torch.cat([text, torch.multinomial(logits.softmax(dim=-1), 1)], dim=1)
print("sampled:", bytes(text[0].tolist()).decode(errors="replace").rstrip())
