"""What the installed aiter and mori offer: every name that the gfx1250 backend uses, in one table, and whether it is there.

The packages' sources are read, never imported: a launch can be judged on a machine without a GPU, nothing is compiled,
and a capability is what a signature says, not what a version number suggests.

Sources of the names: ``aiter/ops/flydsl/kernels/mega_moe_gfx1250/mega_moe.py``, ``aiter/ops/shuffle.py``,
``aiter/fused_moe.py`` of ROCm/aiter; ``python/mori/cco/communicator.py`` and
``python/mori/ops/dispatch_combine_v2/hip_backend.py`` of ROCm/mori.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

AITER_WIRE = "ROCm/aiter#4984"
"""The change from which MegaMoEGfx1250 knows ``dispatch_wire``."""

MORI_SCALE_ROWS = "ROCm/mori#593"
"""The change from which mori's dispatch carries a scale row with each token."""

MEGA_MODULE = "aiter.ops.flydsl.kernels.mega_moe_gfx1250"
"""Where aiter exposes MegaMoEGfx1250, lazily."""


@dataclass(frozen=True, kw_only=True)
class Name:
    """One name that the backend uses.

    Attributes:
        module: module that defines it (a package may re-export it).
        attribute: class, function, or ``Class.method``.
        parameters: parameters that the backend passes by name, or class members that it reads.
        when: ``always``; ``mori``: only with mori's dispatch kernel; ``scales``: only with it on an fp8 or fp4 wire;
            ``offered``: used where present.
        purpose: what for, in a few words.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...] = ()
    when: str = "always"
    purpose: str

    @property
    def library(self) -> str:
        """``aiter`` or ``mori``."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


CONSTRUCTOR = [
    "communicator",
    "rank",
    "world_size",
    "model_dim",
    "inter_dim",
    "experts",
    "topk",
    "max_tokens_per_rank",
    "activation",
    "gate_mode",
    "quant_type",
    "hidden_pad",
    "intermediate_pad",
    "swiglu_limit",
    "dispatch_backend",
]
"""Keywords of MegaMoEGfx1250 that every version has."""

CALL = [
    "hidden_states",
    "topk_weights",
    "topk_ids",
    "w1",
    "w2",
    "w1_scale",
    "w2_scale",
    "bias1",
    "bias2",
    "recv_token_bound",
]
"""Arguments of a call that the backend passes."""

CONTRACT: tuple[Name, ...] = (
    Name(
        module=f"{MEGA_MODULE}.mega_moe",
        attribute="MegaMoEGfx1250.__init__",
        parameters=tuple(CONSTRUCTOR),
        purpose="the layer: dispatch, expert GEMM, combine",
    ),
    Name(
        module=f"{MEGA_MODULE}.mega_moe",
        attribute="MegaMoEGfx1250.forward",
        parameters=tuple(CALL),
        purpose="one call of it",
    ),
    Name(
        module=f"{MEGA_MODULE}.mega_moe",
        attribute="MegaMoEGfx1250.close",
        purpose="frees its arena",
    ),
    Name(
        module="aiter.ops.enum",
        attribute="ActivationType",
        parameters=("Silu", "Swiglu"),
        purpose="activation between the two GEMMs",
    ),
    Name(
        module="aiter.ops.enum",
        attribute="QuantType",
        parameters=("per_1x32",),
        purpose="scale granularity",
    ),
    Name(
        module="aiter.ops.flydsl.moe_common",
        attribute="GateMode",
        parameters=("INTERLEAVE",),
        purpose="order of the gate and up rows",
    ),
    Name(
        module="aiter.ops.shuffle",
        attribute="shuffle_weight",
        parameters=("layout",),
        purpose="16x16 preshuffle of weights",
    ),
    Name(
        module="aiter.ops.shuffle",
        attribute="moe_shuffle_scale",
        parameters=("experts_cnt", "is_guinterleave", "gate_up"),
        purpose="shuffle of weight scales",
    ),
    Name(
        module="aiter.fused_moe",
        attribute="resolve_activation_dtype",
        parameters=("activation", "gate_mode", "M"),
        when="offered",
        purpose="aiter's own answer for the A operand",
    ),
    Name(
        module="mori.cco.communicator",
        attribute="Communicator.get_unique_id",
        purpose="rendezvous token",
    ),
    Name(
        module="mori.cco.communicator",
        attribute="Communicator.init",
        parameters=("nranks", "rank", "unique_id", "per_rank_vmm"),
        purpose="communicator with symmetric memory",
    ),
    Name(
        module="mori.cco.communicator",
        attribute="Communicator.barrier",
        purpose="all are connected",
    ),
    Name(module="mori.cco.communicator", attribute="Communicator.destroy", purpose="frees it"),
    Name(
        module="mori.ops.dispatch_combine_v2.ep_plans",
        attribute="EpDispatchPlan",
        when="mori",
        purpose="mori's dispatch kernel",
    ),
    Name(
        module="mori.ops.dispatch_combine_v2.hip_backend",
        attribute="scale_stride_bytes",
        parameters=("scale_bytes",),
        when="scales",
        purpose=f"mark of per-token scale rows ({MORI_SCALE_ROWS})",
    ),
)


class Source:
    """A Python package's sources on disk, asked for names and signatures without importing it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Syntax tree of a module of the package, given by its dotted name; None when there is no such file."""
        if module not in self._trees:
            parts = module.split(".")[1:]
            base = self._folder.joinpath(*parts)
            files = (
                (base.with_suffix(".py"), base / "__init__.py")
                if parts
                else (base / "__init__.py",)
            )
            found = next((file for file in files if file.is_file()), None)
            self._trees[module] = None if found is None else _parse(found, found.stat().st_mtime_ns)
        return self._trees[module]

    def find(self, module: str, attribute: str) -> ast.AST | None:
        """The definition of ``attribute`` (``name`` or ``Class.name``) in ``module``, or None."""
        node: ast.AST | None = self.tree(module)
        for part in attribute.split("."):
            node = None if node is None else _definition(node, part)
        return node

    def lacks(self, name: Name) -> str | None:
        """What is missing of ``name``: itself, or some of its parameters; None when all is there."""
        node = self.find(name.module, name.attribute)
        if node is None:
            return str(name)
        has = parameters(node)
        missing = [] if has is None else [p for p in name.parameters if p not in has]
        return f"{name}({', '.join(missing)})" if missing else None


@lru_cache(maxsize=64)
def _parse(file: Path, changed_ns: int) -> ast.Module:
    """A file's syntax tree; ``changed_ns`` is its modification time, so that a changed file is parsed again."""
    return ast.parse(file.read_bytes(), str(file))


def _definition(node: ast.AST, name: str) -> ast.AST | None:
    """A class, function or assigned name directly inside ``node``; ``try`` and ``if`` blocks count as inside."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name == name:
                return child
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            if name in _targets(child):
                return child
        elif isinstance(child, ast.If | ast.Try) and (found := _definition(child, name)):
            return found
    return None


def _targets(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return (target.id for target in targets if isinstance(target, ast.Name))


def parameters(node: ast.AST) -> tuple[str, ...] | None:
    """Parameter names of a function, or member names of a class; None for an assigned name, whose inside is unknown."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        args = node.args
        return tuple(arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))
    if isinstance(node, ast.ClassDef):
        members: list[str] = []
        for child in node.body:
            if isinstance(child, ast.Assign | ast.AnnAssign):
                members += _targets(child)
            elif isinstance(child, ast.FunctionDef | ast.ClassDef):
                members.append(child.name)
        return tuple(members)
    return None


@dataclass(frozen=True, kw_only=True)
class Library:
    """One of the two libraries, as installed.

    Attributes:
        name: ``aiter`` or ``mori``.
        version: of its distribution; None when that is unknown.
        folder: its package's folder; None when it is not installed.
    """

    name: str
    version: str | None = None
    folder: Path | None = None

    @property
    def installed(self) -> bool:
        """Whether Python finds the package."""
        return self.folder is not None

    @cached_property
    def source(self) -> Source | None:
        """Its sources; None when it is not installed."""
        return None if self.folder is None else Source(self.folder)

    def lacks(self, when: str) -> list[str]:
        """Names of the contract, among those needed ``when``, that it does not have."""
        names = [name for name in CONTRACT if name.library == self.name and name.when == when]
        if self.source is None:
            return [str(name) for name in names]
        return [missing for name in names if (missing := self.source.lacks(name))]


def find_library(name: str) -> Library:
    """An installed library by its package name, found without running a line of it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return Library(name=name)
    folder = Path(next(iter(spec.submodule_search_locations)))
    return Library(name=name, version=_version(name, folder), folder=folder)


def _version(name: str, folder: Path) -> str | None:
    for distribution in (f"amd-{name}", name):
        try:
            found = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        # Other projects use these names too: believe only the one that this folder belongs to.
        if Path(str(found.locate_file(folder.name))).resolve() == folder.resolve():
            return found.version
    return None


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the installed pair can do.

    Attributes:
        aiter: the library of the layer. mori: the library of the dispatch.
        dispatch_wire: MegaMoEGfx1250 takes ``dispatch_wire`` (ROCm/aiter#4984).
        stage1_fused: it takes ``stage1_fused``. combine_quant: it takes ``combine_quant``.
        quantizing_backends: dispatch backends over which that aiter lets a quantizing wire run.
        resolve_activation_dtype: aiter answers for the A operand itself (ROCm/aiter#5221).
        scale_rows: mori's dispatch carries per-token scale rows (ROCm/mori#593).
    """

    aiter: Library
    mori: Library
    dispatch_wire: bool
    stage1_fused: bool
    combine_quant: bool
    quantizing_backends: frozenset[str] = field(default_factory=frozenset)
    resolve_activation_dtype: bool
    scale_rows: bool

    def flags(self) -> dict[str, bool]:
        """The capabilities by name, for tables."""
        return {
            "dispatch_wire": self.dispatch_wire,
            "scale_rows": self.scale_rows,
            "resolve_activation_dtype": self.resolve_activation_dtype,
            "stage1_fused": self.stage1_fused,
            "combine_quant": self.combine_quant,
        }


def capabilities(aiter: Library | None = None, mori: Library | None = None) -> Capabilities:
    """Read the sources of both libraries.

    Args:
        aiter: a library found elsewhere, instead of the installed one. mori: likewise.
    """
    aiter = aiter or find_library("aiter")
    mori = mori or find_library("mori")
    keywords = _constructor_keywords(aiter)
    return Capabilities(
        aiter=aiter,
        mori=mori,
        dispatch_wire="dispatch_wire" in keywords,
        stage1_fused="stage1_fused" in keywords,
        combine_quant="combine_quant" in keywords,
        quantizing_backends=(
            _quantizing_backends(aiter) if "dispatch_wire" in keywords else frozenset()
        ),
        resolve_activation_dtype=aiter.installed and not aiter.lacks("offered"),
        scale_rows=mori.installed and not mori.lacks("scales"),
    )


def _constructor_keywords(aiter: Library) -> tuple[str, ...]:
    if aiter.source is None:
        return ()
    node = aiter.source.find(f"{MEGA_MODULE}.mega_moe", "MegaMoEGfx1250.__init__")
    return (parameters(node) or ()) if node is not None else ()


def _quantizing_backends(aiter: Library) -> frozenset[str]:
    """The backend names in aiter's own guard of a quantizing wire.

    Its config class refuses ``dispatch_wire`` with other backends in an ``if`` whose test compares
    ``dispatch_backend``: with ``"mori"`` alone at first, with a pair of names later.
    """
    assert aiter.source is not None
    tree = aiter.source.tree(f"{MEGA_MODULE}.mega_moe")
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.If):
            continue
        mentioned = {n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)}
        if {"is_quant_dispatch_wire", "dispatch_backend"} <= mentioned:
            return frozenset(
                n.value
                for n in ast.walk(node.test)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            )
    return frozenset({"mori"})
