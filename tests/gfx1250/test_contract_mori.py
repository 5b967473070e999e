"""The contract with mori, checked against the published wheel: downloaded by name, read, never imported."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from atom.moe import mori_checks, mori_libs
from atom.moe.mori_arena import MORI_STAGING_LIMIT
from atom.moe.spec import ExpertRecipe, MoEGeometry
from atom.wire.format import SCALE_ALIGN, Wire, WireLayout, resolve_wire

KNOWN = "1.2.4"
TOO_OLD = "1.2.2"
"""The last release without scale rows."""
_HEADERS = "mori/_jit-sources"
_V2 = "ops/dispatch_combine_v2"


@dataclass(frozen=True)
class Wheel:
    """A published wheel, unpacked as far as it is text.

    Attributes:
        version: of the distribution. library: as the checks see an installed one.
        folder: where it is unpacked.
    """

    version: str
    library: mori_libs.Library
    folder: Path

    def text(self, path: str) -> str:
        """One of its files."""
        return (self.folder / path).read_text()


def _download(folder: Path, requirement: str) -> Path | str:
    """The wheel that the registry gives for the requirement, or why there is none."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(17, 45)] + [
        "manylinux2014_x86_64"
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        requirement,
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
    ]
    command += [
        "--python-version",
        "3.12",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--retries",
        "1",
    ]
    command += [part for platform in platforms for part in ("--platform", platform)]
    before = set(folder.glob("*.whl"))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "the registry did not answer in 120 s"
    if done.returncode:
        return (done.stderr or done.stdout).strip().splitlines()[-1]
    new = set(folder.glob("*.whl")) - before
    # A wheel that was there already is not downloaded again: the newest then is the highest version here.
    return max(new or before, key=_version)


def _version(wheel: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", wheel.name.split("-")[1]))


@pytest.fixture(scope="module", params=["newest", KNOWN])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return _wheel(request, tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def old_wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return _wheel(request, tmp_path_factory, TOO_OLD)


def _wheel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, version: str
) -> Wheel:
    folder = Path(request.config.cache.mkdir("amd-mori"))
    found: Path | str | None = next(folder.glob(f"amd_mori-{version}-*.whl"), None)
    if found is None:
        requirement = "amd-mori" if version == "newest" else f"amd-mori=={version}"
        found = _download(folder, requirement)
    if isinstance(found, str):
        pytest.skip(f"the amd-mori wheel cannot be had from the registry: {found}")
    target = tmp_path_factory.mktemp("mori")
    with zipfile.ZipFile(found) as archive:
        archive.extractall(
            target,
            [name for name in archive.namelist() if name.endswith((".py", ".hpp", "METADATA"))],
        )
    library = mori_libs.Library(
        name="mori", version=found.name.split("-")[1], folder=target / "mori"
    )
    return Wheel(found.name.split("-")[1], library, target)


@pytest.mark.parametrize(
    "name", [name for name in mori_libs.CONTRACT if name.library == "mori"], ids=str
)
def test_every_name_of_the_contract_is_in_the_wheel(wheel: Wheel, name: mori_libs.Name):
    assert wheel.library.source.lacks(name) is None, wheel.version


def test_a_name_that_is_gone_would_be_seen(wheel: Wheel):
    gone = mori_libs.Name(
        module="mori.cco.communicator",
        attribute="Communicator.init",
        parameters=("nranks", "per_rank_heap"),
        purpose="a parameter that never was",
    )
    assert (
        wheel.library.source.lacks(gone) == "mori.cco.communicator.Communicator.init(per_rank_heap)"
    )


def test_mori_cco_exports_the_communicator(wheel: Wheel):
    names = re.search(
        r"from \.communicator import \((.*?)\)", wheel.text("mori/cco/__init__.py"), re.DOTALL
    )
    assert names and "Communicator" in names[1]


def test_the_wheel_carries_scale_rows_at_the_pitch_that_the_wire_counts_with(wheel: Wheel):
    caps = mori_libs.capabilities(mori=wheel.library)
    assert caps.scale_rows
    source = wheel.text(f"mori/{_V2}/hip_backend.py")
    assert re.search(r"^_SCALE_ALIGN = (\d+)$", source, re.MULTILINE)[1] == str(SCALE_ALIGN)
    # The function is small and pure: its own text, run alone, must agree with the wire's layout.
    text = re.search(r"^def scale_stride_bytes.*?(?=^\S)", source, re.MULTILINE | re.DOTALL)[0]
    scope = {"_SCALE_ALIGN": SCALE_ALIGN}
    exec(text, scope)
    for hidden in (256, 2880, 4096, 7168, 8192):
        layout = WireLayout.of(Wire.FP4, hidden)
        assert scope["scale_stride_bytes"](layout.scale_bytes) == layout.scale_stride
    assert scope["scale_stride_bytes"](224) == 256


def test_the_plan_has_the_fields_that_aiter_fills(wheel: Wheel):
    header = wheel.text(f"{_HEADERS}/include/mori/{_V2}/ep_cfg.hpp")
    struct = re.search(r"struct EpCfg \{(.*?)^\};", header, re.MULTILINE | re.DOTALL)[1]
    for field in [
        "worldSize",
        "hiddenDim",
        "maxTokPerRank",
        "numExpertPerRank",
        "numExpertPerToken",
        "maxRecv",
        "useWeights",
        "scaleBytes",
        "blockNum",
        "warpPerBlock",
    ]:
        assert re.search(rf"\b{field}\b", struct), field


def test_the_limits_that_the_checks_state_are_mori_s(wheel: Wheel):
    header = wheel.text(f"{_HEADERS}/include/mori/{_V2}/ep_cfg.hpp")
    valid = re.search(r"constexpr bool EpCfgIsValid.*?^\}", header, re.MULTILINE | re.DOTALL)[0]
    assert "c.numExpertPerToken < c.waveSize" in valid
    assert "(c.scaleBytes % 4) == 0" in valid
    assert mori_checks.MAX_TOPK == 32, "the wave size of gfx1250"
    kernel = wheel.text(f"{_HEADERS}/src/{_V2}/ep_intranode_1250x.hpp")
    limit = re.search(r"kEpScaleSlots \* kEpScaleStride <= \(size_t\)1 << (\d+)", kernel)
    assert limit and 1 << int(limit[1]) == MORI_STAGING_LIMIT
    tokens = re.search(r"kCfg\.maxTokPerRank < \(1 << (\d+)\)", kernel)
    assert tokens and 1 << int(tokens[1]) == mori_checks.MORI_MAX_TOKENS


def test_the_last_release_without_scale_rows_is_known_for_it_and_refused(old_wheel: Wheel):
    caps = mori_libs.capabilities(mori=old_wheel.library)
    assert not caps.scale_rows and not old_wheel.library.lacks("always")
    geometry = MoEGeometry(
        hidden=7168, inter=3072, experts=384, topk=6, ep_size=4, ep_rank=0, max_tokens=1024
    )
    choice = resolve_wire({"MEGA_WIRE": "fp4"})
    caps = replace(
        caps,
        aiter=replace(caps.aiter, folder=old_wheel.folder),
        dispatch_wire=True,
        quantizing_backends=frozenset({"mori"}),
    )
    found = mori_checks.refusals(
        caps, geometry, ExpertRecipe(), choice, arch="gfx1250", environ={"MEGA_WIRE": "fp4"}
    )
    assert any("ROCm/mori#593" in message and TOO_OLD in message for message in found), found
