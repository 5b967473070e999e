"""The repository's own plumbing: workflows, model catalog and scripts do what they say, and refuse what they should."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from atom import envs
from atom.wire.format import check_wire, resolve_wire

ROOT = Path(__file__).resolve().parent.parent
CATALOG = ROOT / ".github" / "benchmark" / "models.json"
SCHEMA = ROOT / ".github" / "benchmark" / "models.schema.json"
WORKFLOWS = ROOT / ".github" / "workflows"
HIDDEN = {
    "tiny-moe": 256,
    "Qwen/Qwen3-30B-A3B": 2048,
    "deepseek-ai/DeepSeek-V4-Pro": 7168,
    "openai/gpt-oss-120b": 2880,
}
"""``hidden_size`` in each catalog model's config.json."""
SHELL_SCRIPTS = [".ci/run", "scripts/quickstart.sh", "scripts/setup_venv.sh", "scripts/test.sh"]


def run(
    *command: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a command with stdout and stderr captured together in ``stdout``; ``env`` goes on top of this one's."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def check_jsonschema(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the same checker as the pre-checkin workflow."""
    return run(sys.executable, "-m", "check_jsonschema", *args)


def load_workflow(name: str) -> dict[str, Any]:
    """A workflow as a mapping; YAML 1.1 reads its ``on`` key as True, hence the base loader."""
    return yaml.load((WORKFLOWS / name).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def steps(workflow: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All steps of all jobs."""
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


# ------------------------------------------------------------------------------------------- workflows


@pytest.mark.parametrize("name", ["pre-checkin.yml", "heavy-tests.yml"])
def test_workflow_follows_the_published_schema(name: str) -> None:
    result = check_jsonschema("--builtin-schema", "vendor.github-workflows", WORKFLOWS / name)
    assert result.returncode == 0, result.stdout


def _drop_runs_on(workflow: dict[str, Any]) -> None:
    del next(iter(workflow["jobs"].values()))["runs-on"]


def _misspell_event(workflow: dict[str, Any]) -> None:
    workflow["on"]["pull_requests"] = {}


def _misspell_permission(workflow: dict[str, Any]) -> None:
    workflow["permissions"]["contents"] = "reads"


@pytest.mark.parametrize("breakage", [_drop_runs_on, _misspell_event, _misspell_permission])
def test_broken_workflow_is_refused(tmp_path: Path, breakage: Callable[[Any], None]) -> None:
    workflow = load_workflow("heavy-tests.yml")
    breakage(workflow)
    broken = tmp_path / "broken.yml"
    broken.write_text(yaml.safe_dump(workflow), encoding="utf-8")
    result = check_jsonschema("--builtin-schema", "vendor.github-workflows", broken)
    assert result.returncode == 1, result.stdout


@pytest.mark.parametrize("name", ["pre-checkin.yml", "heavy-tests.yml"])
def test_workflow_gives_pull_requests_no_rights(name: str) -> None:
    workflow = load_workflow(name)
    text = (WORKFLOWS / name).read_text(encoding="utf-8")
    assert workflow["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in workflow["jobs"].values())
    # pull_request_target and workflow_run would run with the base repository's token and secrets.
    assert set(workflow["on"]) <= {"pull_request", "pull_request_review", "push"}
    assert "secrets." not in text
    checkouts = [step for step in steps(workflow) if "actions/checkout" in step.get("uses", "")]
    assert len(checkouts) == len(workflow["jobs"])
    assert all(step["with"]["persist-credentials"] == "false" for step in checkouts)
    # An expression inside a command would let a branch name or a label inject shell code.
    assert not [step["run"] for step in steps(workflow) if "${{" in step.get("run", "")]


def test_pre_checkin_runs_what_it_promises() -> None:
    workflow = load_workflow("pre-checkin.yml")
    assert set(workflow["on"]) == {"pull_request", "push"}
    assert workflow["on"]["push"]["branches"] == ["main"]
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    assert not [name for name, job in workflow["jobs"].items() if "if" in job]
    pip_cached = [
        s["with"]["cache"] for s in steps(workflow) if "setup-python" in s.get("uses", "")
    ]
    assert pip_cached == ["pip"] * len(workflow["jobs"])
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert 'scripts/test.sh -m "not gpu and not gfx1250"' in commands
    assert any(command.startswith("black --check ") for command in commands)
    assert any(command.startswith("ruff check ") for command in commands)


def test_pre_checkin_schema_commands_pass_here() -> None:
    commands = [
        shlex.split(step["run"])
        for step in load_workflow("pre-checkin.yml")["jobs"]["catalog"]["steps"]
        if step.get("run", "").startswith("check-jsonschema ")
    ]
    assert len(commands) == 3
    for _, *args in commands:
        result = check_jsonschema(*args)
        assert result.returncode == 0, result.stdout


# ------------------------------------------------------------------------------------ heavy-tests' gate


class _Text(str):
    """A string that compares as GitHub's expressions do: without regard to case."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.casefold() == other.casefold()

    __hash__ = str.__hash__


def evaluate(expression: str, github: Mapping[str, Any]) -> bool:
    """Evaluate the part of GitHub's expression language that the gate uses, by way of Python's own."""

    def lookup(path: str) -> Any:
        values: list[Any] = [github]
        spread = False
        for key in path.split(".")[1:]:
            if key == "*":
                values, spread = [item for value in values for item in value or []], True
            else:
                values = [(value or {}).get(key) for value in values]
        texts = [_Text(value) if isinstance(value, str) else value for value in values]
        return texts if spread else texts[0]

    def contains(where: Any, what: Any) -> bool:
        return where is not None and what is not None and any(item == what for item in where)

    token = re.compile(
        r"'(?P<text>[^']*)'|(?P<path>github(?:\.[\w*-]+)+)|(?P<operator>&&|\|\|)|\s+"
    )
    words = {"&&": " and ", "||": " or "}

    def translate(match: re.Match[str]) -> str:
        if match["text"] is not None:
            return f"text({match['text']!r})"
        if match["path"]:
            return f"lookup({match['path']!r})"
        return words[match["operator"]] if match["operator"] else " "

    names = {
        "text": _Text,
        "lookup": lookup,
        "contains": contains,
        "fromJSON": lambda text: [_Text(item) for item in json.loads(text)],
    }
    return bool(eval(token.sub(translate, expression).strip(), {"__builtins__": {}}, names))


def review(state: str, association: str, labels: tuple[str, ...] = ()) -> dict[str, Any]:
    """A pull_request_review event."""
    return {
        "event_name": "pull_request_review",
        "repository": "org/atom",
        "event": {
            "action": "submitted",
            "review": {"state": state, "author_association": association},
            "pull_request": pull_request(labels),
        },
    }


def pull_request(labels: tuple[str, ...], head: str = "org/atom") -> dict[str, Any]:
    """The pull request of an event."""
    return {"labels": [{"name": name} for name in labels], "head": {"repo": {"full_name": head}}}


def pushed(labels: tuple[str, ...], head: str = "org/atom") -> dict[str, Any]:
    """A pull_request event after a push to its branch."""
    return {
        "event_name": "pull_request",
        "repository": "org/atom",
        "event": {"action": "synchronize", "pull_request": pull_request(labels, head)},
    }


def labeled(label: str, labels: tuple[str, ...] = (), head: str = "org/atom") -> dict[str, Any]:
    """A pull_request event after a label was added."""
    event = pushed((*labels, label), head)
    event["event"] |= {"action": "labeled", "label": {"name": label}}
    return event


@pytest.mark.parametrize(
    ("event", "runs"),
    [
        (review("approved", "MEMBER"), True),
        (review("approved", "OWNER"), True),
        (review("approved", "COLLABORATOR"), True),
        (review("approved", "CONTRIBUTOR"), False),
        (review("approved", "NONE"), False),
        (review("commented", "OWNER"), False),
        (review("changes_requested", "OWNER"), False),
        (review("commented", "OWNER", ("ci:full",)), False),
        (labeled("ci:full"), True),
        (labeled("ci:atom"), True),
        (labeled("ci:atom", head="stranger/atom"), True),
        (labeled("documentation"), False),
        (labeled("documentation", ("ci:full",)), False),
        (labeled("ci:fuller"), False),
        (pushed(("ci:full",)), True),
        (pushed(("bug", "ci:atom")), True),
        (pushed(()), False),
        (pushed(("documentation",)), False),
        (pushed(("ci:full",), head="stranger/atom"), False),
    ],
)
def test_heavy_tests_run_on_approval_or_label_only(event: dict[str, Any], runs: bool) -> None:
    gate = load_workflow("heavy-tests.yml")["jobs"]["catalog"]["if"]
    assert evaluate(gate, event) is runs


def test_every_heavy_job_stands_behind_the_gate() -> None:
    workflow = load_workflow("heavy-tests.yml")
    assert workflow["on"]["pull_request_review"]["types"] == ["submitted"]
    assert {"labeled", "synchronize"} <= set(workflow["on"]["pull_request"]["types"])
    # At workflow level, an event that runs nothing would cancel a run in progress.
    assert "concurrency" not in workflow
    jobs = workflow["jobs"]
    assert set(jobs) == {"catalog", "accuracy", "gpu", "gfx1250"}
    for name in set(jobs) - {"catalog"}:
        # An `if` of its own, with always() say, could get past the skipped gate.
        assert jobs[name]["needs"] == "catalog" and "if" not in jobs[name]
        assert "concurrency" in jobs[name]
    assert jobs["gpu"]["steps"][-1]["run"].endswith("pytest -m gpu")
    assert jobs["gfx1250"]["steps"][-1]["run"].endswith("pytest -m gfx1250")
    assert jobs["gfx1250"]["env"]["MEGA_WIRE"] == "fp4"


def test_heavy_matrix_is_the_catalog() -> None:
    jobs = load_workflow("heavy-tests.yml")["jobs"]
    (command,) = [step["run"] for step in jobs["catalog"]["steps"] if step.get("id") == "read"]
    assert command == 'echo "models=$(python scripts/accuracy.py --matrix)" >> "$GITHUB_OUTPUT"'
    # -S -E: a bare interpreter, as in the workflow, where nothing is installed.
    result = run(sys.executable, "-S", "-E", ROOT / "scripts" / "accuracy.py", "--matrix")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("\n") == 1, "a workflow's output is one line"
    models = json.loads(result.stdout)
    catalog = json.loads(CATALOG.read_text(encoding="utf-8"))["models"]
    assert [m["name"] for m in models] == [m["name"] for m in catalog]
    used = set(re.findall(r"matrix\.model\.(\w+)", json.dumps(jobs["accuracy"])))
    assert used == set(models[0])


# --------------------------------------------------------------------------------------------- catalog


def _edit(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one field of the first entry, named by dots; ``...`` removes it."""

    def apply(catalog: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target = catalog["models"][0]
        for key in parents:
            target = target[key]
        if value is ...:
            del target[last]
        else:
            target[last] = value

    return apply


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_edit("accuracy", ...), "accuracy"),
        (_edit("accuracy.threshold", 1.5), "threshold"),
        (_edit("accuracy.threshold", "0.5"), "threshold"),
        (_edit("accuracy.task", "vibes"), "task"),
        (_edit("env.MEGA_WIRE", "int8"), "MEGA_WIRE"),
        (_edit("env", {}), "MEGA_WIRE"),
        (_edit("env", {"MEGA_WIRE": "fp8"}), "AITER_FORCE_A8W4"),
        (_edit("env", {"MEGA_WIRE": "fp4", "AITER_FORCE_A8W4": "1"}), "AITER_FORCE_A8W4"),
        (_edit("env.LD_PRELOAD", "evil.so"), "LD_PRELOAD"),
        (_edit("args", ["--port", "80"]), "args"),
        (_edit("runner", ["ubuntu-latest"]), "runner"),
        (_edit("name", "Tiny MoE; rm"), "name"),
        (_edit("comment", "hello"), "comment"),
    ],
)
def test_broken_catalog_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    catalog = copy.deepcopy(json.loads(CATALOG.read_text(encoding="utf-8")))
    change(catalog)
    broken = tmp_path / "models.json"
    broken.write_text(json.dumps(catalog), encoding="utf-8")
    result = check_jsonschema("--schemafile", SCHEMA, broken)
    assert result.returncode == 1, result.stdout
    assert named in result.stdout


def test_catalog_agrees_with_the_code() -> None:
    models = json.loads(CATALOG.read_text(encoding="utf-8"))["models"]
    names = [model["name"] for model in models]
    assert len(set(names)) == len(names)
    for model in models:
        assert set(model["env"]) <= set(envs.TABLE), model["name"]
        hidden = HIDDEN[model["path"]]
        layout = check_wire(resolve_wire(model["env"]), hidden)
        if model["hardware"] == "gfx1250" and layout.wire.quantizing:
            assert hidden % 128 == 0, f"mori refuses the scale rows of {model['name']}"
    wires = {m["env"]["MEGA_WIRE"] for m in models if m["path"] == "tiny-moe"}
    assert wires == {"bf16", "fp8", "fp4"}
    heldout = sorted((CATALOG.parent / "heldout").glob("*.py"))
    assert heldout
    for path in heldout:
        ast.parse(path.read_text(encoding="utf-8"))


# --------------------------------------------------------------------------------------------- scripts


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_shell_script_is_executable_and_parses(name: str) -> None:
    assert (ROOT / name).stat().st_mode & stat.S_IXUSR
    result = run("bash", "-n", name)
    assert result.returncode == 0 and not result.stdout, result.stdout


def test_ci_calls_the_test_script() -> None:
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a package, one test and the scripts, in a folder with a space in its path."""
    place = tmp_path_factory.mktemp("set-up") / "a copy of it"
    for name in ("pyproject.toml", "README.md", "LICENSE", "atom/__init__.py", *SHELL_SCRIPTS):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    (place / "tests").mkdir()
    (place / "tests" / "test_copy.py").write_text(COPY_TEST, encoding="utf-8")
    return place


COPY_TEST = '''"""What a test of a copied checkout sees."""

import os
from pathlib import Path

import atom


def test_copy() -> None:
    assert Path(atom.__file__).parent.parent == Path(__file__).parent.parent
    assert not {"MEGA_WIRE", "AITER_FORCE_A8W4", "ATOM_MAX_QUEUE", "RANK"} & set(os.environ)
'''


def set_up_environment(**changes: str) -> dict[str, str]:
    """Variables under which a set-up takes what this environment has: its packages come through PYTHONPATH, pip
    finds every requirement satisfied, and nothing is downloaded."""
    env = {"PYTHON": sys.executable, "PYTHONPATH": str(Path(pytest.__file__).parent.parent)}
    return {**env, "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", **changes}


def python_of(result: subprocess.CompletedProcess[str]) -> str:
    """The python that setup_venv.sh printed last."""
    assert result.returncode == 0, result.stdout
    return result.stdout.splitlines()[-1]


def test_set_up_in_a_path_with_a_space(checkout: Path) -> None:
    env = set_up_environment()
    first = run(checkout / "scripts" / "setup_venv.sh", cwd=checkout.parent, env=env)
    assert python_of(first) == str(checkout / ".venv" / "bin" / "python")
    installs = re.findall(r"^(?:Making|Installing) .*", first.stdout, re.MULTILINE)
    assert [line.split()[:2] for line in installs[:3]] == [
        ["Making", "a"],
        ["Installing", "torch==2.13.0"],
        ["Installing", "atom"],
    ]

    # The second time nothing is installed, and the only line is the python's path.
    second = run(checkout / "scripts" / "setup_venv.sh", cwd=checkout.parent, env=env)
    assert second.stdout == python_of(first) + "\n"


def test_test_script_passes_on_what_it_found(checkout: Path) -> None:
    env = set_up_environment(MEGA_WIRE="fp8", AITER_FORCE_A8W4="", ATOM_MAX_QUEUE="1", RANK="3")
    good = run(checkout / ".ci" / "run", "-k", "copy", cwd=checkout.parent, env=env)
    assert good.returncode == 0, good.stdout
    assert re.search(r"^1 passed in ", good.stdout.splitlines()[-1]), good.stdout

    none = run(checkout / "scripts" / "test.sh", "-k", "nothing_is_called_so", env=env)
    assert none.returncode == 5, none.stdout  # pytest's status for no test collected

    unformatted = checkout / "tests" / "unformatted.py"
    unformatted.write_text("x = {  'a':1 }\n", encoding="utf-8")
    try:
        bad = run(checkout / "scripts" / "test.sh", env=env)
    finally:
        unformatted.unlink()
    assert bad.returncode == 1, bad.stdout
    assert "1 passed in " in bad.stdout and "would reformat" in bad.stdout


def test_failed_set_up_is_tried_again(checkout: Path) -> None:
    setup = checkout / "scripts" / "setup_venv.sh"
    for _ in range(2):
        failed = run(setup, env=set_up_environment(ATOM_TORCH="torch==0.0.7"))
        assert failed.returncode != 0
        assert "Installing torch==0.0.7\n" in failed.stdout and "torch==0.0.7" in failed.stdout


def test_set_up_names_a_python_that_will_not_do(tmp_path: Path) -> None:
    setup = ROOT / "scripts" / "setup_venv.sh"
    env = {"ATOM_VENV": str(tmp_path / "venv")}
    missing = run(setup, env={**env, "PYTHON": "/no/such/python"})
    assert missing.returncode == 1
    assert "PYTHON=/no/such/python does not run" in missing.stdout

    # This interpreter under a version that it does not have: old ones are rare on machines that run this test.
    old = tmp_path / "old python"
    pretend = "import sys; sys.version_info = (3, 9, 1); exec(sys.argv[2])"
    old.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{pretend}" "$@"\n', encoding="utf-8"
    )
    old.chmod(0o755)
    result = run(setup, env={**env, "PYTHON": str(old)})
    assert result.returncode == 1
    assert "is Python 3.9, but 3.11 or later is needed" in result.stdout
    assert not (tmp_path / "venv").exists()


def test_set_up_leaves_a_folder_alone_that_is_no_environment(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine", encoding="utf-8")
    result = run(ROOT / "scripts" / "setup_venv.sh", env={"ATOM_VENV": str(tmp_path)})
    assert result.returncode == 1
    assert f"{tmp_path} exists and is not a virtual environment" in result.stdout
    assert precious.read_text(encoding="utf-8") == "mine"
