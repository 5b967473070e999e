#!/usr/bin/env python3
"""Train `tiny-moe` on one GPU: in bf16 first, then with MX fake quantization of the experts and their inputs.

Second of three steps, between `prepare_tiny_moe.py` and `export_tiny_moe.py`. Needs torch, numpy, safetensors and tokenizers.

The network is transformers' Qwen3-MoE, parameter by parameter. It is written out here because a
dense-over-experts formulation, two matrix products a layer, trains faster than a gathered one when there
are only 16 small experts; `export_tiny_moe.py` checks that transformers computes the same logits.

Shape letters: B sequences, S positions, T = B*S tokens, H hidden, E experts, I expert inner width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from prepare_tiny_moe import EOS, IM_END, IM_START, VOCAB_SIZE

MODES = ("bf16", "a8w4", "a4w4")


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the names are those of transformers' `Qwen3MoeConfig`."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 96
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


def fake_quantize(
    x: torch.Tensor, mantissa_bits: int, min_exponent: int, largest: float
) -> torch.Tensor:
    """Return `x` [..., 32*n] after MX quantization and dequantization in blocks of 32 along the last dimension.

    The block's scale is the smallest power of two not below amax / largest; elements round to nearest even.
    (1, 0, 6.0) is e2m1, (3, -6, 448.0) e4m3fn. OCP Microscaling Formats 1.0 defines both; scale rounding is "RoundUp".
    Only finite inputs, as in training; the result has the dtype of `x`.
    """
    blocks = x.float().unflatten(-1, (-1, 32))
    bits = (blocks.abs().amax(-1, keepdim=True) / largest).view(torch.int32)
    exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()).clamp(min=1)
    scale = (exponent << 23).view(torch.float32)
    y = blocks / scale
    # One unit in the last place of the element format at y: 2^(floor(log2|y|) - mantissa_bits), flat below min_exponent.
    ulp_exponent = ((y.abs().view(torch.int32) >> 23) - 127).clamp(min=min_exponent) - mantissa_bits
    ulp = ((ulp_exponent + 127) << 23).view(torch.float32)
    rounded = (torch.round(y / ulp) * ulp).clamp(-largest, largest)
    return (rounded * scale).flatten(-2).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    """Quantize on the way forward, pass the gradient through unchanged."""

    @staticmethod
    def forward(ctx, x, mantissa_bits, min_exponent, largest):
        return fake_quantize(x, mantissa_bits, min_exponent, largest)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


def quantize_operand(x: torch.Tensor, operand: str) -> torch.Tensor:
    """Return `x` [..., 32*n] as the GEMM reads it; `operand` is "a4w4", "a8w4" (by its A operand) or "bf16"."""
    if operand == "a4w4":
        return _StraightThrough.apply(x, 1, 0, 6.0)
    if operand == "a8w4":
        return _StraightThrough.apply(x, 3, -6, 448.0)
    return x


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension; float32 inside, bf16 out."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return (
            self.weight.bfloat16()
            * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).bfloat16()
        )


class Matrix(nn.Module):
    """A float32 master weight [out, in], used in bf16. No bias."""

    def __init__(self, *shape: int, std: float = 0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) * std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.bfloat16())


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions and normed queries and keys."""

    def __init__(self, s: Shape):
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            s.num_attention_heads,
            s.num_key_value_heads,
            s.head_dim,
        )
        self.q_proj = Matrix(self.heads * self.dim, s.hidden_size)
        self.k_proj = Matrix(self.kv_heads * self.dim, s.hidden_size)
        self.v_proj = Matrix(self.kv_heads * self.dim, s.hidden_size)
        self.o_proj = Matrix(
            s.hidden_size, self.heads * self.dim, std=0.02 / math.sqrt(2 * s.num_hidden_layers)
        )
        self.q_norm = RMSNorm(s.head_dim, s.rms_norm_eps)
        self.k_norm = RMSNorm(s.head_dim, s.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] bf16, cos and sin [S, head_dim] bf16 → [B, S, H] bf16."""
        q = _rotate(
            self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))).transpose(1, 2), cos, sin
        )
        k = _rotate(
            self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.dim))).transpose(1, 2), cos, sin
        )
        v = self.v_proj(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return self.o_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [B, heads, S, head_dim], halves paired."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Experts(nn.Module):
    """All experts' weights, in transformers' fused layout."""

    def __init__(self, s: Shape):
        super().__init__()
        e, h, i = s.num_experts, s.hidden_size, s.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * i, h) * 0.02)
        self.down_proj = nn.Parameter(
            torch.randn(e, h, i) * 0.02 / math.sqrt(2 * s.num_hidden_layers)
        )

    def forward(self, x: torch.Tensor, weights: torch.Tensor, operand: str) -> torch.Tensor:
        """x [T, H] bf16 and routing weights [T, E] f32, zero where not routed → [T, H] bf16.

        Every expert sees every token. The routing weight goes onto the quantized inner activation, so that the
        down projection of all experts and their sum are a single matrix product.
        """
        gate_up, down = self.gate_up_proj.bfloat16(), self.down_proj.bfloat16()
        if operand != "bf16":
            gate_up, down = quantize_operand(gate_up, "a4w4"), quantize_operand(down, "a4w4")
        e, h, i = down.shape
        inner = F.linear(quantize_operand(x, operand), gate_up.flatten(0, 1)).unflatten(
            -1, (e, 2, i)
        )
        gate, up = inner.float().unbind(-2)
        inner = quantize_operand((F.silu(gate) * up).bfloat16(), operand)
        inner = (inner * weights[..., None]).bfloat16().flatten(-2)
        return F.linear(inner, down.transpose(0, 1).reshape(h, e * i))


class SparseMoe(nn.Module):
    """Top-K router and experts; returns the output and the load-balancing loss (1 when balanced)."""

    def __init__(self, s: Shape):
        super().__init__()
        self.k = s.num_experts_per_tok
        self.gate = Matrix(s.num_experts, s.hidden_size)
        self.experts = Experts(s)

    def forward(self, x: torch.Tensor, operand: str) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] bf16 → ([T, H] bf16, scalar f32)."""
        probs = self.gate(x).float().softmax(-1)
        values, chosen = probs.topk(self.k, dim=-1)
        values = (values / values.sum(-1, keepdim=True)).bfloat16().float()
        weights = torch.zeros_like(probs).scatter(1, chosen, values)
        share = (weights > 0).float().mean(0) / self.k
        balance = probs.shape[-1] * (share * probs.mean(0)).sum()
        return self.experts(x, weights, operand), balance


class Layer(nn.Module):
    """One decoder layer; the residual stream is float32 in training."""

    def __init__(self, s: Shape):
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = SparseMoe(s)

    def forward(self, x, cos, sin, operand: str, dropout: float):
        """x [B, S, H] f32 → (x, balance loss)."""
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin), dropout)
        out, balance = self.mlp(self.post_attention_layernorm(x).flatten(0, 1), operand)
        return x + F.dropout(out.view(x.shape), dropout), balance


class TinyMoe(nn.Module):
    """Qwen3-MoE with tied embeddings; state_dict names are transformers' less the leading "model."."""

    def __init__(self, s: Shape):
        super().__init__()
        self.embed_tokens = Matrix(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_hidden_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        frequency = s.rope_theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angle = torch.outer(torch.arange(s.max_position_embeddings).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angle.sin().bfloat16(), persistent=False)

    def forward(self, ids, operand: str = "bf16", dropout: float = 0.0):
        """ids [B, S] int64 → (hidden states before the last norm [B, S, H] f32, balance loss, mean over layers)."""
        x = F.dropout(F.embedding(ids, self.embed_tokens.weight), dropout)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        total = 0.0
        for layer in self.layers:
            x, balance = layer(x, cos, sin, operand, dropout)
            total = total + balance / len(self.layers)
        return x, total

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., H] → logits [..., V] f32."""
        return self.embed_tokens(self.norm(x)).float()

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, nats a token, of hidden states [B, S, H] against targets [B, S]."""
        return F.cross_entropy(self.logits(x).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Trial:
    """One training run's regularization and length."""

    dropout: float
    decay: float
    epochs: float
    lr: float

    @classmethod
    def parse(cls, text: str) -> Trial:
        """Read "DROPOUT:DECAY:EPOCHS:LR"."""
        try:
            return cls(*map(float, text.split(":")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not DROPOUT:DECAY:EPOCHS:LR, four numbers such as 0.1:0.2:20:3e-3"
            ) from None


def operand_of(step: int, progress: float) -> str:
    """Which GEMM operands a step trains with: plain bf16 first, then three steps in four quantized."""
    return "bf16" if progress < 0.75 else ("a4w4", "a8w4", "a4w4", "bf16")[step % 4]


def batches(tokens: torch.Tensor, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield [batch, length + 1] windows of a flat token tensor for ever, each epoch shuffled and shifted anew."""
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(length + 1, device=tokens.device)
    while True:
        shift = int(torch.randint(length, (1,), generator=generator))
        starts = torch.arange(shift, len(tokens) - length - 1, length)
        starts = starts[torch.randperm(len(starts), generator=generator)].to(tokens.device)
        for rows in starts.split(batch):
            if len(rows) == batch:
                yield tokens[rows[:, None] + span]


@torch.no_grad()
def held_out_loss(model: TinyMoe, tokens: torch.Tensor, length: int, operand: str) -> float:
    """Return nats a token over consecutive windows of `length` tokens; the last, shorter window is dropped."""
    rows = tokens[: (len(tokens) - 1) // length * length + 1].unfold(0, length + 1, length)
    with torch.compiler.set_stance("force_eager"):
        losses = [
            model.loss(model(r[:, :-1], operand)[0], r[:, 1:]) * len(r) for r in rows.split(8)
        ]
    return float(sum(losses)) / len(rows)


@torch.no_grad()
def sample(model: TinyMoe, ids: list[int], count: int, operand: str, stop: set[int]) -> list[int]:
    """Return the greedy continuation of `ids`, at most `count` tokens; no cache, so only for a look."""
    out: list[int] = []
    with torch.compiler.set_stance("force_eager"):
        while len(out) < count and not (out and out[-1] in stop):
            window = torch.tensor([ids + out], device=model.cos.device)
            out.append(int(model.logits(model(window, operand)[0][:, -1]).argmax()))
    return out


def train_step(
    model, optimizer, window, operand: str, dropout: float, balance: float = 0.01
) -> torch.Tensor:
    """One update on a [B, S + 1] window; returns the cross entropy, detached."""
    hidden, load = model(window[:, :-1], operand, dropout)
    loss = model.loss(hidden, window[:, 1:])
    (loss + balance * load).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def new_model(shape: Shape, trial: Trial, device: str, compiled: bool):
    """Return a fresh model and its optimizer; every layer shares one compiled graph a kind of operand."""
    torch.manual_seed(0)
    model = TinyMoe(shape).to(device)
    if compiled:
        for layer in model.layers:
            layer.compile(dynamic=False)
        model.loss = torch.compile(model.loss, dynamic=False)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": trial.decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = device == "cuda"
    return model, torch.optim.AdamW(groups, lr=trial.lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def save_weights(model: TinyMoe, path: Path) -> None:
    """Write bf16 weights under transformers' fused names."""
    from safetensors.torch import save_file

    names = {
        f"model.{k}": v.detach().bfloat16().cpu().contiguous()
        for k, v in model.state_dict().items()
    }
    save_file(names, str(path))


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read what `save_weights` wrote as float32, under the names of TinyMoe's state_dict."""
    from safetensors.torch import load_file

    return {
        name.removeprefix("model."): tensor.float() for name, tensor in load_file(str(path)).items()
    }


def run_trial(
    index: int, trial: Trial, args: argparse.Namespace, data: dict, limit_s: float
) -> dict:
    """Train once within `limit_s` seconds, save trial_{index}.safetensors, return held-out losses and the history."""
    model, optimizer = new_model(Shape(), trial, args.device, args.compile)
    if args.init:
        model.load_state_dict(load_weights(Path(args.init)))
    feed = batches(data["train"], args.batch, args.length, seed=args.seed + index)
    total = max(8, round(trial.epochs * len(data["train"]) / (args.batch * args.length)))
    path = Path(args.out) / f"trial_{index}.safetensors"
    began, step, reported, history = time.monotonic(), 0, 0.0, []
    while True:
        progress = max(step / total, (time.monotonic() - began) / limit_s)
        if progress >= 1:
            break
        warm = min(1.0, (step + 1) / min(300, total / 8))
        for group in optimizer.param_groups:
            group["lr"] = trial.lr * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)
        operand = operand_of(step, progress)
        loss = train_step(model, optimizer, next(feed), operand, trial.dropout)
        step += 1
        if progress >= reported:
            valid = held_out_loss(model, data["valid"], args.length, operand)
            elapsed = time.monotonic() - began
            rate = step * args.batch * args.length / elapsed / 1e6
            history.append(
                [step, round(elapsed, 1), operand, round(loss.item(), 4), round(valid, 4)]
            )
            print(
                f"trial {index} {progress:4.0%} step {step} {operand} train {loss:.4f} valid {valid:.4f} {rate:.2f} Mtok/s"
            )
            reported += 0.0625
        elif step % 16 == 0:
            loss.item()  # keeps the host from running far ahead of the clock that ends the run
    with torch.no_grad():  # what is judged below is what is saved
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    save_weights(model, path)
    result = {
        "trial": asdict(trial),
        "steps": step,
        "planned_steps": total,
        "file": path.name,
        "history": history,
    }
    result["seconds"] = round(time.monotonic() - began, 1)
    for split in ("valid", "test"):
        result[split] = {
            m: round(held_out_loss(model, data[split], args.length, m), 5) for m in MODES
        }
        print(
            f"trial {index} {split} perplexity",
            {m: round(math.exp(v), 3) for m, v in result[split].items()},
        )
    _show_samples(model, args)
    return result


def _show_samples(model: TinyMoe, args: argparse.Namespace) -> None:
    """Print greedy A4W4 continuations of a plain and a chat prompt, where tokenizers is installed."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.data) / "tokenizer.json"))
    stop = {tokenizer.token_to_id(EOS), tokenizer.token_to_id(IM_END)}
    chat = f"{IM_START}user\nWrite a Python function is_prime(n).{IM_END}\n{IM_START}assistant\n"
    for prompt in ("def read_lines(path):\n", "class Queue:\n    def __init__(self", chat):
        ids = tokenizer.encode(prompt).ids
        out = sample(model, ids, args.sample_tokens, "a4w4", stop)
        print("-----\n" + tokenizer.decode(ids + out, skip_special_tokens=False), flush=True)


def train(args: argparse.Namespace) -> None:
    """Run the trials one after another inside `args.minutes`, write their weights and results.json to `args.out`."""
    start = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    Path(args.out).mkdir(parents=True, exist_ok=True)
    data = {}
    for split in ("train", "valid", "test"):
        ids = np.fromfile(Path(args.data) / f"{split}.bin", dtype=np.uint16).astype(np.int64)
        data[split] = torch.from_numpy(ids[: args.limit_tokens]).to(args.device)

    model, optimizer = new_model(Shape(), args.trial[0], args.device, args.compile)
    feed = batches(data["train"], args.batch, args.length, seed=0)
    for operand in MODES:
        began = time.monotonic()
        train_step(model, optimizer, next(feed), operand, args.trial[0].dropout).item()
        first, began = time.monotonic() - began, time.monotonic()
        for _ in range(4):
            loss = train_step(model, optimizer, next(feed), operand, args.trial[0].dropout)
        loss.item()
        print(
            f"{operand}: first step {first:.1f} s, then {(time.monotonic() - began) / 4 * 1e3:.2f} ms",
            flush=True,
        )
    del model, optimizer

    results = {
        "torch": torch.__version__,
        "args": {k: str(v) for k, v in vars(args).items()},
        "trials": [],
    }
    if args.device == "cuda":
        results["device"] = torch.cuda.get_device_name()
    for index, trial in enumerate(args.trial):
        left = args.minutes * 60 - (time.monotonic() - start)
        share = trial.epochs / sum(t.epochs for t in args.trial[index:])
        results["trials"].append(run_trial(index, trial, args, data, max(1.0, left * share - 5)))
        results["best"] = min(results["trials"], key=lambda r: sum(r["valid"].values()))["file"]
        (Path(args.out) / "results.json").write_text(json.dumps(results, indent=1))
    print("best", results["best"], f"{time.monotonic() - start:.0f} s in all")


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--data", default=".tiny", help="folder of token arrays and tokenizer.json")
    add("--out", required=True, help="folder for weights and results.json")
    add(
        "--trial",
        type=Trial.parse,
        action="append",
        required=True,
        help="DROPOUT:DECAY:EPOCHS:LR; repeatable",
    )
    add("--init", help="start from these trained weights, not random ones")
    add("--seed", type=int, default=0, help="order of the batches")
    add(
        "--minutes",
        type=float,
        default=4.5,
        help="wall clock of the whole run; trials are shortened to fit",
    )
    add("--batch", type=int, default=32, help="windows a step")
    add("--length", type=int, default=2048, help="tokens a window")
    add("--device", default="cuda")
    add("--no-compile", dest="compile", action="store_false")
    add("--limit-tokens", type=int, help="use only so many tokens of each split")
    add("--sample-tokens", type=int, default=120)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
