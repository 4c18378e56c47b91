"""Hardware descriptions: GPUs and the clusters built from them."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hyscale_simulator.descriptions import Description, Latency, Positive, Rate, Share, find

__all__ = ["Cluster", "Gpu", "TensorRates"]


# Upper ends far above any machine: a figure beyond them is in another unit.
Tflops = Annotated[Rate, Field(le=1e5)]
Bandwidth = Annotated[Rate, Field(le=1e5)]


class TensorRates(Description):
    """Dense tensor-core rates by input type."""

    bf16: Tflops
    fp8: Tflops | None = None


class NvLink(Description):
    """What collectives within a node reach, as measured."""

    bus_gb_per_s: Bandwidth
    """Bus bandwidth of large all-gathers and reduce-scatters."""
    step_us: Latency
    """Latency of one step of a ring."""
    table: Literal["", "h200-nccl"] = ""
    """Measured table in data/profiles, used instead of the two figures above where it has the size."""
    reduction_bus_gb_per_s: Rate | None = None
    """Bus bandwidth of an all-reduce done in the switch (NVLS)."""
    reduction_us: Latency = 0.0
    dispatch_gb_per_s: Rate | None = None
    """Copies of an expert dispatch kernel (DeepEP), all ranks of the node counted."""
    dispatch_us: Latency = 0.0
    source: str


class Gpu(Description):
    """One GPU, by its data sheet."""

    name: str
    source: str
    architecture: str
    """GPUs of one architecture run the same kernels: projections prefer them."""
    family: str
    """Which sustained rates of calibration.toml apply."""
    device: str
    """The name the driver gives it: what profile files are matched by."""
    tensor_tflops: TensorRates
    vector_fp32_tflops: Tflops
    """CUDA cores, fused multiply-adds counted as two."""
    memory_gb: Annotated[Rate, Field(le=1e4)]
    """Capacity, 10^9 bytes."""
    memory_tb_per_s: Annotated[Rate, Field(le=1e3)]
    sms: Positive
    nvlink_gb_per_s: Bandwidth
    """One direction, all links, by the data sheet: what nothing in ``nvlink`` may exceed."""
    nvlink: NvLink
    host_link_gb_per_s: Bandwidth
    """PCIe to the host, one direction, as usable."""
    sustained_tensor_fraction: Share | None = None
    """Sustained GEMM rate over the data sheet's; without it, the family's in calibration.toml."""

    @model_validator(mode="after")
    def _links(self) -> "Gpu":
        for name in ("bus_gb_per_s", "dispatch_gb_per_s"):
            reached = getattr(self.nvlink, name)
            if reached is not None and reached > self.nvlink_gb_per_s:
                raise ValueError(
                    f"nvlink.{name} = {reached}: at most the data sheet's nvlink_gb_per_s = "
                    f"{self.nvlink_gb_per_s} is possible"
                )
        return self

    def tensor_flops_per_s(self, dtype: str) -> float:
        """Peak rate for inputs of ``dtype``; ValueError when the GPU has none (no silent fallback)."""
        if dtype in ("bf16", "fp16"):
            return self.tensor_tflops.bf16 * 1e12
        if dtype == "fp8":
            if self.tensor_tflops.fp8 is None:
                raise ValueError(f"{self.name}: has no fp8 tensor cores; set the precision to 'bf16'")
            return self.tensor_tflops.fp8 * 1e12
        if dtype == "fp32":  # CUDA cores: what an fp32 einsum without TF32 runs on
            return self.vector_fp32_tflops * 1e12
        raise ValueError(f"{self.name}: no rate for dtype {dtype!r}; allowed: bf16, fp16, fp8, fp32")


class Cluster(Description):
    """Nodes of GPUs and the network between them."""

    name: str
    source: str
    gpu: str | Gpu
    """Name of a GPU description, or the description itself."""
    nodes: Positive
    gpus_per_node: Positive
    nics_per_node: Positive
    nic_gbit_per_s: Annotated[Rate, Field(le=1e5)]
    """Line rate of one NIC.  There are as many rails as NICs in a node."""
    nic_efficiency: Share
    """Payload rate / line rate."""
    network: Literal["infiniband", "roce"]
    leaf_latency_us: Latency
    """Small message between nodes under one switch."""
    core_latency_us: Latency
    """Small message that crosses the spine."""
    nodes_per_leaf: Positive
    dollars_per_gpu_hour: Rate | None = None

    @model_validator(mode="after")
    def _divides(self) -> "Cluster":
        if max(self.nics_per_node, self.gpus_per_node) % min(self.nics_per_node, self.gpus_per_node):
            raise ValueError(
                f"nics_per_node = {self.nics_per_node}; must divide gpus_per_node = {self.gpus_per_node}, "
                "or be a multiple of it"
            )
        if self.nodes > self.nodes_per_leaf and self.nodes % self.nodes_per_leaf:
            raise ValueError(f"nodes_per_leaf = {self.nodes_per_leaf}; must divide nodes = {self.nodes}")
        return self

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node

    def gpu_description(self) -> Gpu:
        """The GPU this cluster is built from."""
        if isinstance(self.gpu, Gpu):
            return self.gpu
        return find(Gpu, "gpus", self.gpu, f"cluster {self.name}: gpu")
