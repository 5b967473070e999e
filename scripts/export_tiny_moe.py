#!/usr/bin/env python3
"""Turn trained `tiny-moe` weights into a Hugging Face directory, and measure its held-out perplexity.

Last of three steps, after `prepare_tiny_moe.py` and `train_tiny_moe.py`. Runs on a CPU with transformers.

Perplexity is taken of the directory itself, through transformers. For A8W4 and A4W4 every expert's input and inner
activation and both its weights pass through `atom.wire.mx_reference`, the formulas that the server quantizes with.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from atom.wire import mx_reference
from prepare_tiny_moe import BOS, CHAT_TEMPLATE, EOS, IM_END, IM_START, PAD
from train_tiny_moe import MODES, Shape, TinyMoe, load_weights

A_FORMAT = {"a8w4": "fp8", "a4w4": "fp4"}


def export(weights: Path, data: Path, out: Path) -> None:
    """Write config, weights and tokenizer to `out` after checking the logits against the trainer's own network.

    Raises:
        ValueError: transformers' logits differ by more than bf16 rounding explains.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(data / "tokenizer.json"),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[IM_START, IM_END],
        clean_up_tokenization_spaces=False,
        model_max_length=Shape.max_position_embeddings,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    sizes = asdict(Shape())
    config = Qwen3MoeConfig(
        rope_parameters={"rope_type": "default", "rope_theta": sizes.pop("rope_theta")},
        intermediate_size=sizes["moe_intermediate_size"],
        norm_topk_prob=True,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.bfloat16,
        **sizes,
    )
    state = load_weights(weights)
    trained = TinyMoe(Shape())
    trained.load_state_dict(state)
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    names = {f"model.{name}": tensor.bfloat16() for name, tensor in state.items()}
    model.load_state_dict(names | {"lm_head.weight": names["model.embed_tokens.weight"]})

    ids = torch.from_numpy(np.fromfile(data / "valid.bin", dtype=np.uint16)[:1024].astype(np.int64))
    with torch.no_grad():
        ours = trained.logits(trained(ids[None])[0])
        theirs = model(ids[None]).logits.float()
    error = float((ours - theirs).norm() / ours.norm())
    print(f"relative difference of logits, trainer and transformers: {error:.2e}")
    if not error < 2e-2:
        raise ValueError(
            f"transformers' logits differ from the trainer's by {error:.2e} of their norm, allowed is 2e-2: "
            f"check that {weights} was written by the train_tiny_moe.py beside this script."
        )
    model.generation_config.eos_token_id = [
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids(IM_END),
    ]
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    for file in out.iterdir():
        file.chmod(0o644)


def quantize_experts(model: PreTrainedModel, operand: str) -> None:
    """Make every MoE layer of `model` compute as the server does, for operand "a8w4" or "a4w4"; "bf16" changes nothing."""
    if operand == "bf16":
        return
    for layer in model.model.layers:
        experts = layer.mlp.experts
        weights = [
            _round_trip(w.detach(), "fp4") for w in (experts.gate_up_proj, experts.down_proj)
        ]
        experts.forward = partial(_quantized_forward, *weights, A_FORMAT[operand])


def _round_trip(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """Quantize and dequantize x [..., 32*n]; float32."""
    return mx_reference.dequantize(*mx_reference.quantize(x, fmt), fmt)


def _quantized_forward(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    fmt: str,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Experts over dequantized weights [E, 2I, H] and [E, H, I], f32 sums.

    hidden_states [T, H] bf16, top_k_index [T, K] int64, top_k_weights [T, K] → [T, H] bf16.
    """
    x = _round_trip(hidden_states, fmt)
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, slot = torch.where(top_k_index == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        inner = _round_trip(F.silu(gate) * up, fmt)
        out.index_add_(
            0, token, F.linear(inner, down[expert]) * top_k_weights[token, slot, None].float()
        )
    return out.to(hidden_states.dtype)


@torch.no_grad()
def perplexity(model: PreTrainedModel, ids: torch.Tensor, length: int) -> float:
    """Return perplexity a token of ids [N] int64 over consecutive windows of `length`; the last short one is dropped."""
    rows = ids[: (len(ids) - 1) // length * length + 1].unfold(0, length + 1, length)
    total = 0.0
    for row in rows:
        logits = model(row[None, :-1]).logits[0].float()
        total += float(F.cross_entropy(logits, row[1:], reduction="sum"))
    return math.exp(total / (len(rows) * length))


def main() -> None:
    """Parse the command line, export where weights are given, then evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default=".tiny", help="folder of token arrays and tokenizer.json")
    parser.add_argument("--out", default="atom/assets/tiny_moe", help="Hugging Face directory")
    parser.add_argument(
        "--weights", help="trial_N.safetensors to export; without it, only evaluate"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens a window")
    args = parser.parse_args()
    if args.weights:
        export(Path(args.weights), Path(args.data), Path(args.out))
    result = {}
    for split in ("valid", "test"):
        ids = np.fromfile(Path(args.data) / f"{split}.bin", dtype=np.uint16).astype(np.int64)
        for operand in MODES:
            model = AutoModelForCausalLM.from_pretrained(args.out).eval()
            quantize_experts(model, operand)
            result[f"{split} {operand}"] = round(
                perplexity(model, torch.from_numpy(ids), args.length), 3
            )
            print(f"{split} {operand}: {result[f'{split} {operand}']}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
