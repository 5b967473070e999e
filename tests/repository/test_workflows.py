"""The workflows follow the published schema, give away no rights, and run when they should and only then."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repository.commands import CATALOG, ROOT, WORKFLOWS, check_jsonschema, run


def load_workflow(name: str) -> dict[str, Any]:
    """A workflow as a mapping; YAML 1.1 reads its ``on`` key as True, hence the base loader."""
    return yaml.load((WORKFLOWS / name).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def steps(workflow: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All steps of all jobs."""
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


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
