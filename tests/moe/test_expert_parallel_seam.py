"""The semi-private doors of transformers that the plug goes through. A failure here names what an upgrade has changed."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import transformers
from packaging.requirements import Requirement
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig, expert_parallel
from transformers.integrations.moe import use_experts_implementation

from atom.moe.expert_parallel import IMPLEMENTATION, AtomExpertParallel
from atom.moe.model_config import EXPERTS_STYLE, experts_names, meta_model
from tests.moe.models import FAMILIES, config_of

REMEDY = (
    f"transformers {transformers.__version__} changed a door that atom/moe/expert_parallel.py goes through: adapt it, then "
    f"raise the pin in pyproject.toml"
)


def _parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_installed_version_is_the_pinned_one():
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (pin,) = (
        requirement
        for text in pyproject["project"]["dependencies"]
        if (requirement := Requirement(text)).name == "transformers"
    )
    assert transformers.__version__ in pin.specifier, f"the seam was tested with {pin}: {REMEDY}"


def test_the_implementation_is_registered():
    registered = expert_parallel.EPImplementationInterface()
    assert IMPLEMENTATION in registered and registered[IMPLEMENTATION] is AtomExpertParallel, REMEDY
    assert issubclass(AtomExpertParallel, expert_parallel.EPImplementation), REMEDY


def test_signatures():
    implementation = expert_parallel.EPImplementation
    assert _parameters(implementation.__call__) == [
        "self",
        "hidden_states",
        "top_k_index",
        "top_k_weights",
    ], REMEDY
    assert _parameters(implementation.__init__) == ["self", "experts", "ep_mesh", "tp_mesh"], REMEDY
    assert _parameters(expert_parallel.apply_expert_parallelism) == [
        "model",
        "ep_mesh",
        "tp_mesh",
        "plan",
        "ep_implementation",
    ], REMEDY
    assert _parameters(Qwen3MoeForCausalLM.maybe_distribute_model) == [
        "model",
        "distributed_config",
        "mesh_manager",
    ], REMEDY
    flags = {"is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm"}
    assert flags <= set(_parameters(use_experts_implementation)), REMEDY


def test_from_pretrained_calls_the_door_for_a_rank_alone():
    """A config that distributes nothing must reach ``maybe_distribute_model`` without meshes of transformers' own."""
    config, device_map, mesh = Qwen3MoeForCausalLM.prepare_distribute_model(
        DistributedConfig(), device_map={"": "cpu"}
    )
    assert isinstance(config, DistributedConfig), REMEDY
    assert (device_map, mesh) == ({"": "cpu"}, None), REMEDY
    source = inspect.getsource(transformers.PreTrainedModel.from_pretrained)
    assert "cls.maybe_distribute_model(model, distributed_config, mesh_manager)" in source, REMEDY


def test_plans_name_the_experts():
    for family in FAMILIES:
        model = meta_model(config_of(family))
        assert EXPERTS_STYLE in model.ep_plan.values(), f"{family}: {REMEDY}"
        names = experts_names(model)
        assert names and all(name.endswith("mlp.experts") for name in names), f"{family}: {REMEDY}"
        experts = model.get_submodule(names[0])
        assert callable(experts._apply_gate), f"{family}: {REMEDY}"
        plan = model._expand_parallel_plan(model.ep_plan)
        sharded = {name for name, style in plan.items() if style == "grouped_gemm"}
        parameters = {f"{name}.{key}" for name in names for key, _ in experts.named_parameters()}
        assert sharded == parameters, f"{family}: not every expert parameter is sharded: {REMEDY}"
