"""Train the model that ships as `trained`, on two CPU cores in less than half an hour.

    python -m wmtp_vllm.tiny_models.training --out FOLDER

The target learns to predict the standard library's text and the tasks of `tasks.py`. The draft
learns beside it, without a say in its hidden states: to predict what the target would, a step after
the other as vLLM drafts. FOLDER then holds what `trained/` here does.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from wmtp_vllm.bench.workloads import Chance
from wmtp_vllm.tiny_models.checkpoint import tokenizer
from wmtp_vllm.tiny_models.start import initialise
from wmtp_vllm.tiny_models.tasks import TASKS
from wmtp_vllm.tiny_models.texts import Corpus, Part, documents
from wmtp_vllm.tiny_models.transformer import Sizes, Transformer

LENGTHS = ((0.0, 256), (0.2, 512), (0.35, 1024))
"""From which progress on, of 1, rows have how many tokens. Short ones first: copying is learned
sooner where the source is near."""
TOKENS_PER_STEP = 4096
DEPTH, CHAIN_SHARE, DEPTH_WEIGHT = 6, 16, 0.8
"""Steps of the draft, tokens for each chain that goes on after the first, and the weight of a step
relative to the one before."""
TEXT_SHARE = 0.45
JUMP_SHARE = 0.5
"""Rows in whose positions there is a jump, so that a short row teaches long distances."""
MATRIX_RATE, OTHER_RATE, WARM_UP, COOL_DOWN = 0.01, 3e-3, 0.02, 0.45
LOG_EVERY, SAVE_EVERY = 50, 300


class Rows:
    """Rows of tokens to learn from, drawn one after the other from a seed."""

    def __init__(self, part: Part, seed: int) -> None:
        self.chance = Chance(f"{part} {seed}")
        self.corpus = Corpus(part)
        self.tokenizer = tokenizer()

    def draw(self, kind: str, length: int) -> list[int]:
        """A row of `length` tokens: "text", or one of `TASKS` again and again."""
        size = 2 * length  # a token is at most two characters
        text = self.corpus.passage(self.chance, size)
        while kind != "text" and len(text) < 2 * size:
            text += self._recall(kind, length)
        return list(self.tokenizer.encode(text).ids[-length:])

    def _recall(self, kind: str, length: int) -> str:
        """A task of any size that fits in a row, with a gap of any size up to a row's."""
        most = 2 + length // 64 if kind == "needles" else 1 + length // 128
        recall = TASKS[kind](self.chance, 1 + self.chance.below(most))
        gap = int(length ** self.chance.random()) if self.chance.random() < 0.7 else 0
        filler = self.corpus.passage(self.chance, gap)
        return recall.source + filler + recall.question + recall.answer

    def batch(self, length: int) -> Tensor:
        """Rows of all kinds: int64[rows, length + 1]."""
        rows = []
        for _ in range(TOKENS_PER_STEP // length):
            text = self.chance.random() < TEXT_SHARE
            rows.append(self.draw("text" if text else self.chance.choice(list(TASKS)), length + 1))
        return torch.tensor(rows)

    def positions(self, rows: int, length: int, longest: int) -> Tensor:
        """Position ids of a batch, some with a jump at a random place: int64[rows, length]."""
        positions = torch.arange(length).repeat(rows, 1)
        for row in positions:
            if self.chance.random() < JUMP_SHARE:
                row[self.chance.below(length) :] += self.chance.below(longest - length)
        return positions


@dataclass(frozen=True)
class Losses:
    """In nats a token: the target's, and per draft step that of the draft over the target's own."""

    target: Tensor
    draft: list[Tensor]
    agreed: list[Tensor]
    """Per draft step, for each chain (for the first step each token): both would say the same."""


def losses(model: Transformer, tokens: Tensor, positions: Tensor, starts: Tensor) -> Losses:
    """What to learn from rows of tokens int64[rows, length + 1] at positions [rows, length]."""
    inputs = tokens[:, :-1]
    logits, hidden = model.target(inputs, positions)
    target = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    teacher = logits.detach().float()
    drafted = model.draft(hidden.detach()[:, :-1], inputs[:, 1:], positions[:, :-1], starts, DEPTH)
    draft, agreed = [], []
    for step, said in enumerate(drafted):
        taught = teacher[:, 1:] if step == 0 else teacher[:, starts + step + 1]
        log_said, log_taught = said.float().log_softmax(-1), taught.log_softmax(-1)
        draft.append((log_taught.exp() * (log_taught - log_said)).sum(-1).mean())
        agreed.append(said.argmax(-1) == taught.argmax(-1))
    return Losses(target, draft, agreed)


def acceptance(agreed: list[Tensor], starts: Tensor, k: int) -> float:
    """Acceptance length with K drafts, were the target's own text the one that it reads."""
    accepted = torch.ones_like(agreed[1], dtype=torch.float32)
    length = 1.0
    for step in range(k):
        accepted = accepted * (agreed[0][:, starts] if step == 0 else agreed[step])
        length += float(accepted.mean())
    return length


def rate(progress: float) -> float:
    """Learning rate, relative: up, level, and down to zero."""
    return min(1.0, progress / WARM_UP, (1.0 - progress) / COOL_DOWN)


def length_at(progress: float) -> int:
    """Tokens of a row."""
    return [length for start, length in LENGTHS if progress >= start][-1]


@torch.no_grad()
def evaluate(model: Transformer, seed: int, length: int = 1024, rows: int = 4) -> dict[str, Any]:
    """Losses and acceptance on held-out rows, by kind."""
    drawn, starts = Rows("held-out", seed), torch.arange(8, length - DEPTH - 1, 8)
    found = {}
    for kind in ("text", *TASKS):
        tokens = torch.tensor([drawn.draw(kind, length + 1) for _ in range(rows)])
        with torch.autocast("cpu", torch.bfloat16):
            result = losses(model, tokens, torch.arange(length).repeat(rows, 1), starts)
        found[kind] = {
            "target_loss": round(float(result.target), 3),
            "draft_losses": [round(float(loss), 3) for loss in result.draft],
            "acceptance_length_k3": round(acceptance(result.agreed, starts, 3), 3),
        }
    return found


def train(out: Path, minutes: float, seed: int, steps: int | None) -> None:
    """Train until `steps` are done, or where that is None until the minutes are over."""
    rng = torch.Generator().manual_seed(seed)
    sizes = Sizes()
    model = Transformer(sizes)
    initialise(model, rng)
    optimizers = make_optimizers(model)
    drawn = Rows("training", seed)
    began, step, seen, recent, progress = time.monotonic(), 0, 0, 0.0, 0.0
    while progress < 1:
        length = length_at(progress)
        tokens = drawn.batch(length)
        positions = drawn.positions(len(tokens), length, sizes.max_position_embeddings)
        starts = torch.randperm(length - DEPTH - 1, generator=rng)[: length // CHAIN_SHARE]
        with torch.autocast("cpu", torch.bfloat16):
            found = losses(model, tokens, positions, starts)
        draft = sum(DEPTH_WEIGHT**i * loss for i, loss in enumerate(found.draft))
        (found.target + draft).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate(progress)
            optimizer.step()
            optimizer.zero_grad()
        step, seen = step + 1, seen + tokens.numel()
        elapsed = (time.monotonic() - began) / 60
        progress = step / steps if steps else elapsed / minutes
        recent += float(found.target.detach()) / LOG_EVERY
        if step % LOG_EVERY == 0:
            drafts = " ".join(f"{float(loss.detach()):.2f}" for loss in found.draft)
            print(
                f"{elapsed:5.1f} min, step {step}, {seen / elapsed / 60:,.0f} tokens/s, rows of "
                f"{length}: target {recent:.3f}, draft {drafts}, "
                f"AL {acceptance(found.agreed, starts, 3):.2f}",
                flush=True,
            )
            recent = 0.0
        if step % SAVE_EVERY == 0:
            write(out, model, sizes, {"steps": step})
            print(json.dumps(evaluate(model, seed)), flush=True)
    provenance = {
        "licence_of_the_text": "PSF-2.0",
        "text": "sources and language topics of Python's standard library; seeded tasks",
        "python": platform.python_version(),
        "training_text": digest("training"),
        "held_out_text": digest("held-out"),
        "seed": seed,
        "steps": step,
        "tokens": seen,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "machine": f"{torch.get_num_threads()} CPU cores, bfloat16 autocast",
        "torch": torch.__version__,
        "sizes": asdict(sizes),
    }
    write(out, model, sizes, provenance | {"held_out": evaluate(model, seed, rows=16)})


def make_optimizers(model: Transformer) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for embeddings, norms and biases."""
    parameters = dict(model.named_parameters())
    matrices = [p for n, p in parameters.items() if p.ndim == 2 and not outer(n)]
    others = [p for n, p in parameters.items() if p.ndim < 2 or outer(n)]
    return [
        torch.optim.Muon([{"params": matrices, "peak": MATRIX_RATE}], weight_decay=0.0),
        torch.optim.AdamW(
            [{"params": others, "peak": OTHER_RATE}], betas=(0.9, 0.95), weight_decay=0.0
        ),
    ]


def outer(name: str) -> bool:
    return "embed_tokens" in name or "lm_head" in name


def digest(part: Part) -> dict[str, Any]:
    """How much text a part has, and what it hashes to."""
    text = "".join(f"{name}\n{text}\n" for name, text in documents(part).items()).encode()
    return {
        "documents": len(documents(part)),
        "bytes": len(text),
        "sha256": hashlib.sha256(text).hexdigest(),
    }


def write(out: Path, model: Transformer, sizes: Sizes, provenance: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config", sizes.config()), ("provenance", provenance)):
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (out / f"{name}.json").write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m wmtp_vllm.tiny_models.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--minutes", type=float, default=24, help="time to train (default 24)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows (default 0)")
    parser.add_argument("--steps", type=int, help="train so many steps, however long it takes")
    parsed = parser.parse_args(arguments)
    train(parsed.out, parsed.minutes, parsed.seed, parsed.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
