"""Accelerators as data, for the cost formulas: what each can do, what it costs, and who says so.

Rates are a data sheet's peaks (dense, no sparsity); what a kernel reaches of them is an argument of the
formulas, never folded in here. Devices of a user's own (``services.simulator.devices``) may say otherwise.
"Offloading" and "Disaggregation" are Lamina's two papers: *Efficient and Economic Large Language Model
Inference with Attention Offloading* and *Efficient Heterogeneous Large Language Model Decoding with
Model-Attention Disaggregation*. "Splitwise" is *Efficient Generative LLM Inference Using Phase Splitting*.
Where a paper prints a number, that number is taken; the same chip under two names is two papers'
(Splitwise's H100 costs less than half of Lamina's).
Prices move; these are for comparing, not for buying.
"""

from collections.abc import Mapping
from dataclasses import dataclass

OFFLOADING = "Offloading, Table 1"
DISAGGREGATION = "Disaggregation, Table 1"
SPLITWISE = "Splitwise, Table I"
GPUS_PER_DGX = 8
NVIDIA_H100_USD_H = 11.06
BY_PURCHASE_PRICE = f"estimate: the H100's ${NVIDIA_H100_USD_H}/h by purchase price, {OFFLOADING}"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator. Bandwidths are GB/s (1e9 bytes) in one direction, ``network_gbps`` is Gbit/s.
    ``has_reached_rates``: rates are what a model reached there, no peaks."""

    name: str
    bf16_tflops: float
    memory_gb: float
    memory_gb_s: float
    power_w: float | None
    price_usd_h: float
    interchip_gb_s: float
    network_gbps: float
    figures_source: str
    price_source: str
    network_source: str
    has_reached_rates: bool = False

    @property
    def peak_flop_s(self) -> float:
        return self.bf16_tflops * 1e12

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9

    @property
    def memory_bytes_s(self) -> float:
        return self.memory_gb_s * 1e9

    @property
    def network_bytes_s(self) -> float:
        return self.network_gbps * 1e9 / 8


Catalogue = Mapping[str, DeviceSpec]
"""By name."""

H100 = DeviceSpec(
    name="h100",
    bf16_tflops=989,
    memory_gb=80,
    memory_gb_s=3350,
    power_w=700,
    price_usd_h=NVIDIA_H100_USD_H,
    interchip_gb_s=450,
    network_gbps=400,
    figures_source=DISAGGREGATION,
    price_source=DISAGGREGATION,
    network_source=DISAGGREGATION,
)
H20 = DeviceSpec(
    name="h20",
    bf16_tflops=148,
    memory_gb=96,
    memory_gb_s=4000,
    power_w=400,
    price_usd_h=4.63,
    interchip_gb_s=450,
    network_gbps=400,
    figures_source=DISAGGREGATION,
    price_source=f"{DISAGGREGATION}, itself an estimate by system cost",
    network_source=DISAGGREGATION,
)
TPU_V6E = DeviceSpec(
    name="tpu-v6e",
    bf16_tflops=918,
    memory_gb=32,
    memory_gb_s=1640,
    power_w=None,
    price_usd_h=2.70,
    interchip_gb_s=448,
    network_gbps=200,
    figures_source=DISAGGREGATION,
    price_source=DISAGGREGATION,
    network_source=DISAGGREGATION,
)
H200 = DeviceSpec(
    name="h200",
    bf16_tflops=989,
    memory_gb=141,
    memory_gb_s=4800,
    power_w=700,
    price_usd_h=12.17,
    interchip_gb_s=450,
    network_gbps=400,
    figures_source="NVIDIA H200 SXM data sheet",
    price_source=f"estimate: the H100's ${NVIDIA_H100_USD_H}/h by EC2 Capacity Blocks of 2024, 43.26 : 39.33",
    network_source="one ConnectX-7 per GPU, as the H100 in Disaggregation",
)
A100 = DeviceSpec(
    name="a100",
    bf16_tflops=312,
    memory_gb=80,
    memory_gb_s=1935,
    power_w=300,
    price_usd_h=5.30,
    interchip_gb_s=300,
    network_gbps=200,
    figures_source=f"memory: {OFFLOADING}; rest: NVIDIA A100 80GB PCIe data sheet (NVLink bridge)",
    price_source=BY_PURCHASE_PRICE,
    network_source="Offloading, section 6: 200 Gbit/s InfiniBand per GPU",
)
RTX_3090 = DeviceSpec(
    name="rtx-3090",
    bf16_tflops=71,
    memory_gb=24,
    memory_gb_s=936.2,
    power_w=350,
    price_usd_h=0.48,
    interchip_gb_s=32,
    network_gbps=200,
    figures_source=f"memory: {OFFLOADING}; rest: NVIDIA GA102 whitepaper (fp32 accumulate, PCIe 4.0 x16)",
    price_source=BY_PURCHASE_PRICE,
    network_source="Offloading, section 4.2: a 200 Gbit/s adapter for a memory device",
)
V100 = DeviceSpec(
    name="v100",
    bf16_tflops=125,
    memory_gb=32,
    memory_gb_s=900,
    power_w=300,
    price_usd_h=3.90,
    interchip_gb_s=150,
    network_gbps=12.5,
    figures_source="NVIDIA V100 SXM2 32GB data sheet; it has no bf16: the rate is fp16's",
    price_source="AWS p3dn.24xlarge on demand, $31.21/h for eight",
    network_source="AWS p3dn.24xlarge: 100 Gbit/s for eight",
)
A100_SXM = DeviceSpec(
    name="a100-sxm",
    bf16_tflops=312,
    memory_gb=80,
    memory_gb_s=2039,
    power_w=400,
    price_usd_h=17.6 / GPUS_PER_DGX,
    interchip_gb_s=300,
    network_gbps=200,
    figures_source=f"memory and power: {SPLITWISE}; rest: NVIDIA A100 80GB SXM data sheet",
    price_source=f"{SPLITWISE}: $17.6/h for eight",
    network_source=f"{SPLITWISE} (it prints GBps; section VI says Gbps)",
)
H100_SXM = DeviceSpec(
    name="h100-sxm",
    bf16_tflops=989,
    memory_gb=80,
    memory_gb_s=3355,
    power_w=700,
    price_usd_h=38 / GPUS_PER_DGX,
    interchip_gb_s=450,
    network_gbps=400,
    figures_source=f"memory and power: {SPLITWISE}; rest: NVIDIA H100 SXM data sheet",
    price_source=f"{SPLITWISE}: $38/h for eight",
    network_source=f"{SPLITWISE} (it prints GBps; section VI says Gbps)",
)
H100_SXM_CAPPED = DeviceSpec(
    name="h100-sxm-capped",
    bf16_tflops=989 / 1.3,
    memory_gb=80,
    memory_gb_s=3355,
    power_w=0.7 * 700,
    price_usd_h=38 / GPUS_PER_DGX,
    interchip_gb_s=450,
    network_gbps=400,
    figures_source="Splitwise-HHcap, IV-D: 70 % of a machine's power; prompts take 1.3 times as long in its"
    " profile, tokens as long as without",
    price_source=f"{SPLITWISE}: $38/h for eight",
    network_source=f"{SPLITWISE} (it prints GBps; section VI says Gbps)",
)
A40 = DeviceSpec(
    name="a40",
    bf16_tflops=149.7,
    memory_gb=48,
    memory_gb_s=696,
    power_w=300,
    price_usd_h=1.28,
    interchip_gb_s=56.25,
    network_gbps=100,
    figures_source="NVIDIA A40 data sheet (NVLink bridge)",
    price_source="CoreWeave, 7 February 2024, as Vidur's analyzer has it",
    network_source="assumption: half of the A100's",
)

DEVICES: Catalogue = {
    device.name: device
    for device in (H100, H20, A100, H200, TPU_V6E, V100, RTX_3090, A100_SXM, H100_SXM, H100_SXM_CAPPED, A40)
}
