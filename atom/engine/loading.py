"""From a model's directory, or its config alone, to a model on this rank's device with its experts in MXFP4."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from atom.engine.checkpoint import Checkpoint

# Callers that load a model find the rest of its directory here too.
from atom.engine.model_files import eos_token_ids as eos_token_ids
from atom.engine.model_files import load_config as load_config
from atom.engine.model_files import load_generation_config as load_generation_config
from atom.engine.model_files import load_tokenizer as load_tokenizer
from atom.engine.model_path import resolve_model_path as resolve_model_path
from atom.errors import LaunchRefused
from atom.moe import expert_parallel
from atom.moe.expert_weights import from_float, from_mxfp4, random_weights
from atom.moe.mega_moe import MegaMoE
from atom.moe.model_config import (
    LayerGroup,
    MoELayer,
    StoredFormat,
    group_layers,
    model_class,
    moe_layers_of,
)

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "dummy")


def load_model(
    path: Path,
    config: PreTrainedConfig,
    mega: MegaMoE,
    *,
    load_format: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    make_mega: Callable[[LayerGroup], MegaMoE] | None = None,
) -> PreTrainedModel:
    """Load this rank's part of the model and put its MoE layers on ``mega``.

    Makes no collective calls. Dense modules are whole on every rank; of the experts a rank holds those of
    ``mega.built.geometry``, in MXFP4: taken as they are from an MXFP4 checkpoint, else quantized once.

    Args:
        path: the model's directory. config: its config.
        mega: the MegaMoE of the model's main MoE layers.
        load_format: ``"auto"`` reads safetensors; ``"dummy"`` makes random weights from the config alone, the same
            model for any number of ranks.
        device: where the model goes. dtype: of the dense modules.
        group: the expert group; may be None on a rank alone and for dummy or MXFP4 weights, which need no shards.
        seed: of dummy weights.
        make_mega: builds the MegaMoE of each further :class:`~atom.moe.model_config.LayerGroup`, if the model has any.

    Returns:
        The model in eval mode; its layers answer to :func:`atom.moe.expert_parallel.run_empty`.

    Raises:
        LaunchRefused: weights are missing, incomplete or of another shape; the message names them.
    """
    if load_format not in LOAD_FORMATS:
        raise LaunchRefused(
            f"--load-format {load_format} does not exist: use one of {', '.join(LOAD_FORMATS)}."
        )
    device = torch.device(device)
    layers = moe_layers_of(config)
    megas = _mega_of_each(layers, mega, make_mega)
    checkpoint = None
    if load_format == "auto":
        checkpoint = Checkpoint(path)
        checkpoint.check_experts(min(layer.experts for layer in layers))
    separate = {
        layer.name
        for layer in layers
        if load_format == "dummy" or layer.stored is StoredFormat.MXFP4
    }

    def before_weights(model: PreTrainedModel) -> None:
        expert_parallel.bind(model, group, device)
        for name in separate:
            expert_parallel.strip(model.get_submodule(name))

    model = _load_dense(
        path if checkpoint else None, config, before_weights, device, dtype, seed, separate
    )
    for index, layer in enumerate(layers):
        layer_mega = megas[layer.name]
        built = layer_mega.built
        experts = model.get_submodule(layer.name)
        if load_format == "dummy":
            weights = random_weights(
                layer,
                built.geometry,
                built.recipe.gate_mode,
                index=index,
                seed=seed,
                std=getattr(config.get_text_config(), "initializer_range", None) or 0.02,
                device=device,
            )
        elif layer.stored is StoredFormat.MXFP4:
            weights = from_mxfp4(
                layer, built.geometry, built.recipe.gate_mode, checkpoint.read, device=device
            )
        else:
            weights = from_float(layer, built.recipe.gate_mode, experts)
        experts.expert_parallel.attach(experts, layer_mega, weights)
    expert_parallel.finish(model)
    return model


def _mega_of_each(
    layers: list[MoELayer], mega: MegaMoE, make_mega: Callable[[LayerGroup], MegaMoE] | None
) -> dict[str, MegaMoE]:
    built = mega.built.geometry
    main, *others = group_layers(
        layers, ep_size=built.ep_size, ep_rank=built.ep_rank, max_tokens=built.max_tokens
    )
    assert (
        main.geometry == built
    ), f"the MegaMoE was built for {built}, the model is {main.geometry}"
    if others and make_mega is None:
        names = [layer.name for group in others for layer in group.layers]
        raise LaunchRefused(
            f"{len(names)} MoE layers differ from the model's others in sizes, recipe or weight format and need a "
            f"MegaMoE of their own, which this caller cannot build: {', '.join(names[:8])}."
        )
    megas = {layer.name: mega for layer in main.layers}
    for group in others:
        own = make_mega(group)
        megas |= {layer.name: own for layer in group.layers}
    return megas


def _load_dense(
    path: Path | None,
    config: PreTrainedConfig,
    before_weights: Callable[[PreTrainedModel], None],
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    separate: set[str],
) -> PreTrainedModel:
    """Everything that transformers loads: dense modules, and experts of float checkpoints. Without path: random."""
    config = copy.deepcopy(config)
    # transformers' own quantizer would rewrite the experts that are read separately.
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    source = (
        {"state_dict": {}, "generation_config": GenerationConfig.from_model_config(config)}
        if path is None
        else {"local_files_only": True, "generation_config": load_generation_config(path, config)}
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            model, info = expert_parallel.load_through_door(
                model_class(config),
                before_weights,
                path,
                config=config,
                dtype=dtype,
                device_map={"": device},
                ignore_mismatched_sizes=True,
                **source,
            )
        except (OSError, RuntimeError) as error:
            raise LaunchRefused(f"{path} cannot be loaded: {error}") from error
    if path is not None:
        _check_loaded(path, info, separate)
    return model


def _check_loaded(path: Path, info: dict, separate: set[str]) -> None:
    def some(names: list[str]) -> str:
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    if mismatched := sorted(str(key) for key in info["mismatched_keys"]):
        raise LaunchRefused(
            f"{path} does not fit its config.json: these have another shape than the model: {some(mismatched)}. "
            f"Use the config.json that belongs to these weights."
        )
    if missing := sorted(info["missing_keys"]):
        raise LaunchRefused(
            f"{path} is incomplete: these weights are missing: {some(missing)}. Download the whole model again."
        )
    unexpected = sorted(
        key for key in info["unexpected_keys"] if not any(key.startswith(n) for n in separate)
    )
    if unexpected:
        logger.warning(
            "%s holds weights that the model has no place for: %s", path, some(unexpected)
        )
