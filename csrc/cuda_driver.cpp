// SPDX-License-Identifier: Apache-2.0
#include "cuda_driver.hpp"

#include <dlfcn.h>

namespace kvgrpc::cuda {
namespace {

std::string sentence(const char* call, Result result) {
    const char* name = nullptr;
    const char* text = nullptr;
    driver().cuGetErrorName(result, &name);
    driver().cuGetErrorString(result, &text);
    return std::string(call) + ": " + (name != nullptr ? name : std::to_string(result).c_str()) + " (" +
           (text != nullptr ? text : "unknown error") + ")";
}

template <typename F>
void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) throw NoDriver(std::string("the CUDA driver is too old: it has no ") + name);
}

#define FIND(name) find(library, #name, found.name)

Driver load() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw NoDriver("this machine has no CUDA driver (libcuda.so.1)");
    Driver found{};
    FIND(cuInit);
    FIND(cuDriverGetVersion);
    FIND(cuGetErrorName);
    FIND(cuGetErrorString);
    FIND(cuDeviceGetCount);
    FIND(cuDeviceGetName);
    FIND(cuDeviceGetUuid_v2);
    FIND(cuDeviceGetAttribute);
    FIND(cuDeviceGetPCIBusId);
    FIND(cuDevicePrimaryCtxRetain);
    FIND(cuDevicePrimaryCtxRelease_v2);
    FIND(cuCtxPushCurrent_v2);
    FIND(cuCtxPopCurrent_v2);
    FIND(cuCtxGetCurrent);
    FIND(cuCtxSetCurrent);
    FIND(cuMemGetInfo_v2);
    FIND(cuMemAlloc_v2);
    FIND(cuMemFree_v2);
    FIND(cuMemHostAlloc);
    FIND(cuMemFreeHost);
    FIND(cuMemHostRegister_v2);
    FIND(cuMemHostUnregister);
    FIND(cuMemGetAddressRange_v2);
    FIND(cuPointerGetAttribute);
    FIND(cuIpcGetMemHandle);
    FIND(cuIpcOpenMemHandle_v2);
    FIND(cuIpcCloseMemHandle);
    FIND(cuStreamCreate);
    FIND(cuStreamDestroy_v2);
    FIND(cuStreamSynchronize);
    FIND(cuStreamWaitEvent);
    FIND(cuEventCreate);
    FIND(cuEventDestroy_v2);
    FIND(cuEventRecord);
    FIND(cuEventQuery);
    FIND(cuIpcOpenEventHandle);
    FIND(cuMemcpyAsync);
    FIND(cuMemcpy2DAsync_v2);
    FIND(cuLaunchKernel);
    found.cuMemcpyBatchAsync =
        reinterpret_cast<decltype(found.cuMemcpyBatchAsync)>(dlsym(library, "cuMemcpyBatchAsync"));
    const Result result = found.cuInit(0);
    if (result != success) {
        const char* name = nullptr;
        found.cuGetErrorName(result, &name);
        throw NoDriver(std::string("the CUDA driver does not start: ") + (name != nullptr ? name : "unknown error"));
    }
    return found;
}

}  // namespace

CudaError::CudaError(const char* call, Result result) : std::runtime_error(sentence(call, result)), result_(result) {}

const Driver& driver() {
    static const Driver loaded = load();  // a failure is tried again at the next call
    return loaded;
}

void check(const char* call, Result result) {
    if (result != success) throw CudaError(call, result);
}

}  // namespace kvgrpc::cuda
