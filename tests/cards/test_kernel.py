# SPDX-License-Identifier: Apache-2.0
"""The kernel's text, and that what the driver is told is what its header says; both where CUDA's compiler is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvgrpc.transfer import _native

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADERS = """
#include <cuda.h>
#include <cstddef>
#include "cuda_driver.hpp"
using namespace kvgrpc::cuda;
static_assert(sizeof(CopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(sizeof(Copy2D) == sizeof(CUDA_MEMCPY2D));
static_assert(offsetof(Copy2D, target_pitch) == offsetof(CUDA_MEMCPY2D, dstPitch));
static_assert(offsetof(Copy2D, height) == offsetof(CUDA_MEMCPY2D, Height));
static_assert(sizeof(MemHandle) == sizeof(CUipcMemHandle) && sizeof(Uuid) == sizeof(CUuuid));
static_assert(success == CUDA_SUCCESS && not_ready == CUDA_ERROR_NOT_READY);
"""


def test_the_extension_carries_the_kernel() -> None:
    assert (CSRC / "paged_copy.cu").read_text() == _native.PAGED_COPY_SOURCE
    assert f"{_native.PAGED_COPY_NAME}(" in _native.PAGED_COPY_SOURCE


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_the_kernel_compiles(arch: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return  # the text is all that is used here
    command = [
        nvcc,
        f"-arch={arch}",
        "-cubin",
        "-Werror",
        "all-warnings",
        "-o",
        str(tmp_path / "kernel"),
        str(CSRC / "paged_copy.cu"),
    ]
    subprocess.run(command, check=True, timeout=100)


def test_the_drivers_structures_are_as_its_header_says(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return
    source = tmp_path / "headers.cu"
    source.write_text(HEADERS)
    command = [nvcc, "-std=c++17", "-I", str(CSRC), "-c", "-o", str(tmp_path / "headers.o"), str(source)]
    subprocess.run(command, check=True, timeout=100)
