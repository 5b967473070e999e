"""The server's command line: one dataclass of settings, whose defaults the parser reads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields

import atom

LOAD_FORMATS = ("auto", "dummy")
DEVICES = ("auto", "cpu", "cuda")
PROGRAM = "python -m atom.entrypoints.openai_server"


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """What a server is started with; the field's names are the long flags, in snake case."""

    model: str
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_dp_attention: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    load_format: str = "auto"
    served_model_name: str | None = None
    api_key: str | None = None
    device: str = "auto"
    enforce_eager: bool = False
    seed: int = 0

    @property
    def model_name(self) -> str:
        """The name that requests must give."""
        return self.served_model_name or self.model


def parse_args(argv: Sequence[str]) -> ServerArgs:
    """Settings from a command line. Long flags may be in kebab or snake case.

    Raises:
        SystemExit: status 2 with the usage and an error for arguments that are not accepted, 0 for --help and --version.
    """
    parser = _parser()
    namespace = parser.parse_args([_kebab(argument) for argument in argv])
    args = ServerArgs(**vars(namespace))
    if args.tensor_parallel_size > 1:
        required = {
            "--enable-expert-parallel": args.enable_expert_parallel,
            "--enable-dp-attention": args.enable_dp_attention,
        }
        missing = " and ".join(flag for flag, given in required.items() if not given)
        if missing:
            parser.error(
                f"-tp {args.tensor_parallel_size} needs {missing}: on more than one rank the experts are split over "
                f"the ranks (--enable-expert-parallel) and each rank runs attention for its own requests "
                f"(--enable-dp-attention); there is no other way to use {args.tensor_parallel_size} ranks. "
                f"Add the flag, or use -tp 1."
            )
    return args


def _kebab(argument: str) -> str:
    """The argument with the underscores of its long flag's name, if it is one, turned into hyphens."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _whole_number(least: int, most: int | None = None) -> type[int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            allowed = f"{least} or more" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number that is {allowed}")
        return value

    return parse  # type: ignore[return-value]


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Serve a mixture-of-experts model over an OpenAI-compatible HTTP API. What the expert-parallel "
        "dispatch wire carries is chosen by the environment variable MEGA_WIRE: bf16, fp8, fp4 or auto.",
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in fields(ServerArgs)}

    def add(flag: str, *aliases: str, help: str, **how: object) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        default = defaults[name]
        if how.get("action") != "store_true" and default is not None and name != "model":
            help += f" (default: {default})"
        if name != "model":
            how["default"] = default
        parser.add_argument(*aliases, flag, help=help, **how)  # type: ignore[arg-type]

    add(
        "--model",
        help="a directory in Hugging Face layout, or the name of a bundled model (tiny-moe)",
        required=True,
        type=_text,
    )
    add(
        "--tensor-parallel-size",
        "-tp",
        help="number of ranks, one process each",
        type=_whole_number(1, 1024),
        metavar="N",
    )
    add(
        "--enable-expert-parallel",
        help="split the experts over the ranks; needed for -tp 2 and more",
        action="store_true",
    )
    add(
        "--enable-dp-attention",
        help="let each rank run attention for requests of its own; needed for -tp 2 and more",
        action="store_true",
    )
    add("--host", help="address to listen on; 0.0.0.0 for every interface", type=_text)
    add("--port", help="port to listen on; 0 takes a free one", type=_whole_number(0, 65535))
    add(
        "--max-model-len",
        help="longest prompt plus generation, in tokens (default: the model's own limit)",
        type=_whole_number(1),
        metavar="TOKENS",
    )
    add(
        "--max-num-seqs",
        help="most requests in one rank's batch",
        type=_whole_number(1),
        metavar="N",
    )
    add(
        "--max-num-batched-tokens",
        help="most tokens in one rank's step",
        type=_whole_number(1),
        metavar="TOKENS",
    )
    add(
        "--load-format",
        help="auto reads the weights, dummy draws random ones from the config alone",
        choices=LOAD_FORMATS,
    )
    add(
        "--served-model-name",
        help="the model's name in the API (default: --model as given)",
        type=_text,
        metavar="NAME",
    )
    add(
        "--api-key",
        help="key that requests must send as 'Authorization: Bearer KEY' (default: none is asked for)",
        type=_text,
        metavar="KEY",
    )
    add("--device", help="what the ranks compute on", choices=DEVICES)
    add(
        "--enforce-eager",
        help="on a GPU, run decode steps without CUDA graphs, which -tp 1 uses otherwise",
        action="store_true",
    )
    add(
        "--seed",
        help="seed of random weights (--load-format dummy)",
        type=_whole_number(0, 2**63 - 1),
    )
    parser.add_argument("--version", action="version", version=f"atom {atom.__version__}")
    return parser
