"""Copies between the host and the device, and within the device. Shape: ``bytes``."""

from ..op import Cost, Draw, Op, Shape, Work, grid

FAMILY = "copies"
MIB = 2**20


def copy(name: str) -> Op:
    """``host_to_device`` and ``device_to_host`` of pinned memory, without waiting; ``device_copy``."""

    def build(inputs: Draw, shape: Shape) -> Work:
        near = inputs.normal(shape["bytes"] // 2)
        far = near.clone()
        if name != "device_copy":
            far = far.cpu()
            if inputs.device.type == "cuda":
                far = far.pin_memory()
        if name == "host_to_device":
            return Work(lambda: near.copy_(far, non_blocking=True))
        return Work(lambda: far.copy_(near, non_blocking=True))

    within = name == "device_copy"
    sizes = (64 * MIB, 256 * MIB, MIB, 16 * MIB, 512 * MIB)
    return Op(
        name=name,
        implementation="torch",
        dtype="bf16",
        family=FAMILY,
        cost=lambda shape: Cost(bytes=float(shape["bytes"]) * (2 if within else 1)),
        build=build,
        shapes={"quick": grid(bytes=sizes[:1]), "glm-5.1": grid(bytes=sizes)},
        tiny={"bytes": 4096},
        efficiency=0.9 if within else 0.011,
        compile_s=0.0,
        link=not within,
    )


OPS = tuple(copy(name) for name in ("host_to_device", "device_to_host", "device_copy"))
