"""The optimiser: AdamW with float32 state and bf16 parameters, and the norm of the gradients.

Shapes: ``rows`` parameters, ``width`` 1.
"""

import torch

from .. import fused
from ..op import Draw, Op, Shape, Work, grid, streaming

FAMILY = "optimizer"


def adamw(implementation: str, regime: str = "") -> Op:
    """One step. PyTorch's alone is "in place"; the copy of the parameters to bf16 is one more kernel."""
    casts = regime != "in place"

    def build(inputs: Draw, shape: Shape) -> Work:
        N = shape["rows"] * shape["width"]
        grad, master, m = (inputs.normal(N, dtype="fp32") for _ in range(3))
        v = inputs.normal(N, dtype="fp32").square_()
        out = inputs.empty(N if casts else 0)
        if implementation == "triton":
            return Work(lambda: fused.adamw(grad, m, v, master, out, 10))
        step = torch.tensor(10.0, device=inputs.device)

        def call() -> None:
            torch._fused_adamw_(
                [master], [grad], [m], [v], [], [step], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1,
                eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            if casts:
                out.copy_(master)

        return Work(call)

    ours = implementation == "triton"
    return Op(
        name="adamw",
        implementation=implementation,
        dtype="fp32",
        regime=regime,
        family=FAMILY,
        cost=streaming(30.0 if casts else 28.0, 16.0),
        build=build,
        shapes={
            "quick": grid(rows=2**26, width=1) if casts else [],
            "glm-5.1": grid(rows=(2**28, 2**26, 10**9) if ours else (2**28, 2**26), width=1),
        },
        tiny={"rows": 1000, "width": 1},
        efficiency=0.95 if ours else 0.7,
        compile_s=0.5,
        triton=ours,
    )


def grad_norm() -> Op:
    def build(inputs: Draw, shape: Shape) -> Work:
        grad = inputs.normal(shape["rows"] * shape["width"], dtype="fp32")
        return Work(lambda: torch.linalg.vector_norm(grad))

    return Op(
        name="grad_norm",
        implementation="torch",
        dtype="fp32",
        family=FAMILY,
        cost=streaming(4.0, 1.0),
        build=build,
        shapes={"quick": grid(rows=2**26, width=1), "glm-5.1": grid(rows=(2**28, 2**26, 10**9), width=1)},
        tiny={"rows": 1000, "width": 1},
        efficiency=0.8,
    )


OPS = (adamw("triton"), adamw("torch", "then cast"), adamw("torch", "in place"), grad_norm())
