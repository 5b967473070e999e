#!/usr/bin/env python3
"""Check a model of the catalog for accuracy: launch it as the catalog says, score it, compare with its threshold.

    scripts/accuracy.py tiny-moe-fp4                launch a server, score it, stop it
    scripts/accuracy.py tiny-moe-fp4 --url URL      score a server that runs already
    scripts/accuracy.py --matrix                    the catalog's names and runners as JSON, for the workflow

Tasks, all through the server's /v1/completions:

    next_token  Share of the tokens of the texts in heldout/ that are the model's first choice given what stands
                before them (`echo` with `logprobs`). The texts were written for this and are in no training set.
    gsm8k       Share of grade-school problems (Cobbe et al. 2021) solved greedily with three examples, the last
                number of the answer counting. Needs the test set as JSON lines of `question` and `answer`, named by
                --data or ATOM_ACCURACY_DATA; skipped, with exit status 0 and the reason, when that names nothing.

Exit status: 0 passed or skipped, 1 below the threshold or the server failed, 2 wrong usage or a launch refused.
Only the standard library is imported before a server runs, so that --matrix needs no installation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# --matrix runs where nothing is installed, and must find the package's modules that need nothing.
sys.path.insert(0, str(ROOT))
from atom.benchmarks.server_process import (  # noqa: E402
    Progress,
    ServerExited,
    free_port,
    get_json,
    interrupt_on_signals,
    post_json,
    start_openai_server,
)

CATALOG = ROOT / ".github" / "benchmark" / "models.json"
HELDOUT = ROOT / ".github" / "benchmark" / "heldout"
HEALTH_TIMEOUT_S = 3600.0
REQUEST_TIMEOUT_S = 900.0
REQUESTS_IN_FLIGHT = 32
GSM8K_EXAMPLES = 3
GSM8K_MAX_TOKENS = 512


class Skipped(Exception):
    """The task cannot run here, for a reason that is not the model's fault."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Result of a task.

    Attributes:
        value: what is compared with the threshold, 0 to 1.
        count: tokens or problems that it is the share of.
        detail: more about it, for the reader.
    """

    value: float
    count: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class Client:
    """The completions endpoint of a server and the model to ask it for."""

    url: str
    model: str

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """The first choice of a greedy completion of ``prompt``."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **fields}
        answer = post_json(f"{self.url}/v1/completions", body, timeout=REQUEST_TIMEOUT_S)
        return answer["choices"][0]

    def complete_all(self, prompts: Sequence[str], **fields: Any) -> list[dict[str, Any]]:
        """:meth:`complete` of every prompt, several in flight, in order."""
        with ThreadPoolExecutor(REQUESTS_IN_FLIGHT) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, **fields), prompts))


Task = Callable[[Client], Score]


def next_token(_args: argparse.Namespace) -> Task:
    """Score the texts in heldout/: share of first choices, with perplexity in the detail.

    A text's first token has nothing before it and the one generated token is not the text's: neither counts.
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted(HELDOUT.glob("*.py"))]

    def score(client: Client) -> Score:
        total, right, loss = 0, 0, 0.0
        for choice in client.complete_all(texts, max_tokens=1, echo=True, logprobs=1):
            chosen = choice["logprobs"]["token_logprobs"][1:-1]
            likeliest = choice["logprobs"]["top_logprobs"][1:-1]
            right += sum(
                value >= max(best.values()) for value, best in zip(chosen, likeliest, strict=True)
            )
            loss -= sum(chosen)
            total += len(chosen)
        detail = f"perplexity {math.exp(loss / total):.3f} over {len(texts)} texts"
        return Score(value=right / total, count=total, detail=detail)

    return score


def read_problems(path: Path) -> list[tuple[str, str]]:
    """(question, answer) of each line of a GSM8K file.

    Raises:
        ValueError: a line is not such a pair, or there are too few.
    """
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                record = json.loads(line)
                problems.append((str(record["question"]), str(record["answer"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number} is not a JSON object with question and answer"
                ) from error
    if len(problems) <= GSM8K_EXAMPLES:
        raise ValueError(f"{path} holds {len(problems)} problems; {GSM8K_EXAMPLES} are examples")
    return problems


def last_number(text: str) -> float | None:
    """The last number in a text, with commas between thousands or not; None when there is none."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None


def gsm8k(args: argparse.Namespace) -> Task:
    """Score GSM8K: its first problems are the examples, the rest are asked.

    Raises:
        Skipped: no data was named, or the file does not exist.
    """
    if args.data is None:
        raise Skipped("no data: name the GSM8K test set with --data or ATOM_ACCURACY_DATA")
    if not args.data.is_file():
        raise Skipped(f"no data: {args.data} is not a file")
    problems = read_problems(args.data)
    examples, asked = problems[:GSM8K_EXAMPLES], problems[GSM8K_EXAMPLES:][: args.limit]
    shots = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in examples)
    prompts = [f"{shots}Question: {question}\nAnswer:" for question, _ in asked]

    def score(client: Client) -> Score:
        choices = client.complete_all(prompts, max_tokens=GSM8K_MAX_TOKENS, stop=["Question:"])
        right = sum(
            last_number(choice["text"]) == last_number(answer)
            for choice, (_, answer) in zip(choices, asked, strict=True)
        )
        cut = sum(choice["finish_reason"] == "length" for choice in choices)
        detail = f"{cut} answers cut at {GSM8K_MAX_TOKENS} tokens"
        return Score(value=right / len(asked), count=len(asked), detail=detail)

    return score


TASKS: dict[str, Callable[[argparse.Namespace], Task]] = {
    "next_token": next_token,
    "gsm8k": gsm8k,
}


def read_catalog(path: Path) -> dict[str, dict[str, Any]]:
    """The catalog's entries by name. Its schema is checked by the test suite and the pre-checkin workflow."""
    return {
        entry["name"]: entry for entry in json.loads(path.read_text(encoding="utf-8"))["models"]
    }


def matrix(entries: Iterable[dict[str, Any]]) -> str:
    """The entries as one line of JSON for a workflow's matrix: name, hardware, runner."""
    keys = ("name", "hardware", "runner")
    return json.dumps([{key: entry[key] for key in keys} for entry in entries])


def local_model(path: str) -> str:
    """What ``--model`` gets for a catalog path: a hub id becomes the directory of the machine's own copy.

    Raises:
        ValueError: the machine has no copy.
    """
    if "/" not in path or Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(path, local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{path} is not in this machine's Hugging Face cache: run `hf download {path}` first"
        ) from error


def server_environment(entry: dict[str, Any]) -> dict[str, str]:
    """The catalog entry's environment over this process's, without what else would change the result."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ATOM_", "MEGA_")) and name != "AITER_FORCE_A8W4"
    }
    return {**kept, **entry["env"]}


def refuse_balanced_routing(value: object, where: str) -> None:
    """Refuse to score what runs with ATOM_FAKE_EPLB, under which a model's text is nonsense.

    Raises:
        ValueError: ``value`` says that it is on.
    """
    if str(value).strip().lower() not in ("", "0", "false", "none"):
        raise ValueError(
            f"{where} has ATOM_FAKE_EPLB: balanced routing is for benchmarks, and an accuracy under it says nothing. "
            f"Unset it, and start the server without it."
        )


def server_version(url: str) -> dict[str, Any]:
    """What ``/version`` says; empty for a server that has no such endpoint."""
    try:
        return dict(get_json(f"{url}/version"))
    except (OSError, ValueError):
        return {}


def judge(entry: dict[str, Any], url: str, task: Task) -> bool:
    """Score a running server, print and record the result; True when it reaches the threshold.

    Raises:
        ValueError: the server runs with balanced routing.
    """
    refuse_balanced_routing(server_version(url).get("fake_eplb"), f"the server at {url}")
    accuracy = entry["accuracy"]
    model = get_json(f"{url}/v1/models")["data"][0]["id"]
    score = task(Client(url=url, model=model))
    passed = score.value >= accuracy["threshold"]
    print(
        f"{entry['name']}: {accuracy['task']} {score.value:.4f} of {score.count} ({score.detail}), "
        f"threshold {accuracy['threshold']}: {'passed' if passed else 'FAILED'}"
    )
    record = {
        "name": entry["name"],
        "task": accuracy["task"],
        "threshold": accuracy["threshold"],
        "value": score.value,
        "count": score.count,
        "detail": score.detail,
        "passed": passed,
    }
    path = ROOT / "logs" / f"accuracy-{entry['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return passed


def launch_and_judge(entry: dict[str, Any], task: Task) -> bool:
    """:func:`judge` a server launched for it."""
    server_args = ["--model", local_model(entry["path"]), *entry["args"]]
    log = ROOT / "logs" / f"accuracy-{entry['name']}.log"
    with start_openai_server(
        server_args, port=free_port(), log=log, env=server_environment(entry)
    ) as server:
        try:
            seconds = server.wait_until_healthy(HEALTH_TIMEOUT_S, Progress())
            print(f"{entry['name']}: healthy after {seconds:.1f} s", flush=True)
            print("\n".join(server.startup_lines()), flush=True)
            return judge(entry, server.url, task)
        except (ServerExited, TimeoutError, OSError):
            print("\n".join(server.log_lines()[-40:]), file=sys.stderr)
            print(f"accuracy.py: the server's whole log: {log}", file=sys.stderr)
            raise


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ``data`` falls back to ATOM_ACCURACY_DATA, where empty means unset."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="name of a catalog entry")
    parser.add_argument("--matrix", action="store_true", help="print the workflow's matrix")
    parser.add_argument("--catalog", type=Path, default=CATALOG)
    parser.add_argument("--url", help="a server that runs already, instead of launching one")
    parser.add_argument("--limit", type=int, help="ask at most so many GSM8K problems")
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("ATOM_ACCURACY_DATA") or None,
        help="GSM8K test set, JSON lines",
    )
    args = parser.parse_args(argv)
    if not args.matrix and args.name is None:
        parser.error("name a catalog entry, or ask for --matrix")
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit {args.limit} is not greater than zero")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the check; return the exit status."""
    args = parse_args(argv)
    catalog = read_catalog(args.catalog)
    if args.matrix:
        print(matrix(catalog.values()))
        return 0
    if args.name not in catalog:
        names = ", ".join(catalog)
        print(
            f"accuracy.py: {args.name!r} is not in the catalog: use one of {names}", file=sys.stderr
        )
        return 2
    entry = catalog[args.name]
    interrupt_on_signals()
    try:
        refuse_balanced_routing(os.environ.get("ATOM_FAKE_EPLB"), "the environment")
        refuse_balanced_routing(
            entry["env"].get("ATOM_FAKE_EPLB"), f"the catalog entry {args.name}"
        )
        task = TASKS[entry["accuracy"]["task"]](args)
        if args.url is not None:
            return 0 if judge(entry, args.url.rstrip("/"), task) else 1
        return 0 if launch_and_judge(entry, task) else 1
    except Skipped as reason:
        # A workflow shows the annotation beside the green check of a job that has checked nothing.
        annotation = "::warning::" if os.environ.get("GITHUB_ACTIONS") == "true" else ""
        print(f"{annotation}{entry['name']}: SKIPPED, {reason}")
        return 0
    except ServerExited as error:
        print(f"accuracy.py: {error}", file=sys.stderr)
        return 2 if error.status == 2 else 1
    except ValueError as error:
        print(f"accuracy.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"accuracy.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
