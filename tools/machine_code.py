"""Reads the machine code of matching.py's kernels for an H100, which need not be there: is any
product lost, or overwritten while it runs? Not a test.

    python tools/machine_code.py

Two versions of NVIDIA's assembler (ptxas, which Triton brings along) made such faults in silence:
see the comments on the sums in the kernels. Run this with a new version of Triton. It needs no GPU.
It prints a line for each kernel, and exits with code 1 if anything is wrong.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matching


class CompileOnly:
    """Stands in for a Triton kernel. A launch only compiles it, as it would for its arguments."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled = []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **options):
        self.compiled.append(self.kernel.warmup(*args, grid=(1,), **options))


def compile_kernels(capability: int, channels: int, dtype: torch.dtype) -> list:
    """The kernels at the papers' size, compiled for a GPU that need not be there: match_kernel for
    q and for k, then gradient_kernel for both. capability: 86, say, or 90 for an H100."""
    gpu = SimpleNamespace(
        get_current_device=lambda: f"sm_{capability}",
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    packed = capability >= 90 and dtype == torch.bfloat16
    match = CompileOnly(matching.match_kernel)
    gradient = CompileOnly(matching.gradient_kernel)
    stand_ins = {"match_kernel": match, "gradient_kernel": gradient, "can_pack": lambda q: packed}
    q = torch.empty(128, 196, channels, dtype=dtype, device="meta")
    with (
        mock.patch.object(triton.runtime.driver, "_active", gpu),
        mock.patch.multiple(matching, **stand_ins),
    ):
        similarity, *winners = matching.match_by_kernel(q, q, 1)
        matching.gradients_by_kernel(similarity, q, q, *winners)
    return match.compiled + gradient.compiled


def disassembled(kernel) -> str:
    """A compiled kernel's machine code as text, by Triton's own copy of nvdisasm."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        return subprocess.run([tool, cubin], capture_output=True, text=True, check=True).stdout


def faults(code: str, is_gradient: bool) -> list[str]:
    """What is wrong in the machine code of a kernel for an H100."""
    found = []
    registers = re.findall(r"HGMMA\S+ (\w+),", code)  # into which each product is written
    if not registers:
        found.append("there is no product")
    if "RZ" in registers:  # this register is always zero
        found.append("products are lost")
    running = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", code)  # products, after each wait
    if is_gradient and set(running) != {"0x0"}:
        found.append("a product may be overwritten while it runs")
    return found


def main() -> int:
    wrong = False
    for dtype in (torch.float32, torch.bfloat16):
        for channels in (64, 512):
            names = ("match q", "match k", "gradient of q", "gradient of k")
            kernels = compile_kernels(90, channels, dtype)
            for name, kernel in zip(names, kernels, strict=True):
                found = faults(disassembled(kernel), name.startswith("gradient"))
                wrong = wrong or bool(found)
                print(f"{dtype}, {channels} channels, {name}: {', '.join(found) or 'right'}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
