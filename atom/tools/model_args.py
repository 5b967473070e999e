"""The sizes that a tool works on: from a model's config, or from flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from atom.errors import LaunchRefused
from atom.moe.spec import ExpertRecipe, MoEGeometry

DEFAULT_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes and recipe of a model's main MoE layers.

    Attributes:
        name: where they come from.
        geometry: sizes. recipe: how experts are computed.
        layers: number of MoE layers.
    """

    name: str
    geometry: MoEGeometry
    recipe: ExpertRecipe
    layers: int


def add_arguments(parser: argparse.ArgumentParser, *config_flags: str) -> None:
    """Flags of :func:`model_from`; ``config_flags`` are the names of the flag for a model directory."""
    parser.add_argument(
        *config_flags,
        dest="config",
        metavar="DIR",
        help="Hugging Face model directory, or the name of a bundled model",
    )
    sizes = parser.add_argument_group("sizes, instead of a config or over it")
    sizes.add_argument("--hidden", type=int, metavar="H", help="width of a token row")
    sizes.add_argument("--inter", type=int, metavar="I", help="width of an expert's activation")
    sizes.add_argument("--experts", type=int, metavar="E", help="routed experts of a layer")
    sizes.add_argument("--topk", type=int, metavar="K", help="experts a token is sent to")
    sizes.add_argument("--layers", type=int, metavar="L", help="MoE layers of the model")
    sizes.add_argument(
        "-tp",
        "--ep-size",
        "--ep_size",
        dest="ep_size",
        type=int,
        default=4,
        metavar="N",
        help="ranks (4)",
    )


def model_from(args: argparse.Namespace, *, max_tokens: int) -> Model | None:
    """The model that the flags describe; None when they describe none.

    Args:
        args: parsed with :func:`add_arguments`.
        max_tokens: tokens of one rank in one step, at most.

    Raises:
        LaunchRefused: the config is not a MoE model that can be served, or the sizes do not belong together.
    """
    given = {name: getattr(args, name) for name in ("hidden", "inter", "experts", "topk")}
    if args.config is not None:
        # transformers takes seconds to import, which sizes given as flags need not wait for.
        from atom.engine.model_files import load_config
        from atom.engine.model_path import resolve_model_path
        from atom.moe.model_config import group_layers, moe_layers_of

        config = load_config(resolve_model_path(args.config))
        main = group_layers(
            moe_layers_of(config), ep_size=args.ep_size, ep_rank=0, max_tokens=max_tokens
        )[0]
        found = {name: getattr(main.geometry, name) for name in given}
        recipe, layers, name = main.recipe, len(main.layers), args.config
    elif given["hidden"] is not None:
        # Sizes of DeepSeek-V4-Pro where a flag is left out.
        found = {"hidden": 7168, "inter": 3072, "experts": 384, "topk": 6}
        recipe, layers, name = ExpertRecipe(), 61, "flags"
    else:
        return None
    sizes = {name: value if (value := given[name]) is not None else found[name] for name in found}
    try:
        geometry = MoEGeometry(**sizes, ep_size=args.ep_size, ep_rank=0, max_tokens=max_tokens)
    except ValueError as error:
        raise LaunchRefused(str(error)) from error
    return Model(name=name, geometry=geometry, recipe=recipe, layers=args.layers or layers)
