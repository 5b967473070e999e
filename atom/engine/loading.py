"""From a model's directory, or its config alone, to a model on this rank's device with its experts in MXFP4."""

from __future__ import annotations

import copy
import importlib.resources
import logging
import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from atom.engine.byte_tokenizer import byte_tokenizer
from atom.engine.checkpoint import Checkpoint
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

BUNDLED = {"tiny-moe": "tiny_moe"}
"""Models that come with the package, by the name that ``--model`` knows them by, with their folder in ``assets``."""

LOAD_FORMATS = ("auto", "dummy")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model_path(name: str, *, load_format: str = "dummy") -> Path:
    """The directory that ``--model`` means.

    Args:
        name: a bundled model or a local directory.
        load_format: with ``"auto"`` the directory must hold weights as well.

    Raises:
        LaunchRefused: there is no such directory, or it lacks what is needed; the message says what to do.
    """
    if name in BUNDLED:
        path = Path(str(importlib.resources.files("atom") / "assets" / BUNDLED[name]))
    else:
        path = Path(name).expanduser()
    bundled = ", ".join(BUNDLED)
    if not path.exists():
        if _HUB_ID.fullmatch(name):
            raise LaunchRefused(
                f"--model {name}: there is no such directory here, and models are not downloaded. Download it first: "
                f"`hf download {name} --local-dir {name.rpartition('/')[2]}`, then pass that directory."
            )
        raise LaunchRefused(
            f"--model {name}: there is no such directory. Pass a local Hugging Face directory or a bundled model "
            f"({bundled})."
        )
    if not (path / "config.json").is_file():
        raise LaunchRefused(
            f"--model {name}: {path} holds no config.json, so it is not a Hugging Face model directory. Pass the "
            f"directory that holds it, or a bundled model ({bundled})."
        )
    if load_format == "auto":
        Checkpoint(path)
    return path


def load_config(path: Path) -> PreTrainedConfig:
    """The model's config.

    Raises:
        LaunchRefused: config.json is broken, or of a type that transformers does not know.
    """
    try:
        with expert_parallel.quiet():
            return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise LaunchRefused(
            f"{path / 'config.json'} cannot be read: {error}. Use a model that this transformers knows, with a complete "
            f"config.json."
        ) from error


def load_generation_config(path: Path, config: PreTrainedConfig) -> GenerationConfig:
    """The model's generation defaults, from generation_config.json where there is one, else from its config."""
    with expert_parallel.quiet():
        if (path / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(path, local_files_only=True)
        return GenerationConfig.from_model_config(config)


def load_tokenizer(path: Path, *, load_format: str = "auto") -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Args:
        path: the model's directory.
        load_format: with ``"dummy"`` a directory without tokenizer files gets a byte-level tokenizer
            (:func:`atom.engine.byte_tokenizer.byte_tokenizer`), so that a config alone can be served.

    Raises:
        LaunchRefused: there is no tokenizer, or it cannot be read.
    """
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        if load_format == "dummy":
            return byte_tokenizer(load_config(path))
        raise LaunchRefused(
            f"{path} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}). Download the whole model again."
        )
    try:
        with expert_parallel.quiet():
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise LaunchRefused(
            f"the tokenizer in {path} cannot be read: {error}. Download the whole model again."
        ) from error


def eos_token_ids(path: Path, config: PreTrainedConfig) -> list[int]:
    """Tokens that end a generation; empty when the model names none."""
    for source in (load_generation_config(path, config), config.get_text_config()):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    return []


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
