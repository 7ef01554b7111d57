"""What the planner knows about a machine, and named machines to plan for without having them.

Owns the facts' form and the recorded or assumed facts of the named ones. Measures nothing: hardware.py does.
"""

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30

Backend = Literal["metal", "cuda", "cpu"]


def slack_bytes(ram_bytes: int) -> int:
    """Give how much of the available memory is left alone: 1.5 GiB or 5 % of RAM, but at most a fifth."""
    return min(max(3 * GIB // 2, ram_bytes // 20), ram_bytes // 5)


@dataclass(frozen=True)
class Machine:
    """Facts about one machine, in bytes; 0 where there is no such thing.

    A machine without GPU memory of its own is unified: one pool for everything. `ram_bytes` is what this process may
    use at most, so a container's limit where there is one; `available_bytes` is what it could take now without
    swapping. `gpu_bytes` is one GPU's memory. `working_set_bytes` is what Metal recommends. `ssd_bytes_per_s` is the
    rate of random record reads. A simulated machine can be planned for, never loaded on.
    """

    name: str
    backend: Backend
    ram_bytes: int
    available_bytes: int
    gpu_bytes: int = 0
    gpu_available_bytes: int = 0
    num_gpus: int = 0
    working_set_bytes: int = 0
    page_cache_bytes: int = 0
    ssd_bytes_per_s: int = 0
    simulated: bool = False
    about: str = ""

    @property
    def is_discrete(self) -> bool:
        return self.gpu_bytes > 0


def _mac(gib: int, *, working_set_bytes: int = 0, ssd_bytes_per_s: int = 0, about: str = "") -> Machine:
    """Describe a Mac: 4 GiB in use by others; Metal's working set three quarters of RAM unless recorded."""
    return Machine(
        name=f"mac-{gib}",
        backend="metal",
        ram_bytes=gib * GIB,
        available_bytes=(gib - 4) * GIB,
        working_set_bytes=working_set_bytes or gib * GIB * 3 // 4,
        ssd_bytes_per_s=ssd_bytes_per_s,
        simulated=True,
        about=about or "working set assumed: 75 % of RAM",
    )


def _spark() -> Machine:
    """Describe a GB10: CPU and GPU share one pool, so pinning frees nothing, and neither does the page cache."""
    return Machine(
        name="dgx-spark",
        backend="cuda",
        ram_bytes=119 * GIB,
        available_bytes=111 * GIB,
        page_cache_bytes=8 * GIB,
        num_gpus=1,
        simulated=True,
        about="128 GB LPDDR5X shared by CPU and GPU; the n-gram table on NVMe, 8 GiB kept free for its page cache",
    )


def _gpu(name: str, num_gpus: int, gpu_gib: int, ram_gib: int, about: str) -> Machine:
    return Machine(
        name=name,
        backend="cuda",
        ram_bytes=ram_gib * GIB,
        available_bytes=(ram_gib - 8) * GIB,
        gpu_bytes=gpu_gib * GIB,
        gpu_available_bytes=gpu_gib * GIB - GIB,
        num_gpus=num_gpus,
        simulated=True,
        about=about,
    )


NAMED: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _mac(8),
        _mac(
            16,
            working_set_bytes=int(10.9 * GIB),
            ssd_bytes_per_s=1_500_000_000,
            about="working set reported from M1 to M4 Macs of 16 GB; SSD: an M2 mini of 256 GB",
        ),
        _mac(24, ssd_bytes_per_s=3_700_000_000, about="working set assumed: 75 % of RAM; SSD: an M4 Pro of 512 GB"),
        _mac(32),
        _mac(36),
        _mac(
            48,
            working_set_bytes=40_200_896_512,
            ssd_bytes_per_s=17_300_000_000,
            about="working set and SSD recorded on an M5 Pro",
        ),
        _mac(64),
        _mac(96),
        _mac(128),
        _spark(),
        _gpu("rtx-pro-6000", 1, 95, 128, "96 GB of GPU memory, 128 GB of system RAM assumed"),
        _gpu("h200", 1, 139, 126, "141 GB of GPU memory; GPU and RAM as recorded on the machine of bench/LOG.md"),
        _gpu("b300x4", 4, 268, 2048, "4 GPUs of 288 GB, 2 TB of system RAM assumed; slotpy computes on one of them"),
    )
}
