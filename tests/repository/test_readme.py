"""The README names every flag and every variable, and every path in it exists."""

from __future__ import annotations

import re
from pathlib import Path

from atom import envs
from atom.entrypoints.openai.args import _parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_variable_is_explained_as_the_table_has_it():
    block = re.search(r"<!-- variables -->(.*?)<!-- /variables -->", README, re.S)[1]
    rows = [line.strip("| ").split(" | ") for line in block.strip().splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == list(envs.TABLE)
    for name, default, allowed, meaning in rows:
        variable = envs.TABLE[name.strip("`")]
        assert (allowed, meaning) == (variable.allowed, variable.meaning)
        if variable.default is None:
            assert default == "unset"
        elif variable.default is False:
            assert default == "0"
        else:
            assert variable.parse(default) == variable.default


def test_every_flag_is_explained():
    flags = {
        option
        for action in _parser()._actions
        for option in action.option_strings
        if option not in ("-h", "--help", "--version")
    }
    missing = {flag for flag in flags if f"`{flag}`" not in README and f"{flag} " not in README}
    assert not missing


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
