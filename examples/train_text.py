"""Train a small byte-level language model on this project's own pages, and check its tensors.

    python examples/train_text.py
    tensorplay check examples/train_text.py:build

The exit code is 1 if the check after training finds an error or a warning.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorplay

ROOT = Path(__file__).resolve().parent.parent
BYTE_VALUES = 256
CONTEXT = 64  # bytes the model sees
WIDTH = 64
HEADS = 4
BATCH = 16


class Block(nn.Module):  # type: ignore[misc]  # the checker sees torch as Any
    """Causal self-attention and a feed-forward network, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32[batch, time, WIDTH] to the same shape."""
        # The three chunks are views of the fused projection: no bytes are copied here.
        query, key, value = (split_heads(part) for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.feed_norm(x))))
        return y


def split_heads(x: Tensor) -> Tensor:
    """View [batch, time, WIDTH] as [batch, HEADS, time, WIDTH / HEADS]."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class ByteModel(nn.Module):  # type: ignore[misc]  # the checker sees torch as Any
    """Embedding, two blocks, and a linear head over the 256 byte values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTE_VALUES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Map int64[batch, time] to logits, float32[batch, time, 256]."""
        x = self.embedding(text) + self.position[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def load_corpus() -> Tensor:
    """Read the README and every page of the docs as uint8[n]."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = b"\n".join(page.read_bytes() for page in pages if page.is_file())
    if len(text) <= CONTEXT:
        raise FileNotFoundError(f"no pages to train on in {ROOT / 'docs'}: run this in a checkout")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample_batch(corpus: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw BATCH pieces of text; inputs and targets are two views of them, one byte apart."""
    # Every window of the text, as a view: window i begins at byte i.
    windows = corpus.unfold(0, CONTEXT + 1, 1)
    pieces = windows[torch.randint(len(windows), (BATCH,), generator=generator)].long()
    return {"inputs": pieces[:, :-1], "targets": pieces[:, 1:]}


def build() -> dict[str, Any]:
    """Make the model, its optimizer and one batch."""
    torch.manual_seed(0)
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = sample_batch(load_corpus(), torch.Generator().manual_seed(0))
    return {"model": model, "optimizer": optimizer, "batch": batch}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, quiet: bool) -> list[float]:
    """Train and answer the loss of each step, in bits a byte."""
    corpus, generator = load_corpus(), torch.Generator().manual_seed(1)
    losses: list[float] = []
    for step in range(steps):
        batch = sample_batch(corpus, generator)
        loss = F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / math.log(2))  # a float: keeping the tensor would keep its graph
        if not quiet and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:4}  loss {losses[-1]:.2f} bits a byte")
    return losses


def main() -> int:
    """Inspect, train, check; answer the exit code."""
    parser = argparse.ArgumentParser(description="Train a byte-level language model and check its tensors.")
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print the loss before and after, and findings, only")
    parser.add_argument("--report", type=Path, metavar="PATH", help="write the last report as JSON")
    args = parser.parse_args()

    torch.set_num_threads(1)  # more threads do not make so small a model faster
    objects = build()
    model, optimizer, batch = objects["model"], objects["optimizer"], objects["batch"]
    if not args.quiet:
        tensorplay.inspect(model)
        tensorplay.inspect(batch)  # two views of one storage
        tensorplay.inspect(batch["targets"].t())  # the same cells, time first: look at the picture of the strides

    losses = train(model, optimizer, args.steps, quiet=args.quiet)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} bits a byte in {args.steps} steps")

    report = tensorplay.check({"model": model, "optimizer": optimizer, "batch": batch})
    if report.findings or not args.quiet:
        print(report)
    if args.report:
        report.save(args.report)
    return 1 if report.worst in ("error", "warning") else 0


if __name__ == "__main__":
    sys.exit(main())
