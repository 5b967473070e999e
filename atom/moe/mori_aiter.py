"""aiter's names as objects, and aiter's own answer for the expert GEMM's A operand.

Importing aiter compiles and asks the GPU for its architecture, so nothing here runs before the checks of
:mod:`atom.moe.mori_checks` have passed.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from atom import envs
from atom.errors import LaunchRefused
from atom.moe import mori_libs
from atom.moe.mori_libs import MEGA_MODULE, Capabilities
from atom.moe.spec import Activation, ExpertRecipe, GateMode
from atom.wire.format import AOperand, Wire, WireChoice, resolve_wire

logger = logging.getLogger(__name__)

_ACTIVATION = {Activation.SILU: "Silu", Activation.SWIGLU: "Swiglu"}


@dataclass(frozen=True)
class AiterNames:
    """The names of aiter that are used, as objects: see :data:`atom.moe.mori_libs.CONTRACT`.

    Attributes:
        mega: the class MegaMoEGfx1250. module: the module that defines it.
        activation_type, quant_types, gate_modes: its enumerations.
        fp4x2: dtype of two e2m1 codes a byte.
        shuffle_weight, moe_shuffle_scale: its layouts of weights and scales.
        resolve_activation_dtype: its answer for the A operand; None where it has none.
    """

    mega: Any
    module: Any
    activation_type: Any
    quant_types: Any
    gate_modes: Any
    fp4x2: torch.dtype
    shuffle_weight: Callable[..., torch.Tensor]
    moe_shuffle_scale: Callable[..., torch.Tensor]
    resolve_activation_dtype: Callable[..., torch.dtype | None] | None

    @classmethod
    def load(cls) -> AiterNames:
        """Import aiter.

        Raises:
            LaunchRefused: it cannot be imported, or lacks a name.
        """
        try:
            aiter = importlib.import_module("aiter")
            package = importlib.import_module(MEGA_MODULE)
            shuffle = importlib.import_module("aiter.ops.shuffle")
            return cls(
                mega=package.MegaMoEGfx1250,
                module=importlib.import_module(package.MegaMoEGfx1250.__module__),
                activation_type=aiter.ActivationType,
                quant_types=aiter.QuantType,
                gate_modes=importlib.import_module("aiter.ops.flydsl.moe_common").GateMode,
                fp4x2=aiter.dtypes.fp4x2,
                shuffle_weight=shuffle.shuffle_weight,
                moe_shuffle_scale=shuffle.moe_shuffle_scale,
                resolve_activation_dtype=getattr(
                    importlib.import_module("aiter.fused_moe"), "resolve_activation_dtype", None
                ),
            )
        except Exception as error:
            raise LaunchRefused(
                f"aiter cannot be used: {type(error).__name__}: {error}. Check the installation with "
                f"python -m atom.tools.doctor."
            ) from error

    def activation(self, recipe: ExpertRecipe) -> Any:
        """aiter's member for the recipe's activation."""
        return getattr(self.activation_type, _ACTIVATION[recipe.activation])

    def quant_type(self, recipe: ExpertRecipe) -> Any:
        """aiter's member for the recipe's scale granularity."""
        return getattr(self.quant_types, recipe.quant_type)

    def gate_mode(self, recipe: ExpertRecipe) -> Any:
        """aiter's member for the recipe's gate mode."""
        assert recipe.gate_mode is GateMode.INTERLEAVE, "the checks let no other through"
        return self.gate_modes.INTERLEAVE


def resolve_choice(
    recipe: ExpertRecipe, *, caps: Capabilities | None = None, report: bool = True
) -> WireChoice:
    """Wire and A operand of a launch over this backend, the operand as aiter itself answers it.

    An aiter that has ``resolve_activation_dtype`` is asked, without a token count, since one wire serves every batch. Its
    answer wins over AITER_FORCE_A8W4, and a difference is logged. The answer None means that the format depends on the
    token count: then no quantizing wire fits every batch, so fp8 and fp4 are refused and ``auto`` becomes bf16, which fits
    whatever the GEMM reads.

    Args:
        recipe: how experts are computed. caps: what the libraries can do, where it is known already.
        report: log a warning where aiter's answer differs from the environment.

    Raises:
        LaunchRefused: the environment is not accepted, or no wire can carry what aiter answers.
    """
    caps = caps or mori_libs.capabilities()
    by_rule = resolve_wire()
    if not caps.resolve_activation_dtype:
        return by_rule
    answer = _ask_aiter(recipe)
    if answer is None:
        return _token_dependent(by_rule, report)
    choice = resolve_wire(
        a_operand=answer, a_operand_found=f"aiter's resolve_activation_dtype() answers {answer}"
    )
    if report and answer is not by_rule.a_operand:
        logger.warning(
            "aiter's resolve_activation_dtype() answers %s, and %s would mean %s: aiter's answer holds.",
            answer,
            by_rule.a_operand_found,
            by_rule.a_operand,
        )
    return choice


def _ask_aiter(recipe: ExpertRecipe) -> AOperand | None:
    """aiter's A operand for MXFP4 experts of this recipe; None when it depends on the token count.

    Raises:
        LaunchRefused: aiter answers a format that MegaMoE's GEMM does not read, or cannot be asked.
    """
    try:
        names = AiterNames.load()
        answer = names.resolve_activation_dtype(
            names.quant_type(recipe),
            names.fp4x2,
            activation=names.activation(recipe),
            gate_mode=names.gate_mode(recipe),
            M=None,
        )
    except LaunchRefused:
        raise
    except Exception as error:
        raise LaunchRefused(
            f"aiter's resolve_activation_dtype() could not be asked for the A operand ({type(error).__name__}: {error}). "
            f"This aiter is not one that ATOM was made for: see docs/gfx1250.md."
        ) from error
    if answer is None:
        return None
    operand = {torch.float8_e4m3fn: AOperand.FP8, names.fp4x2: AOperand.FP4}.get(answer)
    if operand is None:
        raise LaunchRefused(
            f"aiter's resolve_activation_dtype() answers {answer} as the expert GEMM's A operand, and MegaMoE reads fp8 (e4m3) "
            f"or fp4 (e2m1) only. {envs.as_found('AITER_FORCE_A8W4')}: set it to 0 or 1."
        )
    return operand


def _token_dependent(choice: WireChoice, report: bool) -> WireChoice:
    name = choice.wire_found.partition("=")[0].partition(" ")[0]
    said = (
        "aiter's resolve_activation_dtype() answers None: the A operand depends on the token count"
    )
    if choice.wire.quantizing and envs.read(name) != "auto":
        raise LaunchRefused(
            f"{choice.wire_found}, but {said}, and a {choice.wire} wire fits one format only. Set MEGA_WIRE=bf16, or fix the "
            f"format in aiter (AITER_BF16_FP8_MOE_BOUND=0 takes the token count out of its choice)."
        )
    if report:
        logger.warning("%s; the wire is bf16, which fits every format.", said)
    return replace(choice, wire=Wire.BF16, a_operand_found=said)
