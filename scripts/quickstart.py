"""Start a server on the bundled model, wait for it, ask it for one completion, and keep it running.

Started by scripts/quickstart.sh, which makes the environment first and documents the arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence

import openai

from atom.benchmarks.server_process import (
    ROOT,
    STARTUP_MARK,
    Progress,
    ServerExited,
    ServerProcess,
    interrupt_on_signals,
    port_is_free,
    start_openai_server,
)

HOST = "127.0.0.1"
PROMPT = "def fibonacci(n):\n"
MAX_TOKENS = 64
HEALTH_TIMEOUT_S = 600.0
LOG_TAIL = 40


def _whole_number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of quickstart.sh; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(prog="quickstart.sh", description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop after the completion")
    parser.add_argument("--port", type=_whole_number(1, 65535), default=8000, help="default: 8000")
    parser.add_argument(
        "--tp", "-tp", type=_whole_number(1, 64), default=2, metavar="RANKS", help="default: 2"
    )
    return parser.parse_args(argv)


def show_completion(url: str) -> str:
    """Ask the server for one greedy completion with the openai client, print it, and return the model's name.

    Raises:
        openai.OpenAIError: the server did not answer, or answered with an error.
    """
    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )
    with client:
        model = client.models.list().data[0].id
        answer = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0.0
        )
    print(f"\nA completion from {model} ({answer.usage.completion_tokens} tokens):\n")
    print("\n".join("    " + line for line in (PROMPT + answer.choices[0].text).splitlines()))
    return model


def show_curl(url: str, model: str) -> None:
    """Print a command that sends the same request."""
    body = json.dumps(
        {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    )
    print(f"\nThe same with curl:\n\n    curl {url}/v1/completions \\")
    print(f"        -H 'Content-Type: application/json' -d '{body}'\n")


def explain(server: ServerProcess, error: Exception) -> int:
    """Show the end of the server's log and what went wrong; return the status to exit with.

    A client's error is often the first sign of a server that is ending, which then is what went wrong.
    """
    try:
        time.sleep(0.5)
        server.check()
    except ServerExited as ended:
        error = ended
    print("\n".join(server.log_lines()[-LOG_TAIL:]), file=sys.stderr)
    print(f"quickstart.sh: {error}; its whole log: {server.log}", file=sys.stderr)
    return (error.status if isinstance(error, ServerExited) else 0) or 1


def main(argv: Sequence[str]) -> int:
    """Run the quick start; return the exit status."""
    args = parse_args(argv)
    try:
        usable, reason = port_is_free(HOST, args.port), "is in use"
    except OSError as error:
        usable, reason = False, f"cannot be used ({error.strerror})"
    if not usable:
        print(
            f"quickstart.sh: port {args.port} on {HOST} {reason}. Choose another: --port N.",
            file=sys.stderr,
        )
        return 1

    server_args = ["--model", "tiny-moe", "-tp", str(args.tp)]
    if args.tp > 1:
        server_args += ["--enable-expert-parallel", "--enable-dp-attention"]
    log = ROOT / "logs" / f"quickstart-{args.port}.log"

    interrupt_on_signals()
    serving = False
    wire = "".join(
        f"{name}={os.environ[name]} "
        for name in ("MEGA_WIRE", "MEGA_DISPATCH_WIRE")
        if name in os.environ
    )
    print(f"Starting: {wire}python -m atom.entrypoints.openai_server {' '.join(server_args)}")
    print(f"Log:      {log}", flush=True)
    with start_openai_server(server_args, host=HOST, port=args.port, log=log) as server:
        try:
            seconds = server.wait_until_healthy(HEALTH_TIMEOUT_S, Progress())
            print(f"Healthy after {seconds:.1f} s at {server.url}\n")
            lines = server.startup_lines()
            print("\n".join(lines) or f"No line in the log says {STARTUP_MARK!r}.")
            show_curl(server.url, show_completion(server.url))
            if args.once:
                print("Stopping the server.", flush=True)
                status = server.stop()
                return explain(server, ServerExited(status)) if status else 0
            serving = True
            print("Serving until Ctrl-C.", flush=True)
            server.wait()
        except (ServerExited, TimeoutError, openai.OpenAIError) as error:
            return explain(server, error)
        except KeyboardInterrupt:
            print("\nStopping the server.", flush=True)
            server.stop()
            return 0 if serving else 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
