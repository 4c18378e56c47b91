"""Every promise of sparse latent attention: a judgement of kernels on inputs drawn from a seed.

A judgement takes the ``attention`` module of a package of kernels, the device and a seed, and raises
FalsifiedError. ``PROPERTIES`` are the same judgements as properties of the suite.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyscale_verify.attention.bounds import values_and_bounds
from hyscale_verify.attention.cases import KINDS, AttentionCase, draw_case
from hyscale_verify.cases import DTYPES
from hyscale_verify.errors import FalsifiedError
from hyscale_verify.properties.base import Property, Trial

Judgement = Callable[[Any, str, int], None]

WAYS = ("atomic", "fixed_point")
# Operands, heads and elements beyond the value that a GPU is tried on: each is a set of kernels to compile.
LARGE = (("fp16", 16, 0), ("bf16", 64, 64), ("bf16", 64, 64), ("bf16", 128, 64))
ROW_PARTS = ("out", "log_sum_exp", "mass", "q")


def small_plan(attention: Any, case: AttentionCase, device: str, rows: int = 2) -> Any:
    """A plan of small tiles and short chunks, so that small cases take several of each."""
    default = attention.AttentionPlan.default(case.q.shape[1], device)
    return replace(default, rows=rows) if device == "cuda" else replace(default, heads=16, rows=rows)


def run(attention: Any, case: AttentionCase, device: str, dkv: str, plan: Any) -> dict[str, torch.Tensor]:
    """out, log_sum_exp, mass and the gradients of q, latent and (with one) sink, on the host, as computed."""
    given = case.tensors(device)
    q, latent, indices, grad = (given[name] for name in ("q", "latent", "indices", "grad"))
    assert q is not None
    assert latent is not None
    assert grad is not None
    sink = given["sink"]
    leaves = [each.requires_grad_() for each in (q, latent, sink) if each is not None]
    with np.errstate(over="ignore", invalid="ignore"):  # of a judged kernel's own, under the interpreter
        result = attention.sparse_mla(
            q, latent, indices, scale=case.scale, value_dim=case.value_dim, sink=sink, dkv=dkv, plan=plan
        )
        mass = attention.attention_mass(
            q, latent, indices, result.log_sum_exp, scale=case.scale, sink=sink, plan=plan
        )
        gradients = torch.autograd.grad(result.out, leaves, grad)
    found = {"out": result.out.detach(), "log_sum_exp": result.log_sum_exp, "mass": mass}
    found |= dict(zip(("q", "latent", "sink"), gradients, strict=False))
    return {name: each.cpu() for name, each in found.items()}


def attention_within_bounds(attention: Any, device: str, seed: int) -> None:
    """out, log-sum-exp, mass and every gradient lie within rigorous bounds of float64, by both ways."""
    case, generator = _drawn(device, seed, *KINDS, "normal", "peaked")
    plan = small_plan(attention, case, device)
    way = str(generator.choice(WAYS))
    found = run(attention, case, device, way, plan)
    wanted, allowed = values_and_bounds(case, fixed_point=way == "fixed_point", heads=plan.heads)
    for name, got in found.items():
        _within(f"{name} ({way})", got.double().numpy(), getattr(wanted, name), getattr(allowed, name), case)


def exact_attention_is_exact(attention: Any, device: str, seed: int) -> None:
    """Exact inputs give out bit for bit; with one key a row, the gradients of q and of the keys as well."""
    case, generator = _drawn(device, seed, "exact", "single")
    way = str(generator.choice(WAYS))
    found = run(attention, case, device, way, small_plan(attention, case, device))
    wanted, _ = values_and_bounds(case, fixed_point=False)
    single = bool(((case.indices >= 0).sum(axis=1) <= 1).all())
    for name in ("out", "q", "latent") if single else ("out",):
        exact = torch.from_numpy(getattr(wanted, name)).to(DTYPES[case.dtype])
        _same(f"{name} ({way})", found[name], exact, case)


def unused_places_and_keys_do_not_matter(attention: Any, device: str, seed: int) -> None:
    """Any negative index is unused, and NaN in a key that no row selects reaches nothing."""
    case, _ = _drawn(device, seed, "normal", "deep")
    plan = small_plan(attention, case, device)
    first = run(attention, case, device, "fixed_point", plan)
    latent = case.latent.copy()
    latent[np.setdiff1d(np.arange(len(latent)), case.indices)] = np.nan
    indices = np.where(case.indices < 0, -1, case.indices).astype(np.int32)
    other = replace(case, indices=indices, latent=latent)
    for name, got in run(attention, other, device, "fixed_point", plan).items():
        _same(name, got, first[name], case)


def attention_rows_are_independent(attention: Any, device: str, seed: int) -> None:
    """Rows alone, or in another order, have the results that they have in the whole, bit for bit."""
    case, generator = _drawn(device, seed, "normal", "peaked")
    T = len(case.q)
    rows = generator.permutation(T)[: 1 + int(generator.integers(T))]
    whole = run(attention, case, device, "atomic", small_plan(attention, case, device))
    part = run(attention, case.rows(rows), device, "atomic", small_plan(attention, case, device, rows=1))
    for name in ROW_PARTS:
        _same(name, part[name], whole[name][torch.from_numpy(rows)], case)


def fixed_point_keys_do_not_depend_on_order(attention: Any, device: str, seed: int) -> None:
    """Fixed-point gradients of the keys are the same in every bit for permuted rows and other chunks."""
    case, generator = _drawn(device, seed, "normal", "peaked")
    # Two numbers add up the same either way: it takes several rows that share their keys.
    case = case.rows(np.resize(np.arange(len(case.q)), 6))
    plan = small_plan(attention, case, device, rows=4)
    first = run(attention, case, device, "fixed_point", plan)["latent"]
    moved = case.rows(generator.permutation(len(case.q)))
    other = small_plan(attention, case, device, rows=1)
    _same("latent", run(attention, moved, device, "fixed_point", other)["latent"], first, case)


def _drawn(device: str, seed: int, *kinds: str) -> tuple[AttentionCase, np.random.Generator]:
    """A case of one of ``kinds``, and a generator for further choices."""
    generator = np.random.default_rng(seed)
    kind = str(generator.choice(kinds))
    if device != "cuda":
        return draw_case(seed, kind, "fp32"), generator
    dtype, heads, rest = LARGE[int(generator.integers(len(LARGE)))]
    return draw_case(seed, kind, dtype, (heads, rest)), generator


def _within(
    name: str, got: NDArray[Any], wanted: NDArray[Any], allowed: NDArray[Any], case: AttentionCase
) -> None:
    error = np.abs(np.subtract(got, wanted, where=got != wanted, out=np.zeros(got.shape)))  # -inf is -inf
    if not (error <= allowed).all():
        place = tuple(int(each) for each in np.argwhere(~(error <= allowed))[0])
        raise FalsifiedError(
            f"{name}{list(place)} is {got[place]:.9g}, in float64 {wanted[place]:.9g}: off by "
            f"{error[place]:.3g}, allowed {allowed[place]:.3g}; {case}"
        )


def _same(name: str, got: torch.Tensor, wanted: torch.Tensor, case: AttentionCase) -> None:
    """FalsifiedError unless the tensors are equal; -0 equals 0, NaN nothing."""
    if got.shape != wanted.shape:
        raise FalsifiedError(f"{name} has shape {list(got.shape)}, not {list(wanted.shape)}; {case}")
    if not torch.equal(got, wanted):
        place = tuple(int(each) for each in (got != wanted).nonzero()[0])
        raise FalsifiedError(
            f"{name}{list(place)} is {float(got[place])}, not {float(wanted[place])}; {case}"
        )


def _property(judge: Judgement) -> Property:
    @functools.wraps(judge)
    def judged(trial: Trial) -> None:
        seed = trial.draw(st.integers(0, 2**32 - 1), "seed of the attention")
        judge(importlib.import_module(f"{trial.hytopk.package}.attention"), trial.device, seed)

    return Property(
        judge.__name__,
        "attention",
        ("tie_rich",),  # attention draws its own inputs
        judged,
        needs=frozenset({"hytopk"}),
        share=0.2,
        why_few="each example runs several interpreted kernels, forward and backward",
    )


JUDGEMENTS: dict[str, Judgement] = {
    judge.__name__: judge
    for judge in (
        attention_within_bounds,
        exact_attention_is_exact,
        unused_places_and_keys_do_not_matter,
        attention_rows_are_independent,
        fixed_point_keys_do_not_depend_on_order,
    )
}

PROPERTIES: tuple[Property, ...] = tuple(_property(judge) for judge in JUDGEMENTS.values())
