"""The set-up and test scripts: right in a path with a space, quick the second time, and readable when they refuse."""

from __future__ import annotations

import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.commands import ROOT, run

SHELL_SCRIPTS = [".ci/run", "scripts/quickstart.sh", "scripts/setup_venv.sh", "scripts/test.sh"]


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
    return check_out(tmp_path_factory.mktemp("set-up") / "a copy of it")


def check_out(place: Path) -> Path:
    """Put into ``place`` what a set-up needs of a checkout."""
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


def test_an_environment_serves_one_checkout(checkout: Path, tmp_path: Path) -> None:
    env = set_up_environment()
    python = python_of(run(checkout / "scripts" / "setup_venv.sh", env=env))
    other = check_out(tmp_path / "another copy")
    shared = {**env, "ATOM_VENV": str(checkout / ".venv")}
    refused = run(other / "scripts" / "setup_venv.sh", env=shared)
    assert refused.returncode == 1
    assert "Installing" not in refused.stdout
    for said in (f"{checkout}/.venv runs the checkout {checkout}", str(other), "unset ATOM_VENV"):
        assert said in refused.stdout
    # The first checkout's environment is as it was: nothing is installed again.
    assert run(checkout / "scripts" / "setup_venv.sh", env=env).stdout == python + "\n"


def test_a_copied_or_moved_checkout_may_set_up_again(checkout: Path, tmp_path: Path) -> None:
    env = set_up_environment()
    python_of(run(checkout / "scripts" / "setup_venv.sh", env=env))
    # How far a set-up comes shows in what it installs first.
    env["ATOM_TORCH"] = "torch==0.0.7"
    copied = shutil.copytree(checkout, tmp_path / "copied", symlinks=True)
    assert "Installing torch==0.0.7\n" in run(copied / "scripts" / "setup_venv.sh", env=env).stdout

    moved = check_out(tmp_path / "moved")
    env["ATOM_VENV"] = str(copied / ".venv")
    refused = run(moved / "scripts" / "setup_venv.sh", env=env)
    assert f"runs the checkout {checkout}," in refused.stdout
    gone = checkout.rename(tmp_path / "gone")
    try:
        result = run(moved / "scripts" / "setup_venv.sh", env=env)
    finally:
        gone.rename(checkout)
    assert "Installing torch==0.0.7\n" in result.stdout


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
