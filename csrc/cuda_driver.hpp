// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's driver interface that copies need, loaded when it is first asked for: neither building nor
// starting needs anything of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvgrpc::cuda {

using Pointer = std::uint64_t;
using Context = void*;
using Stream = void*;
using Event = void*;
using Function = void*;
using Result = int;

constexpr Result success = 0;
constexpr Result not_ready = 600;

struct MemHandle {
    char bytes[64];
};

struct EventHandle {
    char bytes[64];
};

struct Uuid {
    char bytes[16];
};

// CUmemcpyAttributes.
struct CopyAttributes {
    int source_order;
    int source_hint[2];
    int target_hint[2];
    unsigned flags;
};

// CUDA_MEMCPY2D.
struct Copy2D {
    std::size_t source_x;
    std::size_t source_y;
    int source_type;
    const void* source_host;
    Pointer source_device;
    void* source_array;
    std::size_t source_pitch;
    std::size_t target_x;
    std::size_t target_y;
    int target_type;
    void* target_host;
    Pointer target_device;
    void* target_array;
    std::size_t target_pitch;
    std::size_t width_bytes;
    std::size_t height;
};

constexpr int host_memory = 1;    // CU_MEMORYTYPE_HOST
constexpr int device_memory = 2;  // CU_MEMORYTYPE_DEVICE

// What the driver answered to a call, in its words.
class CudaError : public std::runtime_error {
  public:
    CudaError(const char* call, Result result);
    Result result() const noexcept { return result_; }

  private:
    Result result_;
};

// There is no driver, or one too old. The text says which.
class NoDriver : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

struct Driver {
    Result (*cuInit)(unsigned);
    Result (*cuDriverGetVersion)(int*);
    Result (*cuGetErrorName)(Result, const char**);
    Result (*cuGetErrorString)(Result, const char**);
    Result (*cuDeviceGetCount)(int*);
    Result (*cuDeviceGetName)(char*, int, int);
    Result (*cuDeviceGetUuid_v2)(Uuid*, int);
    Result (*cuDeviceGetAttribute)(int*, int, int);
    Result (*cuDeviceGetPCIBusId)(char*, int, int);
    Result (*cuDevicePrimaryCtxRetain)(Context*, int);
    Result (*cuDevicePrimaryCtxRelease_v2)(int);
    Result (*cuCtxPushCurrent_v2)(Context);
    Result (*cuCtxPopCurrent_v2)(Context*);
    Result (*cuCtxGetCurrent)(Context*);
    Result (*cuCtxSetCurrent)(Context);
    Result (*cuMemGetInfo_v2)(std::size_t*, std::size_t*);
    Result (*cuMemAlloc_v2)(Pointer*, std::size_t);
    Result (*cuMemFree_v2)(Pointer);
    Result (*cuMemHostAlloc)(void**, std::size_t, unsigned);
    Result (*cuMemFreeHost)(void*);
    Result (*cuMemHostRegister_v2)(void*, std::size_t, unsigned);
    Result (*cuMemHostUnregister)(void*);
    Result (*cuMemGetAddressRange_v2)(Pointer*, std::size_t*, Pointer);
    Result (*cuPointerGetAttribute)(void*, int, Pointer);
    Result (*cuIpcGetMemHandle)(MemHandle*, Pointer);
    Result (*cuIpcOpenMemHandle_v2)(Pointer*, MemHandle, unsigned);
    Result (*cuIpcCloseMemHandle)(Pointer);
    Result (*cuStreamCreate)(Stream*, unsigned);
    Result (*cuStreamDestroy_v2)(Stream);
    Result (*cuStreamSynchronize)(Stream);
    Result (*cuStreamWaitEvent)(Stream, Event, unsigned);
    Result (*cuEventCreate)(Event*, unsigned);
    Result (*cuEventDestroy_v2)(Event);
    Result (*cuEventRecord)(Event, Stream);
    Result (*cuEventQuery)(Event);
    Result (*cuIpcOpenEventHandle)(Event*, EventHandle);
    Result (*cuMemcpyAsync)(Pointer, Pointer, std::size_t, Stream);
    Result (*cuMemcpy2DAsync_v2)(const Copy2D*, Stream);
    Result (*cuLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream,
                             void**, void**);
    // Since 12.8; null before. The later signature without the index of the failing copy has a name of its own.
    Result (*cuMemcpyBatchAsync)(Pointer*, Pointer*, std::size_t*, std::size_t, CopyAttributes*, std::size_t*,
                                 std::size_t, std::size_t*, Stream);
};

// The driver, loaded and begun. Throws NoDriver.
const Driver& driver();

// Throws CudaError unless the call went well.
void check(const char* call, Result result);

}  // namespace kvgrpc::cuda

// The driver's function, called and checked.
#define KVGRPC_CUDA(name, ...) ::kvgrpc::cuda::check(#name, ::kvgrpc::cuda::driver().name(__VA_ARGS__))
