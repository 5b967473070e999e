"""The gfx1250 backend over doubles: what is built, what is called, and that the numbers are the gloo backend's."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from atom.errors import LaunchRefused
from atom.moe import mori_v2
from atom.moe.distributed import DistributedMegaMoE
from atom.moe.experts import quantize_experts
from atom.moe.spec import Activation, ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.wire.format import AOperand, Wire, WireChoice, resolve_wire
from tests.gfx1250.doubles import core

CPU = torch.device("cpu")
GEOMETRY = MoEGeometry(
    hidden=256, inter=128, experts=8, topk=2, ep_size=1, ep_rank=0, max_tokens=32
)
PLENTY = 2**40


def build(
    recipe: ExpertRecipe | None = None,
    geometry: MoEGeometry = GEOMETRY,
    choice: WireChoice | None = None,
) -> mori_v2.MoriMegaMoE:
    recipe = recipe or ExpertRecipe()
    choice = choice or mori_v2.resolve_choice(recipe)
    return mori_v2.build(geometry, recipe, choice, group=None, device=CPU, free_bytes=PLENTY)


def layer_weights(
    geometry: MoEGeometry = GEOMETRY, *, bias: bool = False, seed: int = 0
) -> ExpertWeights:
    g = torch.Generator().manual_seed(seed)
    local, inter, hidden = geometry.local_experts, geometry.inter, geometry.hidden

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) * 0.1

    return quantize_experts(
        rand(local, 2 * inter, hidden).bfloat16(),
        rand(local, hidden, inter).bfloat16(),
        layout=GateMode.CONCAT,
        gate_mode=GateMode.INTERLEAVE,
        bias1=rand(local, 2 * inter) if bias else None,
        bias2=rand(local, hidden) if bias else None,
    )


def batch(tokens: int, geometry: MoEGeometry = GEOMETRY, seed: int = 1) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, geometry.hidden, generator=g).bfloat16()
    ids = torch.rand(tokens, geometry.experts, generator=g).topk(geometry.topk).indices.int()
    weights = torch.rand(tokens, geometry.topk, generator=g)
    return x, weights, ids


def expected(
    recipe: ExpertRecipe, choice: WireChoice, weights: ExpertWeights, tokens: int
) -> torch.Tensor:
    plain = DistributedMegaMoE(GEOMETRY, recipe, choice, group=None, device=CPU)
    out = plain(*batch(tokens), plain.prepare(weights)).clone()
    plain.close()
    return out


@pytest.mark.parametrize("force", ["0", "1"])
@pytest.mark.parametrize(
    "version, wire",
    [
        *((version, "bf16") for version in core.AITER_VERSIONS),
        *((version, "auto") for version in core.AITER_VERSIONS[1:]),
    ],
)
def test_a_layer_gives_the_gloo_backend_s_numbers(install, monkeypatch, version, force, wire):
    install(aiter=version, mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", wire)
    monkeypatch.setenv("AITER_FORCE_A8W4", force)
    mega = build()
    weights = layer_weights()
    out = mega(*batch(20), mega.prepare(weights))
    assert torch.equal(out, expected(ExpertRecipe(), resolve_wire(), weights, 20))
    assert out.dtype is torch.bfloat16 and out.shape == (20, 256)
    operand = "fp8" if force == "1" else "fp4"
    assert mega.built.startup_line() == (
        "[MORI-V2] Created MegaMoE: ep_rank=0 ep_size=1 hidden=256 inter=128 experts=8 topk=2 M=32 act=silu gate=interleave "
        "quant=per_1x32 pad=(0,0) swiglu_limit=0.0 "
        + (f"dispatch=mori wire={operand}" if wire == "auto" else "dispatch=flydsl wire=bf16")
        + f" force_a8w4={force}"
    )
    mega.close()


@pytest.mark.parametrize("force", ["0", "1"])
def test_wires_give_identical_bits(install, monkeypatch, force):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("AITER_FORCE_A8W4", force)
    weights, outs = layer_weights(), []
    for wire in ("bf16", "auto"):
        monkeypatch.setenv("MEGA_WIRE", wire)
        mega = build()
        outs.append(mega(*batch(32), mega.prepare(weights)).clone())
        mega.close()
    assert torch.equal(*outs)


def test_clamped_and_biased_swiglu(install):
    install(aiter="current", mori="at_1_2_4")
    recipe = ExpertRecipe(activation=Activation.SWIGLU, swiglu_limit=7.0, bias=True)
    mega, weights = build(recipe), layer_weights(bias=True)
    out = mega(*batch(9), mega.prepare(weights, recipe))
    assert torch.equal(out, expected(recipe, resolve_wire(), weights, 9))
    mega.close()


def test_weights_in_another_layout_give_other_numbers(install):
    # Otherwise the comparison above would not see a wrong shuffle.
    install(aiter="current", mori="at_1_2_4")
    mega, weights = build(), layer_weights()
    prepared = mega.prepare(weights)
    right = mega(*batch(4), prepared).clone()
    swapped = prepared.w1.view(torch.uint8).roll(1, dims=1).view(prepared.w1.dtype)
    swapped.is_shuffled = True
    assert not torch.equal(mega(*batch(4), replace(prepared, w1=swapped)), right)
    mega.close()


def test_the_preshuffle_puts_each_byte_where_the_16x16_tiles_have_it(install):
    install(aiter="current", mori="at_1_2_4")
    from aiter.ops.shuffle import moe_shuffle_scale, shuffle_weight

    g = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (2, 32, 64), generator=g, dtype=torch.uint8)
    flat = shuffle_weight(codes).flatten(1)
    for n, k in ((0, 0), (1, 0), (0, 16), (15, 31), (16, 32), (31, 63), (17, 40)):
        tile = (n // 16) * (64 // 32) + k // 32
        at = tile * 512 + (k % 32) // 16 * 256 + n % 16 * 16 + k % 16
        assert torch.equal(flat[:, at], codes[:, n, k])
    scales = torch.randint(0, 256, (2, 64, 8), generator=g, dtype=torch.uint8)
    flat = moe_shuffle_scale(scales, experts_cnt=2).flatten(1)
    for n, k in ((0, 0), (31, 3), (32, 0), (5, 6), (63, 7)):
        at = (n // 32) * 32 * 8 + (k // 4) * 128 + n % 32 * 4 + k % 4
        assert torch.equal(flat[:, at], scales[:, n, k])
    assert torch.equal(core.unshuffle_weight(shuffle_weight(codes)), codes)
    assert torch.equal(core.unshuffle_scale(moe_shuffle_scale(scales), 64, 8), scales)


# --- construction ---------------------------------------------------------------------------------------------------


def test_one_instance_for_one_construction(install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    first = build()
    assert build() is first
    monkeypatch.setenv("MEGA_WIRE", "fp4")
    other = build()
    assert other is not first and other.built.wire is Wire.FP4
    monkeypatch.setenv("MEGA_DISPATCH", "flydsl")
    third = build()
    assert third is not other and third.built.transport == "flydsl"
    first.close()
    monkeypatch.delenv("MEGA_WIRE")
    monkeypatch.delenv("MEGA_DISPATCH")
    again = build()
    assert again is not first and not again.closed
    for mega in (other, third, again):
        mega.close()
        mega.close()
    from mori.cco import Communicator

    assert not Communicator.alive


def test_what_is_passed_down(install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", "fp4")
    # Names that aiter would read itself, had it been left to.
    monkeypatch.setenv("MEGA_COMBINE_QUANT", "none")
    mega = build(ExpertRecipe(swiglu_limit=10.0))
    config = mega._mega._config
    assert (config.dispatch_wire, config.dispatch_backend, config.combine_quant) == (
        "fp4",
        "mori",
        "none",
    )
    assert config.stage1_fused is False and mega._mega.swiglu_limit == 10.0
    mega.close()


def test_the_old_name_does_not_stop_the_release_that_renamed_it(install, monkeypatch):
    install(aiter="at_4984", mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", "fp4")
    mega = build()
    assert mega.built.wire is Wire.FP4
    mega.close()


@pytest.mark.parametrize(
    "change, says",
    [
        (
            lambda mega: setattr(mega._config, "dispatch_wire", "bf16"),
            "wire: asked fp4, built bf16",
        ),
        (
            lambda mega: setattr(mega._config, "dispatch_backend", "flydsl"),
            "dispatch backend: asked mori, built flydsl",
        ),
        (
            lambda mega: setattr(mega._config, "max_tokens_per_rank", 16),
            "tokens a rank: asked 32, built 16",
        ),
        (lambda mega: setattr(mega, "swiglu_limit", 7.0), "swiglu_limit: asked 0.0, built 7.0"),
    ],
)
def test_what_was_built_is_read_back_and_a_difference_refused(install, monkeypatch, change, says):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", "fp4")
    from aiter.ops.flydsl.kernels.mega_moe_gfx1250 import MegaMoEGfx1250
    from mori.cco import Communicator

    real, closed = MegaMoEGfx1250._initialize_pipeline, []

    def other(self, config, communicator):
        real(self, config, communicator)
        change(self)

    monkeypatch.setattr(MegaMoEGfx1250, "_initialize_pipeline", other)
    monkeypatch.setattr(MegaMoEGfx1250, "close", lambda self: closed.append(self))
    with pytest.raises(LaunchRefused, match="aiter built another MegaMoE") as refused:
        build()
    assert says in str(refused.value)
    assert closed and not Communicator.alive


@pytest.mark.parametrize(
    "where, says",
    [
        (
            "mori.cco.Communicator.get_unique_id",
            "mori made no rendezvous token: RuntimeError: no free port",
        ),
        (
            "mori.cco.Communicator.init",
            "mori's communicator could not be made: RuntimeError: no free port",
        ),
        (
            "aiter.ops.flydsl.kernels.mega_moe_gfx1250.mega_moe.MegaMoEGfx1250._initialize_pipeline",
            "aiter's MegaMoEGfx1250 could not be built: RuntimeError: no free port",
        ),
        (
            "aiter.ops.flydsl.kernels.mega_moe_gfx1250.mega_moe.MegaMoEConfig.__post_init__",
            "aiter refuses these sizes: no free port",
        ),
        (
            "mori.ops.dispatch_combine_v2.hip_backend.scale_stride_bytes",
            "mori's dispatch cannot be loaded",
        ),
    ],
)
def test_whatever_the_libraries_raise_is_readable(install, monkeypatch, where, says):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", "fp4")

    def fail(*args, **kwargs):
        raise RuntimeError("no free port")

    monkeypatch.setattr(where, fail)
    with pytest.raises(LaunchRefused) as refused:
        build()
    assert says in str(refused.value)
    from mori.cco import Communicator

    assert not Communicator.alive


def test_a_pitch_other_than_the_wire_s_is_refused(install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", "fp4")
    monkeypatch.setattr(
        "mori.ops.dispatch_combine_v2.hip_backend.scale_stride_bytes", lambda scale_bytes: 64
    )
    with pytest.raises(LaunchRefused, match="8 B down at 64 B, and ATOM counts with 128 B"):
        build()


def test_an_aiter_that_cannot_be_imported(install):
    folder = install(aiter="current", mori="at_1_2_4")
    (folder / "aiter" / "utility" / "dtypes.py").write_text(
        "raise OSError('libamdhip64.so: not found')\n"
    )
    with pytest.raises(LaunchRefused, match=r"libamdhip64\.so: not found"):
        build()
    assert "libamdhip64" in mori_v2.why_not(CPU)


def test_auto_takes_it_on_gfx1250_with_both_libraries(install):
    install(aiter="current", mori="at_1_2_4")
    assert mori_v2.why_not(CPU) is None


def test_auto_says_why_it_does_not(install):
    assert mori_v2.why_not(CPU) == "the device is cpu, not gfx1250"
    install(aiter="current")
    assert "mori is not installed" in mori_v2.why_not(CPU)


# --- the A operand ---------------------------------------------------------------------------------------------------


def answer(monkeypatch, value) -> None:
    monkeypatch.setattr("aiter.fused_moe.resolve_activation_dtype", lambda *args, **kwargs: value)


def test_aiter_is_asked_with_what_will_run_and_without_a_token_count(install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    from aiter import ActivationType, QuantType, dtypes
    from aiter.ops.flydsl.moe_common import GateMode as AiterGateMode

    asked = []

    def resolve(*args, **kwargs):
        asked.append((args, kwargs))
        return dtypes.fp8

    monkeypatch.setattr("aiter.fused_moe.resolve_activation_dtype", resolve)
    recipe = ExpertRecipe(activation=Activation.SWIGLU, swiglu_limit=7.0)
    assert mori_v2.resolve_choice(recipe).a_operand is AOperand.FP8
    assert asked == [
        (
            (QuantType.per_1x32, dtypes.fp4x2),
            {"activation": ActivationType.Swiglu, "gate_mode": AiterGateMode.INTERLEAVE, "M": None},
        )
    ]


def test_aiter_s_answer_wins_over_the_environment_and_the_difference_is_reported(
    install, monkeypatch, caplog
):
    install(aiter="current", mori="at_1_2_4")
    answer(monkeypatch, torch.float8_e4m3fn)
    monkeypatch.setenv("MEGA_WIRE", "auto")
    monkeypatch.setenv("AITER_FORCE_A8W4", "0")
    with caplog.at_level(logging.WARNING):
        choice = mori_v2.resolve_choice(ExpertRecipe())
    assert (choice.wire, choice.a_operand) == (Wire.FP8, AOperand.FP8)
    assert "answers fp8, and AITER_FORCE_A8W4='0' would mean fp4" in caplog.text


def test_no_difference_no_warning(install, caplog):
    install(aiter="current", mori="at_1_2_4")
    with caplog.at_level(logging.WARNING):
        assert mori_v2.resolve_choice(ExpertRecipe()).a_operand is AOperand.FP4
    assert not caplog.records


@pytest.mark.parametrize("wire", ["fp8", "fp4"])
def test_an_operand_that_depends_on_the_token_count_refuses_a_quantizing_wire(
    install, monkeypatch, wire
):
    install(aiter="current", mori="at_1_2_4")
    answer(monkeypatch, None)
    monkeypatch.setenv("MEGA_WIRE", wire)
    with pytest.raises(LaunchRefused, match="depends on the token count") as refused:
        mori_v2.resolve_choice(ExpertRecipe())
    assert "MEGA_WIRE=bf16" in str(refused.value) and f"MEGA_WIRE='{wire}'" in str(refused.value)


@pytest.mark.parametrize("name", ["MEGA_WIRE", "MEGA_DISPATCH_WIRE"])
@pytest.mark.parametrize("wire", ["bf16", "auto", None])
def test_an_operand_that_depends_on_the_token_count_takes_a_bf16_wire(
    install, monkeypatch, caplog, name, wire
):
    install(aiter="current", mori="at_1_2_4")
    answer(monkeypatch, None)
    if wire is not None:
        monkeypatch.setenv(name, wire)
    with caplog.at_level(logging.WARNING):
        mega = build()
    assert mega.built.wire is Wire.BF16
    assert caplog.text.count("depends on the token count") == 1
    mega.close()


def test_an_operand_that_the_gemm_does_not_read_is_refused(install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    answer(monkeypatch, torch.bfloat16)
    with pytest.raises(LaunchRefused, match=r"answers torch\.bfloat16"):
        mori_v2.resolve_choice(ExpertRecipe())


def test_an_aiter_that_cannot_be_asked_as_expected_is_refused(install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setattr("aiter.fused_moe.resolve_activation_dtype", lambda hidden_states: None)
    with pytest.raises(LaunchRefused, match="could not be asked"):
        mori_v2.resolve_choice(ExpertRecipe())


def test_a_choice_that_was_made_without_asking_aiter_is_refused_where_it_is_wrong(
    install, monkeypatch
):
    install(aiter="current", mori="at_1_2_4")
    answer(monkeypatch, torch.float8_e4m3fn)
    with pytest.raises(LaunchRefused, match="agreed with a bf16 wire and the A operand fp4"):
        build(choice=resolve_wire({}))


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mega(install) -> mori_v2.MoriMegaMoE:
    install(aiter="current", mori="at_1_2_4")
    made = build()
    yield made
    made.close()


def test_inputs_are_converted_where_they_must_be(mega):
    weights = mega.prepare(layer_weights())
    x, scores, ids = batch(6)
    right = mega(x, scores, ids, weights).clone()
    wide = torch.zeros(6, 512, dtype=torch.bfloat16)
    wide[:, ::2] = x
    assert torch.equal(mega(wide[:, ::2], scores.double(), ids.long(), weights), right)
    assert torch.equal(mega(x.float(), scores.t().contiguous().t(), ids, weights), right)


def test_inputs_that_are_right_are_not_copied(mega, monkeypatch):
    weights, seen = mega.prepare(layer_weights()), []
    real = mega._mega

    def spy(*args, **kwargs):
        seen.extend(arg.data_ptr() for arg in args)
        return real(*args, **kwargs)

    monkeypatch.setattr(mega, "_mega", spy)
    inputs = batch(3)
    mega(*inputs, weights)
    monkeypatch.undo()
    assert seen == [tensor.data_ptr() for tensor in inputs]


def test_no_tokens(mega):
    assert mega(*batch(0), mega.prepare(layer_weights())).shape == (0, 256)


def test_the_result_is_a_view_that_the_next_call_overwrites(mega):
    weights = mega.prepare(layer_weights())
    first = mega(*batch(4), weights)
    kept = first.clone()
    mega(*batch(4, seed=9), weights)
    assert not torch.equal(first, kept)


def test_more_tokens_than_the_arena_holds(mega):
    with pytest.raises(ValueError, match="33 tokens in one step exceed the 32"):
        mega(*batch(33), mega.prepare(layer_weights()))


def test_weights_that_were_not_prepared(mega):
    with pytest.raises(ValueError, match="not in aiter's layout"):
        mega(*batch(3), layer_weights())


def test_the_bound_is_what_can_arrive(mega):
    weights = mega.prepare(layer_weights())
    for tokens, most in ((3, 3), (0, 5), (2, 100), (0, 0), (4, None)):
        mega(*batch(tokens), weights, max_rank_tokens=most)
    assert mega._mega.bounds == [3, 5, 32, 1, None]
    with pytest.raises(ValueError, match="max_rank_tokens=2, but this rank alone brings 3"):
        mega(*batch(3), weights, max_rank_tokens=2)
    mega.max_rank_tokens = 7
    mega(*batch(3), weights)
    assert mega._mega.bounds[-1] == 7, "what the lockstep announced holds when a call says nothing"


@pytest.mark.parametrize(
    "ranks, most, bound", [(4, 512, 2048), (4, 99999, 4 * 16384), (72, 1, 72), (4, 0, 1)]
)
def test_the_bound_does_not_multiply_by_topk(ranks, most, bound):
    geometry = MoEGeometry(
        hidden=7168, inter=3072, experts=720, topk=6, ep_size=ranks, ep_rank=0, max_tokens=16384
    )
    assert mori_v2.receive_bound(geometry, 0, most) == bound


@pytest.mark.parametrize(
    "other, parts",
    [
        (ExpertRecipe(swiglu_limit=7.0), ["swiglu_limit: the layer has 7.0, this MegaMoE 0.0"]),
        (
            ExpertRecipe(activation=Activation.SWIGLU),
            ["activation: the layer has swiglu, this MegaMoE silu"],
        ),
        (
            ExpertRecipe(gate_mode=GateMode.CONCAT),
            ["gate_mode: the layer has concat, this MegaMoE interleave"],
        ),
        (
            ExpertRecipe(quant_type="per_1x128", inter_pad=32),
            ["quant_type: the layer has per_1x128", "inter_pad"],
        ),
    ],
)
def test_a_layer_of_another_recipe_is_an_error_naming_both(mega, other, parts):
    with pytest.raises(ValueError, match="Give it one of its own") as error:
        mega.prepare(layer_weights(), other)
    for part in parts:
        assert part in str(error.value)


def test_weights_of_other_shapes_or_types_are_an_error_naming_both(mega):
    weights = layer_weights()
    with pytest.raises(
        ValueError, match=r"w2 is torch\.uint8 \(8, 256, 32\).* torch\.uint8 \(8, 256, 64\)"
    ):
        mega.prepare(replace(weights, w2=weights.w2[..., :32].contiguous()))
    with pytest.raises(ValueError, match=r"w1 is torch\.int8"):
        mega.prepare(replace(weights, w1=weights.w1.view(torch.int8)))
    with pytest.raises(ValueError, match=r"have bias1, but the model's recipe says bias=False"):
        mega.prepare(layer_weights(bias=True))


def test_alone_it_sends_nothing_and_counts_calls(mega):
    weights = mega.prepare(layer_weights())
    mega(*batch(5), weights)
    mega(*batch(6), weights)
    assert mega.counters.snapshot() == {
        "payload": 0,
        "scales": 0,
        "routing": 0,
        "combine": 0,
        "rows": 0,
        "calls": 2,
    }
