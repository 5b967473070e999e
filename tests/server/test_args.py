"""The command line: both spellings, every refusal, defaults from the dataclass."""

from __future__ import annotations

from dataclasses import fields

import pytest

from atom.entrypoints.openai.args import ServerArgs, parse_args

EVERYTHING = {
    "--tensor-parallel-size": "2",
    "--host": "0.0.0.0",
    "--port": "81",
    "--max-model-len": "512",
    "--max-num-seqs": "8",
    "--max-num-batched-tokens": "256",
    "--load-format": "dummy",
    "--served-model-name": "a_b-c",
    "--api-key": "k_e-y",
    "--device": "cpu",
    "--seed": "3",
}
FLAGS = ("--enable-expert-parallel", "--enable-dp-attention")


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed for a command line that is refused with status 2."""
    with pytest.raises(SystemExit) as exit_:
        parse_args(argv)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_only_the_model_is_required() -> None:
    args = parse_args(["--model", "some/model_dir"])
    assert args == ServerArgs(model="some/model_dir")
    assert args.model_name == "some/model_dir"


@pytest.mark.parametrize("spelling", ["kebab", "snake", "equals"])
def test_every_flag_in_every_spelling(spelling: str) -> None:
    argv = ["--model", "m", *FLAGS]
    for flag, value in EVERYTHING.items():
        argv += [f"{flag}={value}"] if spelling == "equals" else [flag, value]
    if spelling == "snake":
        argv = [a.replace("-", "_").replace("__", "--") if a.startswith("--") else a for a in argv]
    assert parse_args(argv) == ServerArgs(
        model="m",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        enable_dp_attention=True,
        host="0.0.0.0",
        port=81,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        load_format="dummy",
        served_model_name="a_b-c",
        api_key="k_e-y",
        device="cpu",
        seed=3,
    )


@pytest.mark.parametrize("given", [[], [FLAGS[0]], [FLAGS[1]]])
def test_more_ranks_need_both_flags(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(["--model", "m", "-tp", "2", *given], capsys)
    named = text.split("needs ")[1].split(":")[0]
    assert named == " and ".join(flag for flag in FLAGS if flag not in given)
    assert parse_args(["--model", "m", "-tp", "2", *FLAGS]).tensor_parallel_size == 2
    assert parse_args(["--model", "m", "-tp", "1", *given]).tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "65536"], "'65536'"),
        (["--port", "-1"], "'-1'"),
        (["--port", "http"], "'http'"),
        (["-tp", "0"], "'0'"),
        (["--max-model-len", "0"], "'0'"),
        (["--max-num-seqs", "-5"], "'-5'"),
        (["--max-num-batched-tokens", "1.5"], "'1.5'"),
        (["--load-format", "gguf"], "'auto', 'dummy'"),
        (["--device", "tpu"], "'auto', 'cpu', 'cuda'"),
        (["--api-key", ""], "empty"),
        (["--served-model-name", " "], "empty"),
        (["--enable-dp"], "--enable-dp"),
        (["--trust-remote-code"], "--trust-remote-code"),
        (["--model", ""], "empty"),
    ],
)
def test_a_bad_value_is_named(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(["--model", "m", *argv], capsys)


def test_the_model_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model" in refusal([], capsys)


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_args(["--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(ServerArgs):
        assert f"--{field.name.replace('_', '-')}" in text
        if not isinstance(field.default, bool) and isinstance(field.default, int | str):
            assert f"(default: {field.default})" in text
