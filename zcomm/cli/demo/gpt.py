"""A small GPT and its text, the source of Python's standard library.

Bytes are the vocabulary: there is no tokenizer, and nothing is downloaded.
"""

import hashlib
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
HELD_OUT_EVERY = 10  # every tenth file is never trained on


@dataclass(frozen=True)
class Text:
    train: Tensor  # uint8, one byte per token
    held_out: Tensor
    sha256: str  # the text depends on Python's version


def standard_library(max_nbytes: int = 4 << 20) -> Text:
    """The top-level modules of the standard library, sorted by name."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    room = max_nbytes
    for i, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        source = path.read_bytes()[:room]
        room -= len(source)
        parts[i % HELD_OUT_EVERY == 0].append(source)
    train, held_out = map(b"".join, parts)
    return Text(_tokens(train), _tokens(held_out), hashlib.sha256(train + held_out).hexdigest())


def _tokens(source: bytes) -> Tensor:
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)


def random_windows(
    tokens: Tensor, count: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`count` windows of `length` tokens, and the same windows shifted by one."""
    starts = torch.randint(tokens.numel() - length, (count,), generator=generator)
    return windows_at(tokens, starts, length)


def windows_at(tokens: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = tokens[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: pair j at position t turns by t / 10000^(j / pairs)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(length)[:, None] * speed
    a, b = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """Pre-norm, rotary positions, head tied to the embedding. `forward` returns the mean loss."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                # As in GPT-2: more layers add less each to the residual stream.
                adds = name.endswith(("attention.out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
